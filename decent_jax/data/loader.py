"""Batches addressed by (step, replica), from any random-access source of records.

The order of the examples is one stream, the same for any number of replicas and processes: row j
of replica r at step t is example `t * batch_size + r * B + j` of it, `B = batch_size //
num_replicas`. So a resumed run seeks to its step instead of reading up to it, and the global
batch of a step holds the same records whatever the layout.

With a partition there is such a stream for every replica, of its own records alone: row j at step
t is example `t * B + j` of it. Which processes and devices hold the replicas still has no part;
another number of replicas is another partition.

A source may also cut its batches itself, into blocks of several shapes: then it has the methods
`train_blocks(num_replicas, batch_size, seed)` and `eval_blocks(num_replicas, batch_size)`;
they return a sequence whose item `step * num_replicas + replica` is a replica's block, and whose
`steps` are those of an epoch. What `batch_size` counts is up to it.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from decent_jax.data.partition import Partition


class Batches(Iterator):
    """An iterator with threads or processes behind it; `close` (or `with`) stops them."""

    def __init__(self, iterator):
        self._iterator = iterator

    def __next__(self) -> Any:
        if self._iterator is None:
            raise ValueError("the batches are closed")
        return next(self._iterator)

    def close(self) -> None:
        """Stops them; `next` raises ValueError afterwards. May be called twice."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None  # frees the shared memory of batches nobody has taken

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


