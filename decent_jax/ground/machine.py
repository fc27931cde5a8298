"""The resources of this machine, and checks against them before anything is allocated."""

import os
from pathlib import Path

from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import format_number


def memory_bytes() -> int:
    """The memory of this machine, or of the container that the process runs in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_limits("/sys/fs/cgroup/memory.max")])


def check_memory(needed: float, what: str) -> None:
    """Raises ConfigError where ``what`` needs more bytes than this machine has."""
    if needed > memory_bytes():
        raise ConfigError(
            f"{what} needs at least {format_number(needed)}B of memory, and this machine has "
            f"{format_number(memory_bytes())}B"
        )


def _limits(path: str) -> list[int]:
    """The number in a file of the kernel, or none."""
    try:
        return [int(Path(path).read_text())]
    except (OSError, ValueError):  # not this kernel; "max"
        return []
