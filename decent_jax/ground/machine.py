"""The resources of this machine, and checks against them before anything is allocated."""

import os
import time
from pathlib import Path

from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import format_number


def memory_bytes() -> int:
    """The memory of this machine, or of the container that the process runs in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_limits("/sys/fs/cgroup/memory.max")])


def check_memory(needed: float, what: str, there: float | None = None) -> None:
    """Raises ConfigError if ``what`` needs more bytes than this machine (or Ray: ``there``) has."""
    has = memory_bytes() if there is None else there
    if needed > has:
        raise ConfigError(
            f"{what} needs at least {format_number(needed)}B of memory, and "
            f"{'this machine' if there is None else 'Ray'} has {format_number(has)}B"
        )


def process_seconds() -> float:
    """Seconds since this process started; 0 if the system does not report it."""
    try:
        after_the_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(after_the_name[19]) / os.sysconf("SC_CLK_TCK")  # since the machine started
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return 0.0


def sent_bytes() -> dict[str, int]:
    """Bytes sent by this machine (or network namespace), by destination; empty except on Linux.

    ``inside_host`` counts loopback, and ``between_hosts`` counts all other interfaces. Traffic that
    bypasses the kernel, such as NVLink and InfiniBand verbs, is not counted.
    """
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()[2:]
        halves = [line.partition(":") for line in lines]
        sent = {name.strip(): int(counts.split()[8]) for name, _, counts in halves}
    except (OSError, ValueError, IndexError):
        return {}
    inside = sent.pop("lo", 0)
    return {"between_hosts": sum(sent.values()), "inside_host": inside}


def _limits(path: str) -> list[int]:
    """The number in a file of the kernel, as a list; empty without a number."""
    try:
        return [int(Path(path).read_text())]
    except (OSError, ValueError):  # no such file, or "max"
        return []
