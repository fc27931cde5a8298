"""What a config asks of this machine, compared with what it has before anything is allocated."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from decent_jax.ground import machine
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.format import format_number
from decent_jax.replicas import Placement

_THREADS = 4  # of XLA per simulated device
_WORKERS = 32  # per core


def check(config: ConfigDict) -> None:
    """Check what needs neither data nor a model.

    Raises:
      ConfigError: naming the field and what this machine has.
    """
    workers, simulated = config.data.workers, config.mesh.simulate
    if _THREADS * simulated > machine.most_threads():
        raise ConfigError(
            f"mesh.simulate = {simulated} needs {_THREADS * simulated} threads, and this machine "
            f"allows {machine.most_threads()}"
        )
    cores = os.cpu_count() or 1
    if workers > _WORKERS * cores:
        raise ConfigError(
            f"data.workers must be at most {_WORKERS} per core, {_WORKERS * cores} on this "
            f"machine, got {workers}"
        )


def check_batch(config: ConfigDict, source: Sequence[Any]) -> None:
    """Check that there are enough examples, and that this process can hold what it reads ahead."""
    if hasattr(source, "train_blocks") or not len(source):  # counts tokens, not examples
        return
    try:
        example = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(source[0]))
    except DataError:  # the run says so, with the step at which it reads this record
        return
    if config.batch_size > len(source):
        raise ConfigError(
            f"batch_size must be at most {len(source)}, the number of training examples, got "
            f"{config.batch_size}"
        )
    own = config.batch_size // jax.process_count()
    machine.check_memory(
        own * example * (config.data.prefetch + 1),
        f"batch_size {config.batch_size}, with data.prefetch {config.data.prefetch},",
    )


def check_state(placement: Placement, state: Any) -> None:
    """Check that the devices of this process can hold its replicas.

    Args:
      placement: of the replicas.
      state: shapes of one replica's parameters and of what its method keeps.
    """
    each = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    held, devices = len(placement.local_replicas) * each, placement.mesh.local_devices
    what = f"the state of {len(placement.local_replicas)} replicas"
    if devices[0].platform == "cpu":
        machine.check_memory(held, what)
        return
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit and held / len(devices) > limit:
        raise ConfigError(
            f"{what} on {len(devices)} devices needs at least "
            f"{format_number(held / len(devices))}B per device, which has {format_number(limit)}B"
        )
