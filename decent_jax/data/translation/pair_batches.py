"""Batches of sentence pairs by token count: similar lengths together, in a few static shapes.

XLA compiles a program for every shape, and padding is wasted work. `TokenBatches` therefore chooses
a limited number of shapes, by the longer side of a pair, so as to minimize padding. Every batch is
a pure function of lengths, seed, step and replica, so resuming replays nothing and any process may
ask for any batch.

>>> lengths = [[3, 4], [9, 8], [2, 4], [8, 9], [3, 3], [9, 9]]
>>> batches = TokenBatches(lengths, tokens=18, num_replicas=1, seed=0, shapes=2)
>>> batches.shapes
(Shape(source=3, target=4, rows=3), Shape(source=9, target=9, rows=2))
>>> batches.steps_per_epoch
3
>>> sorted(sum((batches.block(step, 0).tolist() for step in range(3)), []))
[-1, 0, 1, 2, 3, 4, 5]
"""

import threading
from typing import NamedTuple

import numpy as np

_CACHED_EPOCHS = 2  # the current one, and the one that threads read ahead


class Shape(NamedTuple):
    """The shape of a bucket's blocks: `rows` pairs of at most `source` and `target` tokens."""

    source: int
    target: int
    rows: int


class TokenBatches:
    """The assignment of sentence pairs to steps and replicas, in blocks of a few shapes.

    A bucket has one shape and the pairs whose longer side lies between two lengths. Each epoch
    shuffles the pairs of a bucket, cuts them into steps and shuffles the steps of all buckets: it
    visits every pair once, and all epochs have the same number of steps. In a step, all replicas
    have the same shape. The pairs are dealt to them by length, back and forth, so that all replicas
    get nearly the same number of tokens.

    The number of rows is chosen such that a bucket's steps are equally full. No step exceeds
    `2 * tokens` with padding, unless a single pair per replica does. At most one row of a block is
    empty.

    Args:
      lengths: (N, 2) integers, the tokens of the source and target of every pair, at least 1.
      tokens: the number of source tokens, and of target tokens, per step over all replicas;
        `2 * tokens` bounds their sum, including padding.
      num_replicas: n, the number of replicas.
      seed: an integer >= 0; determines the order.
      shapes: the maximum number of shapes. Each is compiled once (per round of a schedule).
      shuffle: whether to shuffle; False takes the pairs by length, in the same order every epoch.

    Attributes:
      shapes: the `Shape` of every bucket, the smallest first.
      steps_per_epoch: the number of steps, the same in every epoch.
      padding_fraction: the share of padding in all blocks of an epoch.
    """

    def __init__(
        self,
        lengths,
        *,
        tokens: int,
        num_replicas: int,
        seed: int,
        shapes: int = 16,
        shuffle: bool = True,
    ):
        lengths = np.asarray(lengths)
        self.lengths = lengths
        self.num_replicas = num_replicas
        self.seed = seed
        self.shuffle = shuffle
        longer = lengths.max(1)
        rung = np.searchsorted(_edges(longer, shapes), longer)
        bucket = np.unique(rung, return_inverse=True)[1]  # only rungs with pairs are buckets
        counts = np.bincount(bucket)
        limits: list[tuple[int, int]] = [
            tuple(lengths[bucket == k].max(0).tolist()) for k in range(len(counts))
        ]
        members = np.argsort(bucket, kind="stable").astype(
            np.int32 if len(lengths) < 2**31 else int
        )
        self._members = np.split(members, np.cumsum(counts)[:-1])
        if not shuffle:
            self._members = [
                own[np.argsort(lengths[own].sum(1), kind="stable")] for own in self._members
            ]
        plan = [
            _steps_and_rows(*limit, count, tokens, num_replicas)
            for limit, count in zip(limits, counts, strict=True)
        ]
        self.shapes = tuple(
            Shape(*limit, rows) for limit, (_, rows) in zip(limits, plan, strict=True)
        )
        self._steps = np.array([steps for steps, _ in plan])  # steps of each shape in an epoch
        self.steps_per_epoch = int(self._steps.sum())
        room = sum(
            steps * shape.rows * num_replicas * (shape.source + shape.target)
            for steps, shape in zip(self._steps.tolist(), self.shapes, strict=True)
        )
        self.padding_fraction = 1 - int(lengths.sum(dtype=np.int64)) / room
        self._epochs: dict[int, tuple] = {}
        self._lock = threading.Lock()

    def shape(self, step: int) -> Shape:
        """The shape of all blocks of a step."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return self.shapes[self._epoch(epoch)[0][within]]

    def block(self, step: int, replica: int) -> np.ndarray:
        """The pairs of a replica at a step: (rows,) int64, with -1 for an empty row at the end."""
        epoch, within = divmod(step, self.steps_per_epoch)
        buckets, places, orders = self._epoch(epoch)
        bucket = buckets[within]
        order, steps = orders[bucket], self._steps[bucket]
        # a step takes whole rounds of dealing, so that only the last step may leave a row empty
        rounds = -(-len(order) // self.num_replicas)
        start, stop = (
            rounds * place // steps * self.num_replicas
            for place in (places[within], places[within] + 1)
        )
        pairs = order[start:stop]
        return self._deal(pairs.astype(np.int64), self.shapes[bucket].rows, replica)

    def _deal(self, pairs: np.ndarray, rows: int, replica: int) -> np.ndarray:
        """One replica's pairs, dealt the longest first to replicas 0, 1, 2, 2, 1, 0 and so on."""
        longest_first = pairs[
            np.argsort(-self.lengths[pairs].astype(np.int64).sum(1), kind="stable")
        ]
        dealt = np.full(rows * self.num_replicas, -1)
        dealt[: len(pairs)] = longest_first
        dealt = dealt.reshape(rows, self.num_replicas)
        row = np.arange(rows)
        backwards = row % 2 == 1
        return dealt[row, np.where(backwards, self.num_replicas - 1 - replica, replica)]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """(bucket of each step, its position in that bucket, order of each bucket's pairs)."""
        if not self.shuffle:
            epoch = 0
        with self._lock:  # loaders read from several threads
            if epoch not in self._epochs:
                while len(self._epochs) >= _CACHED_EPOCHS:
                    del self._epochs[min(self._epochs, key=lambda e: -abs(e - epoch))]
                self._epochs[epoch] = self._plan(epoch)
            return self._epochs[epoch]

    def _plan(self, epoch: int):
        buckets = np.repeat(np.arange(len(self.shapes)), self._steps)
        places = np.concatenate([np.arange(steps) for steps in self._steps])
        if not self.shuffle:
            return buckets, places, self._members
        # an independent sequence per epoch: seed 1 is not seed 0 one epoch ahead
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
        orders = [rng.permutation(own) for own in self._members]
        shuffled = rng.permutation(len(buckets))
        return buckets[shuffled], places[shuffled], orders

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_epochs": {}, "_lock": None}

    def __setstate__(self, state: dict):
        self.__dict__.update(state)
        self._lock = threading.Lock()


