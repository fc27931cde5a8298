"""A process that lost another says which one, instead of hanging or dumping its stack.

jax's coordination service notices a process that is silent for ``cluster.heartbeat_s``, and the one
that it ran in at once. It then ends every other process from C++: a message to file descriptor 2,
a stack trace, ``abort()``; the callback it has for Python does not work (``std::bad_cast``, jaxlib
0.10.2). So while several processes run, file descriptor 2 is a file that a thread reads. What C++
writes is passed on a second later, unless it is that message: then a sentence is said, and the
process ends with exit code `PEER_LOST`. This also frees a main thread that hangs in a collective.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from decent_jax.errors import PEER_LOST, PeerLost
from decent_jax.text import name_all

_TICK_S = 0.25
_HELD_S = 1.0  # lines of C++ are passed on so much later, so that those before an end are not
_TOGETHER_S = 10
_FATAL = re.compile(r"client\.h:\d+\] Terminating process because the JAX distributed service")
_SILENT = re.compile(r"stopped sending heartbeats\):\s*\n(.*?)\n[^\n]*have crashed", re.DOTALL)
_TIMED_OUT = re.compile(r"[Tt]ask \S*?(\d+) heartbeat timeout")  # while others shut down
_NO_COORDINATOR = re.compile(r"Failed to (?:send RPC|disconnect)|RegisterTask|/Heartbeat")
# jaxlib raises a JaxRuntimeError where it waits, but a ValueError where it dispatches.
_OF_AN_EXCHANGE = re.compile(
    r"(?:UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED): .*?"
    r"(?:gloo|nccl|connection|unavailable|deadline|barrier|peer)",
    re.IGNORECASE | re.DOTALL,
)

_watch = None  # of this process


class _Watch(threading.Thread):
    """Reads what C++ writes to stderr, and ends the process when it says that a peer is lost."""

    def __init__(self, hosts: list[str], heartbeat_s: float):
        super().__init__(name="watch over peers", daemon=True)
        self.hosts, self.heartbeat_s = hosts, heartbeat_s
        self._lock = threading.Lock()
        self._held = []  # (when it may be passed on, text)
        self._position = 0
        self._file = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (until the process ends)
        sys.stderr.flush()
        self._stderr = os.dup(2)
        if sys.stderr is sys.__stderr__:  # Python's own words need no detour; a notebook's do not
            sys.stderr = os.fdopen(self._stderr, "w", buffering=1, errors="backslashreplace")
        os.dup2(self._file.fileno(), 2)
        _sleep_before_abort()

    def run(self):
        while True:
            time.sleep(_TICK_S)
            self.look()

    def look(self, everything: bool = False) -> None:
        """Read what is new, pass on what is old (or all of it), end the process if it must."""
        with self._lock:
            recent = self._read()
            if _FATAL.search(recent):
                time.sleep(_TICK_S)  # for the rest of the message
                self.end(explain(self._read(), self.hosts, self.heartbeat_s))
            now = time.monotonic()
            while self._held and (everything or self._held[0][0] <= now):
                os.write(self._stderr, self._held.pop(0)[1])

    def _read(self) -> str:
        """All that is held back, with what is new."""
        size = os.fstat(self._file.fileno()).st_size - self._position
        text = os.pread(self._file.fileno(), size, self._position)
        self._position += len(text)
        if text:
            self._held.append((time.monotonic() + _HELD_S, text))
        return b"".join(text for _, text in self._held).decode(errors="replace")

    def end(self, sentence: str) -> None:
        line = f"{Path(sys.argv[0]).name}: {sentence}\n"
        if os.isatty(self._stderr):
            line = f"\n{line}"  # below a progress bar
        os.write(self._stderr, line.encode())
        _exit(PEER_LOST)


def watch(hosts: list[str], heartbeat_s: float) -> None:
    """Begin to watch, before `jax.distributed.initialize`; ``hosts`` by process."""
    global _watch
    _watch = _Watch(hosts, heartbeat_s)
    _watch.start()
    atexit.register(_watch.look, everything=True)
    sys.excepthook = _leave_after_a_traceback


def explain(text: str, hosts: list[str], heartbeat_s: float) -> str:
    """What the last message of jax's distributed service means, in a sentence."""
    silent = _SILENT.search(text)
    lost = re.findall(r"(\d+)\s*$", silent[1], re.M) if silent else _TIMED_OUT.findall(text)
    lost = sorted({int(process) for process in lost})
    if lost:
        why = f"no sign of life for {heartbeat_s:g} s"
    elif _NO_COORDINATOR.search(text):
        lost, why = [0], "its connection broke"
    else:
        status = re.search(r"absl::Status: (.*)", text)
        return f"another process was lost: {status[1] if status else 'which one is not known'}"
    verb = "was" if len(lost) == 1 else "were"
    return (
        f"{name_all(lost, hosts)} {verb} lost: {why}; the same command resumes from the last "
        "checkpoint"
    )


def await_verdict(error: Exception) -> None:
    """After an error of an exchange: wait until it is known who is lost, which ends the process.

    A connection breaks at once, but who broke it is known only after ``heartbeat_s``.

    Raises:
      PeerLost: nobody is lost, or it cannot be known.
    """
    if _watch is None or not concerns_an_exchange(error):
        return
    time.sleep(1.5 * _watch.heartbeat_s + 10)
    line = (str(error).splitlines() or [type(error).__name__])[0]
    raise PeerLost(f"an exchange with other processes failed, though all are alive: {line}")


def concerns_an_exchange(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, is one of communication."""
    while error is not None:
        if _OF_AN_EXCHANGE.match(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def leave(code: int) -> None:
    """End a process that failed, one of several; jax's own way out waits for the others.

    Does nothing in a process alone. Where all leave for the same reason they do so together.
    """
    if _watch is None:
        return
    import jax

    thread = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    thread.start()
    thread.join(_TOGETHER_S)
    _watch.look(everything=True)
    _exit(code)


def _exit(code: int) -> None:
    for child in multiprocessing.active_children():  # readers of data
        child.kill()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


def _leave_after_a_traceback(*error) -> None:
    sys.__excepthook__(*error)
    leave(1)


def _sleep_before_abort() -> None:
    # The handler runs in the C++ thread that aborts. It is the C library's sleep(), called with
    # the number of the signal, 6, as its seconds: time for our thread to read and to speak. sleep
    # is async-signal-safe; a handler in Python would never run.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
