"""Ends Ray's processes on this machine when the `train.py` that started them is gone.

Ray's processes end with `train.py`, however that ends. Its two agents, though, first report to a
service that has ended as well, and give up only after 60 s, which no option of Ray changes. Started
by `decent_jax.actors.ray_cluster`, with a pipe from `train.py` as standard input::

    python orphans.py PID ...
"""

import contextlib
import os
import signal
import sys


def main(pids: list[str]) -> None:
    """Wait for the end of standard input, then kill those of the processes that still run."""
    processes = []
    for pid in pids:
        with contextlib.suppress(OSError):
            processes.append(os.pidfd_open(int(pid)))  # stays this process, even if it ends
    sys.stdin.read()
    for process in processes:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(process, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
