"""Heterogeneous data: every replica owns some records, with its own label distribution.

Hsu, Qi and Brown (2019, arXiv:1909.06335), as implemented by Google Research: every replica draws a
class mixture q from a Dirichlet distribution around the data set's mixture p, and samples records
according to q without replacement. All replicas draw simultaneously and equally often; once a class
is exhausted, the remaining classes are drawn in proportion to q. Each record thus belongs to at
most one replica, and all replicas own equally many (at most n - 1 records are left out). The
alternative, which divides each class among the replicas (Yurochkin et al., 2019), leaves some
replicas with few records.

Papers define alpha differently. Here it is a pseudo-count per class, q ~ Dirichlet(alpha * p /
sum(p**2)), which for K equally large classes is Dirichlet(alpha, ..., alpha): the alpha of Acar et
al. (2021, arXiv:2111.04263) and, for the spread of a class over replicas, of Lin et al. (2021,
arXiv:2102.04761) and later papers that compare with them. The alpha of Hsu et al. is the sum of the
pseudo-counts, K times as large. Dividing by sum(p**2) instead of multiplying by K makes alpha
insensitive to tiny classes, however many there are. The mean of q is p, and
`E sum(q**2) = (alpha + 1) / (alpha / sum(p**2) + 1)`: 1 (one class per replica) for alpha -> 0, and
sum(p**2) (the mixture p everywhere) for alpha -> infinity. These formulas describe the draws. For
small alpha, the partition is less skewed than the draws, because all records are assigned and
classes run out. Publish the output of `Partition.report`, not only alpha.

For a different number of replicas, the partition is drawn again.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from decent_jax.ground.errors import DataError


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """The division of a source's records among the replicas.

    Attributes:
      alpha: the argument of `dirichlet`.
      class_names: (K,) strings, the classes that occur.
      class_sizes: (K,) int64, the number of records of each class in the whole data set.
      counts: (n, K) int64, the number of records of each class that each replica owns.
      owned: (n, N // n) int64, the indices of a replica's records, ascending.
    """

    alpha: float
    class_names: tuple[str, ...]
    class_sizes: np.ndarray
    counts: np.ndarray
    owned: np.ndarray

    @property
    def num_replicas(self) -> int:
        """The number of replicas, n."""
        return len(self.owned)

    @property
    def records_per_replica(self) -> int:
        """The number of records that each replica owns, N // n."""
        return self.owned.shape[1]

    def records(self, replica: int) -> np.ndarray:
        """The indices of the records of `replica`, (N // n,) int64, ascending."""
        return self.owned[replica]

    def total_variation(self) -> float:
        """The mean total variation distance, 0 to 1, between a replica's labels and all labels.

        The distance is half the sum of absolute differences between the shares of the labels: the
        share of the replica's records whose label would have to change.
        """
        shares = self.counts / self.records_per_replica
        whole = self.class_sizes / self.class_sizes.sum()
        return float(np.abs(shares - whole).sum(axis=1).mean() / 2)

    def summary(self) -> dict[str, object]:
        """The partition's entry in summary.json."""
        return {
            "name": "dirichlet",
            "alpha": self.alpha,
            "records_per_replica": self.records_per_replica,
            "total_variation_mean": round(self.total_variation(), 4),
        }

    def report(self) -> str:
        """A description of the partition in two lines of text."""
        return (
            f"data.partition dirichlet, alpha {self.alpha:g}, over {len(self.class_names)} classes:"
            f" {self.num_replicas} replicas with {self.records_per_replica:,} records each;\nmean"
            f" total variation between their labels and all labels: {self.total_variation():.2f}"
        )


def dirichlet(
    labels: np.ndarray,
    num_replicas: int,
    alpha: float,
    seed: int,
    *,
    class_names: Sequence[str] | None = None,
) -> Partition:
    """Partitions labelled records among replicas; see the module's docstring.

    Args:
      labels: (N,) integers, the class of every record.
      num_replicas: n, at most N.
      alpha: concentration, above 0; with a small one, each replica has few classes, and with a
        large one, all replicas have the same mixture.
      seed: any integer >= 0; the same arguments give the same partition.
      class_names: the name of label k at index k, for reports; None means the labels themselves.

    Example:
      >>> partition = dirichlet(np.arange(1000) % 10, 4, alpha=0.1, seed=0)
      >>> partition.counts.shape, partition.counts.sum(axis=1).tolist()
      ((4, 10), [250, 250, 250, 250])
    """
    random = np.random.default_rng([seed, 0])  # equals default_rng(seed), which loader does not use
    classes, labels, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    mixtures = _log_mixtures(sizes / len(labels), num_replicas, alpha, random)
    counts = _share_out(mixtures, sizes, len(labels) // num_replicas, random)
    return Partition(
        alpha=float(alpha),
        class_names=tuple(str(k if class_names is None else class_names[k]) for k in classes),
        class_sizes=sizes.astype(np.int64),
        counts=counts,
        owned=_choose_records(labels, sizes, counts, random),
    )


def for_run(
    source: Any, *, num_replicas: int, batch_size: int, alpha: float, seed: int
) -> Partition:
    """The partition of a run's training records by `source.labels`; see `dirichlet`.

    Args:
      source: records with `labels`, (N,) integers, and optionally `class_names`.
      batch_size: records per step over all replicas.

    Raises:
      DataError: there are no labels or only one class, or a replica owns too few records for its
        batch.
    """
    if not hasattr(source, "labels"):
        raise DataError(
            f"data.partition 'dirichlet' needs records with labels, which {source!r} lacks; set "
            "data.partition to 'iid'"
        )
    labels = np.asarray(source.labels)
    class_names = getattr(source, "class_names", None)
    if labels.min() == labels.max():
        name = f" ({class_names[labels[0]]})" if class_names is not None else ""
        raise DataError(
            f"data.partition 'dirichlet' needs records of at least two classes, but all"
            f" {len(labels)} have the same class{name}; set data.partition to 'iid'"
        )
    own, batch = len(labels) // num_replicas, batch_size // num_replicas
    if own < batch:
        raise DataError(
            f"data.partition 'dirichlet' leaves {own} of {len(labels)} records to each of"
            f" {num_replicas} replicas, fewer than its batch of {batch}; use fewer replicas,"
            " a smaller batch_size or more data"
        )
    return dirichlet(labels, num_replicas, alpha, seed, class_names=class_names)


def _log_mixtures(prior: np.ndarray, num_replicas: int, alpha: float, random) -> np.ndarray:
    """(n, K): logarithms of n draws of Dirichlet(alpha * prior / sum(prior**2)), up to a constant.

    Normalized Gamma variables are a Dirichlet draw. For the small pseudo-counts of a small alpha,
    they would underflow, so log Gamma(a) is drawn as log Gamma(a + 1) + log(U) / a.
    """
    counts = max(alpha, 1e-250) * prior / (prior**2).sum()  # so that the division stays finite
    shape = num_replicas, len(prior)
    return np.log(random.gamma(counts + 1, size=shape)) - random.exponential(size=shape) / counts


def _share_out(log_mixtures: np.ndarray, sizes: np.ndarray, each: int, random) -> np.ndarray:
    """(n, K) int64: how many records of each class each replica takes; rows add up to `each`.

    The counts have the same distribution as if the replicas drew one record at a time, in random
    order, and redrew if a class is exhausted.
    """
    counts = np.zeros(log_mixtures.shape, np.int64)
    need, left = np.full(len(counts), each), sizes.astype(np.int64)
    while need.any():  # at most K + 1 times: every pass but the last exhausts a class
        rows, has = np.flatnonzero(need), np.flatnonzero(left)
        logs = log_mixtures[np.ix_(rows, has)]
        weights = np.exp(logs - logs.max(axis=1, keepdims=True))
        taken = random.multinomial(need[rows], weights / weights.sum(axis=1, keepdims=True))
        for k in np.flatnonzero(taken.sum(axis=0) > left[has]):  # keep a random subset of the draws
            taken[:, k] = random.multivariate_hypergeometric(
                taken[:, k], left[has[k]], method="marginals"
            )
        counts[np.ix_(rows, has)] += taken
        left[has] -= taken.sum(axis=0)
        need[rows] -= taken.sum(axis=1)
    return counts


def _choose_records(labels, sizes, counts, random) -> np.ndarray:
    """(n, N // n) int64, rows ascending: `counts` records of each class, chosen at random."""
    n, num_classes = counts.shape
    order = random.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]  # class after class
    parts = np.concatenate([counts, [sizes - counts.sum(axis=0)]])  # the last row is left out
    owner = np.repeat(np.tile(np.arange(n + 1), num_classes), parts.T.ravel())
    by_owner = order[np.argsort(owner, kind="stable")]
    each = len(labels) // n
    return np.sort(by_owner[: n * each].reshape(n, each), axis=1)
