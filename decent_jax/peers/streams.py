"""The data of one peer: a stream of batches, addressed by (stream, step)."""

from typing import Any

import grain

from decent_jax.data import loader

_ANOTHER_DRAW = 1_000_003  # between the seeds of streams 0 to n - 1, n to 2 n - 1, and so on


class Stream:
    """A source from which a run of one replica reads the batches of a stream, from any step on.

    Streams 0 to n - 1 are those of the replicas of a synchronous run: together they read every
    record once per epoch. Stream ``k >= n`` is stream ``k % n`` of another draw of the order.
    """

    def __init__(self, source: Any, stream: int, num_streams: int, batch_size: int):
        self._source, self._size = source, batch_size
        self._draw, self._stream = divmod(stream, num_streams)
        self._num_streams = num_streams

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._source[index]

    def __getattr__(self, name: str) -> Any:
        if name == "augment":  # the blocks below hold augmented records
            raise AttributeError(name)
        if name.startswith("__") or "_source" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._source, name)

    def train_blocks(self, num_replicas: int, batch_size: int, seed: int) -> grain.MapDataset:
        """Item t: the stream's block of step t; see `decent_jax.data.loader`."""
        del num_replicas, batch_size  # of the peer's own run
        seed += self._draw * _ANOTHER_DRAW
        n = self._num_streams
        rows = loader.train_rows(self._source, seed=seed, num_replicas=n, batch_size=self._size * n)
        return grain.MapDataset.source(rows)[self._stream :: n]
