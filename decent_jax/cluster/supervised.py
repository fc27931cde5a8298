"""A process whose supervisor is gone ends too, on this host or on another.

`cluster.supervise` holds the other end of a pipe that is the standard input of each of its
processes (`ssh` and `srun` pass it on), and never closes it. However the supervisor ends, the
kernel closes the pipe: then the process stops as after SIGTERM, which saves a checkpoint, and where
that takes too long it ends without one. A line in the pipe says that another process is lost, long
before that is silent for a heartbeat: then this one ends at once, to be started again.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "DECENT_JAX_SUPERVISED"  # set where the standard input is that pipe
GREETING = b"supervised\n"  # a launcher that does not pass the pipe on does not pass this on either
_STOPPED = 128 + signal.SIGTERM


def end_with_supervisor(heartbeat_s: float, end: Callable[[str], None]) -> None:
    """End this process within ``heartbeat_s`` of its supervisor, if it has one.

    Args:
      heartbeat_s: half of it is for a checkpoint.
      end: gets what the supervisor says of another process that is lost, and ends this one.
    """
    if os.environ.pop(VARIABLE, None):  # children of this process are not the supervisor's
        watch = threading.Thread(target=_watch, args=(heartbeat_s, end), daemon=True)
        watch.start()


def _watch(heartbeat_s: float, end: Callable[[str], None]) -> None:
    # sys.stdin would hold a lock that Python needs to exit.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        if pipe.readline() != GREETING:
            return
        lost = pipe.readline()
    if lost:
        end(lost.decode(errors="replace").strip())
    with contextlib.suppress(OSError):  # its terminal is gone, too
        program = Path(sys.argv[0]).name
        print(f"{program}: the supervisor is gone: stopping", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(heartbeat_s / 2)
    os._exit(_STOPPED)
