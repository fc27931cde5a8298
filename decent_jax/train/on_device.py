"""Training records that stay on the devices, so that one program can make several steps.

The host then has nothing to do between the steps of a program, which matters if a step takes less
than a few milliseconds.
"""

import copy
from typing import Any

import jax

from decent_jax.data import loader
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.pytree import PyTree
from decent_jax.train.experiment import Experiment

MOST = 64  # steps per program


def read_records(experiment: Experiment) -> tuple[PyTree, Experiment]:
    """All training records, on every device, and an experiment whose batches are their indices.

    Raises:
      ConfigError: a record cannot be used.
    """
    source = experiment.task.train_source
    numbered: Any = copy.copy(experiment.task)
    try:
        records = loader.all_records(source)
    except DataError as error:
        raise ConfigError(str(error)) from None
    numbered.train_source = loader.Numbers(source)
    if measure := getattr(experiment.task, "measure", None):
        numbered.measure = lambda block: measure(  # pyright: ignore[reportUnknownLambdaType]
            jax.tree.map(lambda x: x[block], records)
        )
    on_devices = jax.device_put(records, experiment.placement.replicated)
    return on_devices, experiment._replace(task=numbered)


def steps_together(every: int) -> int:
    """Steps per program: the largest divisor of ``every``, the steps per row, up to `MOST`.

    >>> [steps_together(every) for every in (1, 50, 64, 100, 1000)]
    [1, 50, 64, 50, 50]
    """
    return max(count for count in range(1, MOST + 1) if every % count == 0)