def train_batches(
    source,
    *,
    seed: int,
    num_replicas: int,
    batch_size: int,
    replicas: Sequence[int] | None = None,
    start_step: int = 0,
    prefetch: int = 4,
    num_threads: int | None = None,
    workers: int = 0,
    partition: Partition | None = None,
) -> Batches:
    """Endless training batches of this process, from step `start_step` on.

    Each epoch visits every record once in an order of its own; a batch may straddle two epochs.
    With a partition, each epoch of a replica visits every record of that replica once. Where the
    source has a method `augment(record, generator)`, the batches hold what it makes of records;
    the random numbers are those of the example's place in the stream, whoever reads it.

    Args:
      source: `len(source)` records, `source[i]` an array or a pytree of arrays of equal shapes
        (a grain `RandomAccessDataSource` such as `TokenWindows`). Read from several threads.
      seed: any integer >= 0; chooses the order.
      num_replicas: n, of the whole run.
      batch_size: records a step over all replicas, a multiple of `num_replicas`.
      replicas: (L,) the replicas this process holds, in the order it wants them; None means all.
      start_step: the step of the first batch; any value costs the same.
      prefetch: batches read ahead; 0 reads in the calling thread.
      num_threads: threads that read ahead; None means as many as `prefetch`, at most the cores.
      workers: processes that read ahead in the place of threads, each one batch after the other;
        for sources that compute much in Python. They are spawned, with a copy of the source.
      partition: which records belong to which replica; None: all replicas share all of them.

    Returns:
      An iterator of records stacked to shape (L, B, ...), for `TokenWindows` int32 of shape
      (L, B, seq_len + 1).

    Raises:
      ValueError: sizes that do not divide, replicas that do not exist, an empty source, a negative
        seed or step, a partition of another source or for another number of replicas.
    """
    import grain  # imports jax, which the workers of prepare text can do without

    replicas = _checked(source, num_replicas, batch_size, replicas)
    if start_step < 0:
        raise ValueError(f"start_step must be at least 0, got {start_step}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    if hasattr(source, "train_blocks"):
        rows = source.train_blocks(num_replicas, batch_size, seed)
    elif partition is None:
        rows = _rows(source, np.random.SeedSequence(seed), batch_size // num_replicas)
    else:
        rows = _OwnRows(source, seed, batch_size // num_replicas, replicas, partition, num_replicas)
    blocks = _TrainBlocks(rows, num_replicas, replicas, start_step)
    return _iterate(grain.MapDataset.source(blocks), prefetch, num_threads, workers)


def eval_batches(
    source,
    *,
    num_replicas: int,
    batch_size: int,
    max_batches: int = 0,
    replicas: Sequence[int] | None = None,
    prefetch: int = 4,
    num_threads: int | None = None,
    workers: int = 0,
) -> Batches:
    """Every record of `source` once, in order; the last batch is padded with zeros.

    Arguments as for `train_batches`; `max_batches` > 0 stops after so many batches.

    Returns:
      An iterator of `(records, weights)`: records stacked to shape (L, B, ...) and float32
      weights of shape (L, B), 1 for a record and 0 for padding. All processes see the same number
      of batches.
    """
    import grain

    replicas = _checked(source, num_replicas, batch_size, replicas)
    if hasattr(source, "eval_blocks"):
        own = source.eval_blocks(num_replicas, batch_size)
        blocks: Any = _OwnEvalBlocks(own, num_replicas, replicas, max_batches)
    else:
        blocks = _EvalBlocks(source, batch_size, batch_size // num_replicas, replicas, max_batches)
    return _iterate(grain.MapDataset.source(blocks), prefetch, num_threads, workers)


def steps_per_epoch(source, batch_size: int, num_replicas: int = 1, seed: int = 0) -> int:
    """Training steps until every record has been seen: the last may reach into the next epoch."""
    if hasattr(source, "train_blocks"):
        return source.train_blocks(num_replicas, batch_size, seed).steps
    return -(-len(source) // batch_size)


def _rows(source, seed: np.random.SeedSequence, per_replica: int):
    """Item i: the records `i * per_replica` and following of an endless shuffled stream."""
    import grain

    # grain shuffles epoch e by seed + e: without the hash, seed 1 would be seed 0 an epoch later
    order, drawing = (int(word) for word in seed.generate_state(2, np.uint32))
    dataset = grain.MapDataset.source(source).shuffle(order).repeat()
    if hasattr(source, "augment"):
        dataset = dataset.random_map(source.augment, seed=drawing)
    return dataset.batch(per_replica, drop_remainder=True)


class _OwnRows:
    """Item `t * n + r`: the records of replica r at step t, of a stream of its own.

    Only for the replicas of this process.
    """

    def __init__(self, source, seed, per_replica, replicas, partition, num_replicas):
        if partition.num_replicas != num_replicas or partition.num_records != len(source):
            raise ValueError(
                f"the partition shares {partition.num_records} records out over"
                f" {partition.num_replicas} replicas, got a source of {len(source)} and"
                f" {num_replicas} replicas"
            )
        self.rows = {
            replica: _rows(
                _Subset(source, partition.records(replica)),
                np.random.SeedSequence(seed, spawn_key=(replica,)),
                per_replica,
            )
            for replica in replicas
        }
        self.num_replicas = num_replicas

    def __len__(self) -> int:
        return min(map(len, self.rows.values()))  # endless enough

    def __getitem__(self, index: int):
        step, replica = divmod(index, self.num_replicas)
        return self.rows[replica][step]


class _Subset:
    """The records of `source` at `indices`."""

    def __init__(self, source, indices):
        self.source, self.indices = source, indices
        if hasattr(source, "augment"):
            self.augment = source.augment

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int):
        return self.source[int(self.indices[index])]

    def __repr__(self) -> str:
        return f"{len(self)} of the records of {self.source!r}"


class _TrainBlocks:
    """Item t: the rows of `replicas` at step `start + t`.

    Item `step * n + r` of `rows` are those of replica r.
    """

    def __init__(self, rows, num_replicas, replicas, start):
        self.rows, self.num_replicas, self.replicas = rows, num_replicas, replicas
        self.start = start

    def __len__(self) -> int:
        return len(self.rows) // self.num_replicas - self.start

    def __getitem__(self, index: int):
        import jax

        step = self.start + index
        blocks = [self.rows[step * self.num_replicas + replica] for replica in self.replicas]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)


class _EvalBlocks:
    """Item t: the rows of `replicas` in evaluation batch t, with their weights."""

    def __init__(self, source, batch_size, per_replica, replicas, max_batches):
        self.source = source
        self.batch_size = batch_size
        self.shape = (len(replicas), per_replica)
        self.offsets = (np.array(replicas)[:, None] * per_replica + np.arange(per_replica)).ravel()
        batches = -(-len(source) // batch_size)
        self.batches = min(batches, max_batches) if max_batches > 0 else batches

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, step: int):
        import jax

        indices = step * self.batch_size + self.offsets
        real = indices < len(self.source)
        padding = None if real.all() else jax.tree.map(np.zeros_like, self.source[0])
        records = [
            self.source[int(i)] if exists else padding
            for i, exists in zip(indices, real, strict=True)
        ]
        stacked = jax.tree.map(lambda *leaves: self._block(np.stack(leaves)), *records)
        return stacked, self._block(real.astype(np.float32))

    def _block(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(self.shape + rows.shape[1:])


class _OwnEvalBlocks:
    """Item t: the blocks of `replicas` in evaluation batch t, with their `weight` taken out."""

    def __init__(self, blocks, num_replicas, replicas, max_batches):
        self.blocks, self.num_replicas, self.replicas = blocks, num_replicas, replicas
        self.batches = min(blocks.steps, max_batches) if max_batches > 0 else blocks.steps

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, step: int):
        own = [self.blocks[step * self.num_replicas + replica] for replica in self.replicas]
        stacked = {name: np.stack([block[name] for block in own]) for name in own[0]}
        return stacked, stacked.pop("weight")


def _checked(source, num_replicas, batch_size, replicas) -> list[int]:
    """The replicas asked for."""
    if num_replicas < 1 or batch_size < 1 or batch_size % num_replicas:
        raise ValueError(
            f"batch_size must be a multiple of num_replicas, got {batch_size} and {num_replicas}"
        )
    replicas = list(range(num_replicas) if replicas is None else replicas)
    if not replicas or not all(0 <= replica < num_replicas for replica in replicas):
        raise ValueError(f"replicas must be some of 0 to {num_replicas - 1}, got {replicas}")
    if not len(source):
        raise ValueError("the source has no records")
    return replicas


def _iterate(dataset, prefetch: int, num_threads: int | None, workers: int) -> Batches:
    import grain

    if num_threads is None:
        num_threads = min(prefetch, os.cpu_count() or 1)
    options = grain.ReadOptions(
        num_threads=num_threads if prefetch and not workers else 0,
        prefetch_buffer_size=prefetch if num_threads and not workers else 0,
    )
    batches = dataset.to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain reads flags of its own; a notebook parses none
        ahead = max(prefetch // workers, 1)
        batches = batches.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=ahead)
        )
    return Batches(iter(batches))
