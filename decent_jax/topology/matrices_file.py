"""A schedule of your own: its mixing matrices in a file of NumPy's."""

import warnings
from pathlib import Path

import numpy as np

from decent_jax.text import shorten
from decent_jax.topology.schedule import Schedule


def load(path: str, num_replicas: int, *, column_stochastic_only: bool = False) -> Schedule:
    """The schedule whose matrices ``numpy.save`` wrote; they are read once and never change.

    Args:
      path: of a ``.npy`` file of shape (n, n), one round, or (rounds, n, n); row i of a matrix
        holds the weights that replica i gives to what it receives.
      num_replicas: n.
      column_stochastic_only: see `Schedule.from_matrices`.

    Raises:
      ValueError: the file cannot be read, is for another number of replicas, or its matrices make
        no schedule.
    """
    try:  # mapped, since a header may ask for more memory than there is
        with warnings.catch_warnings(action="ignore"):  # of sizes that overflow
            matrices = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except Exception as error:  # NumPy raises many kinds
        raise ValueError(f"{path}: it is no .npy file: {shorten(str(error), 80)}") from None
    if not isinstance(matrices, np.ndarray):
        raise ValueError(f"{path}: it is no .npy file, but an archive of several arrays")
    if matrices.ndim == 2:
        matrices = matrices[None]
    if matrices.ndim != 3 or matrices.shape[1:] != (num_replicas, num_replicas):
        raise ValueError(
            f"{path}: matrices of {num_replicas} replicas have the shape ({num_replicas}, "
            f"{num_replicas}) or (rounds, {num_replicas}, {num_replicas}), got {matrices.shape}"
        )
    try:
        return Schedule.from_matrices(
            list(matrices), Path(path).name, column_stochastic_only=column_stochastic_only
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