def _steps_and_rows(source, target, count, tokens, num_replicas) -> tuple[int, int]:
    """A bucket's smallest number of steps within the budget, and the fewest rows for them."""
    most = max(2 * tokens // (num_replicas * (source + target)), 1)
    steps = -(-count // (most * num_replicas))
    return int(steps), int(-(-count // (steps * num_replicas)))


def _edges(longer: np.ndarray, most: int) -> np.ndarray:
    """At most `most` lengths, ascending, that minimize the padding of pairs to the next length.

    Dynamic programming finds the optimum. All numbers are integers, so all processes find the same
    lengths.

    Args:
      longer: (N,) integers, the length of the longer side of every pair, at least 1.
    """
    pairs = np.bincount(longer).cumsum()  # number of pairs of at most this length
    length = np.arange(len(pairs))
    # [i, j]: the tokens, with padding to length j, of all pairs longer than i and up to j
    room = (pairs[None] - pairs[:, None]) * length[None]
    room[length[:, None] > length[None]] = np.iinfo(np.int64).max // 4
    least, before = room[0], []
    for _ in range(most - 1):
        total = least[:, None] + room
        before.append(total.argmin(0))
        least = total.min(0)
    edges = [len(pairs) - 1]
    for choice in reversed(before):
        edges.append(int(choice[edges[-1]]))
    return np.unique(edges)
