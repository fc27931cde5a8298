"""A process whose supervisor is gone ends too, on this host or on another.

`launch/supervise.py` holds the other end of a pipe that is the standard input of each of its
processes (`ssh` and `srun` pass it on), and never closes it. However the supervisor ends, the
kernel closes the pipe: then the process stops as after SIGTERM, which saves a checkpoint, and where
that takes too long it ends without one.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

VARIABLE = "DECENT_JAX_SUPERVISED"  # set where the standard input is that pipe
GREETING = b"supervised\n"  # a launcher that does not pass the pipe on does not pass this on either
_STOPPED = 128 + signal.SIGTERM


def end_with_supervisor(heartbeat_s: float) -> None:
    """End this process within ``heartbeat_s`` of its supervisor, if it has one."""
    if os.environ.pop(VARIABLE, None):  # children of this process are not the supervisor's
        watch = threading.Thread(target=_watch, args=(heartbeat_s,), daemon=True)
        watch.start()


def _watch(heartbeat_s: float) -> None:
    pipe = sys.stdin.fileno()
    greeting = b""
    while part := os.read(pipe, 1):  # sys.stdin would hold a lock that Python needs to exit
        greeting = (greeting + part)[: len(GREETING)]
    if greeting != GREETING:
        return
    name = Path(sys.argv[0]).name
    with contextlib.suppress(OSError):  # its terminal is gone, too
        print(f"{name}: the supervisor is gone: stopping", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(heartbeat_s / 2)
    os._exit(_STOPPED)
