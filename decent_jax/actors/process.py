"""What the process of an actor does before its work."""

import os
import time
from pathlib import Path

from decent_jax.cluster import start as cluster


def enter(log: Path, launched_from: str) -> None:
    """Make an actor's process one of this run; it and its libraries print to the file ``log``.

    A relative path of the config is then the same file as for `train.py`, unless this machine lacks
    the folder in which `train.py` was started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if os.path.isdir(launched_from):
        os.chdir(launched_from)
    leave_launcher()


def leave_launcher() -> None:
    """Forget that SLURM or another launcher started this process with others: Ray joins them."""
    for variable, _ in cluster.LAUNCHERS.values():
        os.environ.pop(variable, None)


def say(message: str) -> None:
    """A line of the log of this process."""
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)
