"""Batches addressed by (step, replica), from any random-access source of records.

The order of the examples is one stream, the same for any number of replicas and processes: row j
of replica r at step t is example ``t * batch_size + r * B + j`` of it, ``B = batch_size //
num_replicas``. So a resumed run seeks to its step instead of reading up to it, and the global
batch of a step holds the same records whatever the layout.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np


class Batches(Iterator):
    """An iterator with threads behind it; ``close`` (or ``with``) stops them."""

    def __init__(self, iterator):
        self._iterator = iterator

    def __next__(self) -> Any:
        return next(self._iterator)

    def close(self) -> None:
        """Stops the threads; ``next`` raises ValueError afterwards. May be called twice."""
        self._iterator.close()

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
    process_index: int = 0,
    process_count: int = 1,
    start_step: int = 0,
    prefetch: int = 4,
    num_threads: int | None = None,
) -> Batches:
    """Endless training batches of this process, from step ``start_step`` on.

    Each epoch visits every record once in an order of its own; a batch may straddle two epochs.

    Args:
      source: ``len(source)`` records, ``source[i]`` an array or a pytree of arrays of equal shapes
        (a grain ``RandomAccessDataSource`` such as ``TokenWindows``). Read from several threads.
      seed: any integer >= 0; chooses the order.
      num_replicas: n, of the whole run.
      batch_size: records a step over all replicas, a multiple of ``num_replicas``.
      process_index: p; this process holds replicas ``[p * L, (p + 1) * L)``.
      process_count: P, a divisor of ``num_replicas``; L = n // P.
      start_step: the step of the first batch; any value costs the same.
      prefetch: batches read ahead; 0 reads in the calling thread.
      num_threads: threads that read ahead; None means as many as ``prefetch``, at most the cores.

    Returns:
      An iterator of records stacked to shape (L, B, ...), for ``TokenWindows`` int32 of shape
      (L, B, seq_len + 1).

    Raises:
      ValueError: sizes that do not divide, an empty source, a negative seed or step.
    """
    import grain  # imports jax, which the workers of prepare_text can do without

    per_replica, local = _layout(source, num_replicas, batch_size, process_index, process_count)
    if start_step < 0:
        raise ValueError(f"start_step must be at least 0, got {start_step}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    # grain shuffles epoch e by seed + e: without the hash, seed 1 would be seed 0 an epoch later
    order = int(np.random.SeedSequence(seed).generate_state(1, np.uint32)[0])
    dataset = (
        grain.MapDataset.source(source)
        .shuffle(order)
        .repeat()
        .batch(per_replica, drop_remainder=True)
        .batch(local, drop_remainder=True)[process_index::process_count]
    )
    return _iterate(dataset, start_step, prefetch, num_threads)


def eval_batches(
    source,
    *,
    num_replicas: int,
    batch_size: int,
    max_batches: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    prefetch: int = 4,
    num_threads: int | None = None,
) -> Batches:
    """Every record of ``source`` once, in order; the last batch is padded with zeros.

    Arguments as for :func:`train_batches`; ``max_batches`` > 0 stops after so many batches.

    Returns:
      An iterator of ``(records, weights)``: records stacked to shape (L, B, ...) and float32
      weights of shape (L, B), 1 for a record and 0 for padding. All processes see the same number
      of batches.
    """
    import grain

    layout = _layout(source, num_replicas, batch_size, process_index, process_count)
    blocks = _EvalBlocks(source, batch_size, *layout, process_index, max_batches)
    return _iterate(grain.MapDataset.source(blocks), 0, prefetch, num_threads)


def steps_per_epoch(source, batch_size: int) -> int:
    """Training steps until every record has been seen: the last may reach into the next epoch."""
    return -(-len(source) // batch_size)


class _EvalBlocks:
    """Item t: the local block of evaluation batch t, with its weights."""

    def __init__(self, source, batch_size, per_replica, local, process_index, max_batches):
        self.source = source
        self.batch_size = batch_size
        self.shape = (local, per_replica)
        self.offset = process_index * local * per_replica
        batches = -(-len(source) // batch_size)
        self.batches = min(batches, max_batches) if max_batches > 0 else batches

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, step: int):
        import jax

        rows = self.shape[0] * self.shape[1]
        start = step * self.batch_size + self.offset
        real = min(max(len(self.source) - start, 0), rows)
        records = [self.source[start + row] for row in range(real)]
        if real < rows:
            padding = jax.tree.map(np.zeros_like, records[0] if real else self.source[0])
            records += [padding] * (rows - real)
        stacked = jax.tree.map(lambda *leaves: self._block(np.stack(leaves)), *records)
        return stacked, self._block((np.arange(rows) < real).astype(np.float32))

    def _block(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(self.shape + rows.shape[1:])


def _layout(source, num_replicas, batch_size, process_index, process_count) -> tuple[int, int]:
    """(B, L): rows of a replica and replicas of a process."""
    if num_replicas < 1 or batch_size < 1 or batch_size % num_replicas:
        raise ValueError(
            f"batch_size must be a multiple of num_replicas, got {batch_size} and {num_replicas}"
        )
    if process_count < 1 or num_replicas % process_count:
        raise ValueError(
            f"num_replicas must be a multiple of process_count, got {num_replicas} and"
            f" {process_count}"
        )
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in [0, {process_count}), got {process_index}")
    if not len(source):
        raise ValueError("the source has no records")
    return batch_size // num_replicas, num_replicas // process_count


def _iterate(dataset, start: int, prefetch: int, num_threads: int | None) -> Batches:
    import grain

    if num_threads is None:
        num_threads = min(prefetch, os.cpu_count() or 1)
    options = grain.ReadOptions(
        num_threads=num_threads if prefetch else 0,
        prefetch_buffer_size=prefetch if num_threads else 0,
    )
    iterator = iter(dataset.to_iter_dataset(options))
    grain.experimental.set_next_index(iterator, start)
    return Batches(iterator)
