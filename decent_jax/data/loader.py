"""Batches addressed by (step, replica), from any random-access source of records.

The examples form one stream, the same for any number of replicas and processes: row j of replica r
at step t is example `t * batch_size + r * B + j`, where `B = batch_size // num_replicas`. A resumed
run therefore seeks to its step instead of reading up to it. The global batch of a step holds the
same records for any number of replicas and processes.

With a partition there is one such stream per replica, over the replica's own records: row j at step
t is example `t * B + j`. The stream does not depend on the placement of replicas on processes and
devices, but a different number of replicas changes the partition.

A source may also form its own batches, in blocks of several shapes. Such a source has the methods
`train_blocks(num_replicas, batch_size, seed)` and `eval_blocks(num_replicas, batch_size)`. Each
returns a sequence whose item `step * num_replicas + replica` is that replica's block at that step,
and whose attribute `steps` is the number of steps per epoch. The source decides what `batch_size`
counts.
"""

import contextlib
import errno
import gc
import os
import re
import signal
from collections.abc import Iterator, Sequence
from shutil import disk_usage
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from decent_jax.data import worker_pool
from decent_jax.data.partition import Partition
from decent_jax.ground.errors import DataError, unforeseen
from decent_jax.ground.format import format_bytes

_AT_ONCE = 256  # records that `all_records` stacks at a time
_MEMORY = "/dev/shm"  # the file system through which readers pass their batches


