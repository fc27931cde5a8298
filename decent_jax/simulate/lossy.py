"""Rounds in which messages get lost, and who keeps the weight of a lost message."""

import numpy as np

RULES = ("receiver", "sender", "renormalise")


def lose(
    matrix: np.ndarray, rate: float, rng: np.random.Generator, *, rule: str = "receiver"
) -> np.ndarray:
    """Mixing matrices in which messages are lost at random; a replica's own copy never is.

    An entry (i, j) away from the diagonal is a message from j to i. Where it is lost, its weight
    goes, by ``rule``:

    - ``"receiver"``: to the receiver's own copy, so rows keep their sums. Two replicas that give
      each other equal weights are a pair, which does not exchange where either direction is lost:
      an undirected graph stays doubly stochastic, and the mean over replicas stays. On directed
      graphs the mean moves, by as much up as down: columns keep their sums in expectation.
    - ``"sender"``: to the sender's own copy, so columns keep their sums; the sender must learn of
      the loss. For `decent_jax.optim.push_sum`, whose weights travel along.
    - ``"renormalise"``: to all copies that arrived, in proportion (or to the own copy, where none
      did). Rows keep their sums. Columns do not, not even in expectation, because replicas with
      many neighbours gain more weight than they lose, so replicas agree on a biased mean.

    Args:
      matrix: (..., n, n), row i has the weights of replica i; every leading index is a round.
      rate: the probability that a message is lost, in [0, 1].
      rng: draws as many numbers as ``matrix`` has, whatever is in it.
      rule: one of `RULES`.

    Returns:
      (..., n, n) float64, to be used in place of ``matrix``
      (`decent_jax.gossip.Simulated` does so in training).

    Raises:
      ValueError: a matrix that is not square or has negative weights, a rate or rule not as above.

    >>> pairs = np.kron(np.eye(2), np.full((2, 2), 0.5))
    >>> lose(pairs, 0.25, np.random.default_rng(0))
    array([[0.5, 0.5, 0. , 0. ],
           [0.5, 0.5, 0. , 0. ],
           [0. , 0. , 1. , 0. ],
           [0. , 0. , 0. , 1. ]])
    """
    matrix = np.asarray(matrix, np.float64)
    _check(matrix, rate, rule)
    own = np.eye(matrix.shape[-1], dtype=bool)
    lost = (rng.random(matrix.shape) < rate) & ~own
    if rule == "receiver":
        mirrored = np.swapaxes(matrix, -1, -2)
        lost |= np.swapaxes(lost, -1, -2) & np.isclose(matrix, mirrored, rtol=1e-9, atol=0)
    kept = np.where(lost, 0, matrix)
    if rule == "renormalise":
        arrived = kept.sum(axis=-1, keepdims=True)
        wanted = matrix.sum(axis=-1, keepdims=True)
        scaled = kept * (wanted / np.where(arrived > 0, arrived, 1))
        return np.where(arrived > 0, scaled, own * wanted)
    missing = np.where(lost, matrix, 0).sum(axis=-1 if rule == "receiver" else -2)
    return kept + own * missing[..., None, :]


def _check(matrix: np.ndarray, rate: float, rule: str) -> None:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or (matrix < 0).any():
        raise ValueError(
            f"matrix must be square, of weights that are not negative, got shape {matrix.shape}"
            + (f" with {matrix.min():g}" if matrix.size and matrix.min() < 0 else "")
        )
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must be in [0, 1], got {rate}")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
