"""Compilation: XLA's options for a step, its memory, and the user's cache.

The options that the user sets in ``XLA_FLAGS`` or ``LIBTPU_INIT_ARGS`` take precedence over those
of this module.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jaxlib.version
from jax.sharding import SingleDeviceSharding

from decent_jax import cpu
from decent_jax.ground.format import format_number
from decent_jax.optim import Method
from decent_jax.replicas import Placement
from decent_jax.topology import Schedule

# Measured in the programs that XLA makes for H100s (`benchmarks/speed/programs.py`). Without these,
# XLA has one message in flight at a time and starts it as late as an estimate of a fast network
# allows, so most of a step is over before the first message starts. With both, XLA starts all
# messages at the top of the step and waits for them where the update needs them. The price: the
# additional copy of the parameters that every round needs is held during the whole gradient.
FOR_GPUS = {
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 1000,
}
# Measured in the programs for described TPUs. Each comment lists the TPUs on which an option
# matters, and states what XLA does there without it.
FOR_TPUS = {
    # v5e, TPU7x: 5 permutes are in flight at a time, and all others start after the gradient.
    "xla_max_concurrent_async_collective_permutes": 1000,
    # v5e, between slices: 32 sends are in flight at a time, and all others start after the
    # gradient. The first of these two options has no effect without the second.
    "xla_max_concurrent_host_send_recv": 1000,
    "xla_tpu_host_transfer_overlap_limit": 1000,
    # v5p, v6e: each permute starts after the gradient, just before the update needs it. Of
    # ``xla_tpu_enable_all_experimental_scheduler_features`` this is the one that matters.
    "xla_tpu_use_aggressive_scheduling": True,
}
FOR_CPUS = cpu.COMPILER_OPTIONS

CACHE_LIMIT = 4 << 30  # bytes; beyond it, `use_cache` removes the least recently read programs

_MIN_SECONDS = 0.2  # seconds; faster compilations are not worth a file


def options_of_step(placement: Placement, schedule: Schedule, tx: Method) -> dict[str, object]:
    """The ``compiler_options`` of `jax.jit` for a step.

    Args:
      placement: the replicas and their devices.
      schedule: the communication schedule.
      tx: the method, which may send messages early.
    """
    options: Mapping[str, object] = {}
    platform = placement.platform
    if platform == "cpu":
        options = FOR_CPUS
    elif platform in ("gpu", "cuda") and _starts_early(placement.fsdp, schedule, tx):
        options = FOR_GPUS
    elif platform == "tpu":
        options = FOR_TPUS
    flags = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    device = placement.mesh.devices.flat[0]
    described = device if device not in jax.devices() else None
    return {
        name: value
        for name, value in options.items()
        if name not in flags and known(name, value, described)
    }


def _starts_early(fsdp: int, schedule: Schedule, tx: Method) -> bool:
    """Whether it helps to start messages at the top of the step.

    It does not help if a replica has several devices: XLA gathers its arrays when the gradient
    needs them, on the stream that messages to other replicas would occupy. Nor does it help if
    groups send to each other and the method does not hold back the last stage
    (`decent_jax.gossip.mix`): XLA would wait for the messages at the top of the step.
    """
    in_stages = any(rnd.between_groups is not None for rnd in schedule.rounds)
    return fsdp == 1 and (not in_stages or bool(tx.early or tx.delayed))


@functools.cache
def known(name: str, value: object, device: jax.Device | None = None) -> bool:
    """Whether this version of XLA knows a compiler option; warns if it does not.

    Args:
      name, value: the option, and a value for it.
      device: a described device to compile for; None: the devices of this process.
    """
    where = None if device is None else SingleDeviceSharding(device)
    try:
        jax.jit(lambda: 0, out_shardings=where, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        warnings.warn(
            f"this jaxlib ({jaxlib.version.__version__}) does not know {name}: steps may take "
            "longer, or more memory, than necessary",
            stacklevel=2,
        )
        return False
    return True


class Memory(NamedTuple):
    """Bytes on one device while a program runs, as planned by XLA.

    >>> print(Memory(999_000_000, 1_000_000))
    1.00 GB of memory per device (0.999 of state, 0.00100 while it runs)
    >>> print(Memory(900_000_000, 1_000_000))
    901 MB of memory per device (900 of state, 1.00 while it runs)
    """

    state: int  # its arguments: the state, which is updated in place, and a batch
    temporary: int  # gradients, activations, messages, and results that are not in place

    def __str__(self) -> str:
        unit, scale = ("GB", 1e9) if sum(self) >= 1e9 else ("MB", 1e6)
        state, temporary, total = (
            format_number(x / scale) for x in (self.state, self.temporary, sum(self))
        )
        return f"{total} {unit} of memory per device ({state} of state, {temporary} while it runs)"


def memory_of(compiled: jax.stages.Compiled) -> Memory | None:
    """The memory of a compiled program; None if the backend does not report it."""
    sizes = compiled.memory_analysis()
    if sizes is None:
        return None
    new = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return Memory(sizes.argument_size_in_bytes, sizes.temp_size_in_bytes + new)


def use_cache() -> Path | None:
    """Let jax store compiled programs in the user's cache, so that a second start compiles nothing.

    The folder is ``$XDG_CACHE_HOME/decent_jax/compiled``, by default in ``~/.cache``. Hosts with a
    common home directory may share it: jax's keys include the features of a CPU. jax's own settings
    take precedence: ``JAX_COMPILATION_CACHE_DIR`` names another folder, and
    ``JAX_ENABLE_COMPILATION_CACHE=false`` disables the cache.

    Returns:
      The folder; None if jax's settings decide or the folder cannot be written.
    """
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] or not settings["jax_enable_compilation_cache"]:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "decent_jax" / "compiled"
    if not folder.is_absolute():  # "~": a user without a home
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home, or none
        return None
    if not os.access(folder, os.W_OK):
        return None
    _prune(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_SECONDS)
    return folder


def _prune(folder: Path) -> None:
    """Remove the least recently read files until three quarters of `CACHE_LIMIT` are left."""
    files: list[tuple[float, int, Path]] = []
    for path in filter(Path.is_file, folder.iterdir()):
        with contextlib.suppress(OSError):  # another process is pruning too
            stat = path.stat()
            files.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    total = sum(size for _, size, _ in files)
    if total <= CACHE_LIMIT:
        return
    for _, size, path in sorted(files):
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
        if total <= 0.75 * CACHE_LIMIT:
            return