class Batches(Iterator[Any]):
    """An iterator over batches from threads or ``workers``, which `close` (or `with`) stops.

    `next` raises DataError if a batch cannot be read.
    """

    def __init__(self, iterator: Any, workers: int = 0):
        self._iterator, self._workers = iterator, workers
        self._starts = workers > 0

    def __next__(self) -> Any:
        if self._iterator is None:
            raise ValueError("the batches are closed")
        # A terminal or a launcher also signals the readers, but only this process may stop them.
        deaf = worker_pool.deaf_to_signals() if self._starts else contextlib.nullcontext()
        self._starts = False
        with _failures_told(self._workers), deaf:
            return next(self._iterator)

    def close(self) -> None:
        """Stops the readers; `next` raises ValueError afterwards. May be called twice."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None  # frees the shared memory of unconsumed batches
            if self._workers:
                gc.collect()  # frees the batches that grain's threads hold

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Partitioned(NamedTuple):
    """A source whose records are divided among the replicas; it must not form its own batches."""

    source: Any
    partition: Partition


def train_batches(
    source: Any,
    *,
    seed: int,
    num_replicas: int,
    batch_size: int,
    replicas: Sequence[int] | None = None,
    start_step: int = 0,
    prefetch: int = 4,
    workers: int = 0,
) -> Batches:
    """An endless iterator over this process's training batches, from step `start_step` on.

    Each epoch visits every record once, in a new order; a batch may straddle two epochs. With a
    partition, each epoch of a replica visits every record of that replica once. If the source has a
    method `of_epoch(index, epoch)`, the record read is `source[of_epoch(index, epoch)]`, not
    `source[index]`. If it has a method `augment(record, generator)`, the batches hold its results;
    the random numbers depend only on the example's position in the stream, not on the process that
    reads it.

    Args:
      source: records that all replicas share, or `Partitioned`. `source[i]` is an array or a pytree
        of arrays, of equal shapes for all i < `len(source)` (a grain `RandomAccessDataSource` such
        as `TokenWindows`). Several threads read from it.
      seed: any integer >= 0; determines the order.
      num_replicas: n, the number of replicas of the whole run.
      batch_size: records per step over all replicas, a multiple of `num_replicas`.
      replicas: (L,) the replicas of this process, in the order of the result; None means all.
      start_step: the step of the first batch; any value costs the same.
      prefetch: number of batches to read ahead, with as many threads, but at most one per core;
        0 reads in the calling thread.
      workers: number of processes that read ahead instead of threads, for sources that do much
        work in Python; each produces whole batches. They are spawned, each with a copy of the
        source.

    Returns:
      An iterator over records stacked to shape (L, B, ...), such as int32 of shape
      (L, B, seq_len + 1) for `TokenWindows`.
    """
    import grain  # imports jax, which the workers of `decent_jax.commands.prepare` do not need

    replicas = range(num_replicas) if replicas is None else replicas
    if isinstance(source, Partitioned):
        rows = _OwnRows(source, seed, batch_size // num_replicas, replicas, num_replicas)
    else:
        rows = train_rows(source, seed=seed, num_replicas=num_replicas, batch_size=batch_size)
    blocks = _Blocks(rows, num_replicas, replicas)
    return _iterate(grain.MapDataset.source(blocks)[start_step:], workers, prefetch)


def eval_batches(
    source: Any,
    *,
    num_replicas: int,
    batch_size: int,
    max_batches: int = 0,
    replicas: Sequence[int] | None = None,
    workers: int = 0,
) -> Batches:
    """An iterator over all records of `source`, once and in order; the last batch is zero-padded.

    Arguments are as for `train_batches`; `max_batches` > 0 stops after that many batches.

    Returns:
      An iterator over `(records, weights)`: records stacked to shape (L, B, ...), and float32
      weights of shape (L, B), 1 for a record and 0 for padding. All processes get the same number
      of batches.
    """
    import grain

    replicas = range(num_replicas) if replicas is None else replicas
    own = hasattr(source, "eval_blocks")
    if own:
        rows = source.eval_blocks(num_replicas, batch_size)
    else:
        rows = _EvalRows(source, num_replicas, batch_size // num_replicas)
    steps = min(rows.steps, max_batches) if max_batches > 0 else rows.steps
    dataset = grain.MapDataset.source(_Blocks(rows, num_replicas, replicas))[:steps]
    dataset = dataset.map(_without_weight) if own else dataset
    return _iterate(dataset, workers)


class Numbers:
    """A source whose records are the indices of another source, batched in the same order."""

    def __init__(self, source: Any):
        self._source = source
        if hasattr(source, "of_epoch"):
            self.of_epoch = source.of_epoch

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, number: int) -> np.int32:
        return np.int32(number)


def is_fixed(source: Any) -> bool:
    """Whether an index always gives the same record: no random `augment` and no `train_blocks`."""
    draws = hasattr(source, "augment") and not getattr(source, "fixed", False)
    return not draws and not hasattr(source, "train_blocks")


def all_records(source: Any) -> Any:
    """All records of an `is_fixed` source, stacked in order: (N, ...).

    Raises:
      DataError: a record cannot be read.
    """
    import grain
    import jax

    dataset = grain.MapDataset.range(_count(source)).map(_reader(source)).batch(_AT_ONCE)
    with _iterate(dataset, workers=0) as parts:
        return jax.tree.map(lambda *part: np.concatenate(part), *parts)


def bytes_of_all(source: Any) -> int:
    """The size of `all_records` in bytes, computed from the first record."""
    import jax

    record = jax.tree.leaves(_reader(source)(0))
    return _count(source) * sum(np.asarray(leaf).nbytes for leaf in record)


def _count(source: Any) -> int:
    """The number of valid indices, above `len(source)` if `of_epoch` selects views of a record."""
    return getattr(source, "numbers", len(source))


def _reader(source: Any):
    if not hasattr(source, "augment"):
        return source.__getitem__
    return lambda number: source.augment(source[number], None)


def train_rows(source: Any, *, seed: int, num_replicas: int, batch_size: int) -> Any:
    """A sequence whose item ``step * num_replicas + replica`` is a replica's block (B, ...).

    Arguments are as for `train_batches`, but `source` may not be `Partitioned`.
    """
    if hasattr(source, "train_blocks"):
        return source.train_blocks(num_replicas, batch_size, seed)
    everything = range(len(source))
    return _rows(source, everything, np.random.SeedSequence(seed), batch_size // num_replicas)


def steps_per_epoch(source: Any, batch_size: int, num_replicas: int = 1, seed: int = 0) -> int:
    """Training steps that read every record once; the last may extend into the next epoch."""
    if hasattr(source, "train_blocks"):
        return source.train_blocks(num_replicas, batch_size, seed).steps
    return -(-len(source) // batch_size)


def _rows(source, records, seed: np.random.SeedSequence, per_replica: int):
    """A sequence whose item i is `per_replica` records of an endless shuffled stream.

    Item i begins at position `i * per_replica` of the stream; `records` are the indices to shuffle.
    """
    import grain

    # grain shuffles epoch e with seed + e: without a hash, seed 1 would be seed 0 one epoch ahead
    order, drawing = (int(word) for word in seed.generate_state(2, np.uint32))

    def of_epoch(position: int, index: int):
        return source.of_epoch(index, position // len(records))

    dataset = grain.MapDataset.source(records).shuffle(order).repeat()
    if hasattr(source, "of_epoch"):
        dataset = dataset.map_with_index(of_epoch)
    dataset = dataset.map(source.__getitem__)
    if hasattr(source, "augment"):
        dataset = dataset.random_map(source.augment, seed=drawing)
    return dataset.batch(per_replica, drop_remainder=True)


class _OwnRows:
    """Item `t * n + r`: the records of replica r at step t, from the replica's own stream.

    It holds only the replicas of this process.
    """

    def __init__(self, own: Partitioned, seed, per_replica, replicas, num_replicas):
        self.rows = {
            replica: _rows(
                own.source,
                own.partition.records(replica),
                np.random.SeedSequence(seed, spawn_key=(replica,)),
                per_replica,
            )
            for replica in replicas
        }
        self.num_replicas = num_replicas

    def __len__(self) -> int:
        return min(map(len, self.rows.values()))  # practically endless

    def __getitem__(self, index: int):
        step, replica = divmod(index, self.num_replicas)
        return self.rows[replica][step]


class _Blocks:
    """Item t: the rows `rows[t * n + r]` of `replicas` at step t."""

    def __init__(self, rows, num_replicas, replicas):
        self.rows, self.num_replicas, self.replicas = rows, num_replicas, replicas

    def __len__(self) -> int:
        return len(self.rows) // self.num_replicas

    def __getitem__(self, index: int):
        import jax

        blocks = [self.rows[index * self.num_replicas + replica] for replica in self.replicas]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)


class _EvalRows:
    """Item `t * n + r`: (records, weights) of replica r in evaluation batch t."""

    def __init__(self, source, num_replicas, per_replica):
        self.source, self.num_replicas, self.per_replica = source, num_replicas, per_replica
        self.steps = -(-len(source) // (num_replicas * per_replica))

    def __len__(self) -> int:
        return self.steps * self.num_replicas

    def __getitem__(self, index: int):
        import jax

        indices = index * self.per_replica + np.arange(self.per_replica)
        real = indices < len(self.source)
        padding = None if real.all() else jax.tree.map(np.zeros_like, self.source[0])
        records = [
            self.source[int(i)] if exists else padding
            for i, exists in zip(indices, real, strict=True)
        ]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *records), real.astype(np.float32)


def _without_weight(block: dict) -> tuple[dict, np.ndarray]:
    return block, block.pop("weight")


def _iterate(dataset, workers: int, prefetch: int = 4) -> Batches:
    import grain

    ahead = 0 if workers else prefetch
    options = grain.ReadOptions(
        num_threads=min(ahead, os.cpu_count() or 1), prefetch_buffer_size=ahead
    )
    batches = dataset.to_iter_dataset(options)
    if not workers:
        return Batches(iter(batches))
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain reads its own flags, which a notebook never parses
    ahead = max(prefetch // workers, 1)
    batches = batches.mp_prefetch(
        grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=ahead),
        worker_pool.of_its_parent,
    )
    with _failures_told(workers):
        return Batches(iter(batches), workers)


@contextlib.contextmanager
def _failures_told(workers: int) -> Iterator[None]:
    """A context that raises DataError, with one sentence, if a batch cannot be read."""
    try:
        yield
    except (DataError, StopIteration):
        raise
    except Exception as error:  # a user's source may raise anything
        died = re.search(r"terminated unexpectedly with exit code (-?\d+)", str(error))
        code = int(died[1]) if died else 0
        if workers and (code == -signal.SIGBUS or getattr(error, "errno", 0) == errno.ENOSPC):
            size, _, free = map(format_bytes, disk_usage(_MEMORY))
            raise DataError(
                f"{_MEMORY} has {size}, {free} of it free, which is too little for the batches of "
                f"{workers} readers; make it larger (docker run --shm-size), or set data.workers=0"
            ) from error
        if died:
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise DataError(
                f"one of the {workers} readers (data.workers) {how}; if memory is short, use fewer"
            ) from error
        raise DataError(f"a batch cannot be read: {unforeseen(error)}") from error
