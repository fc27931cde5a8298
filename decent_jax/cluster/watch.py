"""A process that loses another one names it and exits, instead of hanging in a collective.

If the other process has failed, this one exits with the same error message and exit code.

jax's coordination service, in process 0, knows which processes are alive. By default it aborts all
of them when one is lost; with ``jax_enable_recoverability`` it answers queries instead, so a thread
of every process polls it. If a process is missing from the answer, the thread names it and ends its
own process with exit code `PEER_LOST`, even if the main thread hangs in a collective. If process 0
itself is lost, jax aborts the others (exit code 134) unless this thread is faster. The supervisor
counts processes with either exit code as survivors.
"""

import atexit
import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax

# The client of the coordination service has no public name. `multihost_utils.live_devices` asks the
# same question about devices, so it cannot name a process that dies before all devices are known;
# the only public barrier is a collective, which a process that fails alone must not begin. When
# `jax.distributed` offers both, use them.
from jax._src.distributed import global_state

from decent_jax.ground.errors import PEER_LOST, Interrupted, PeerLost
from decent_jax.ground.format import name_all, printable, shorten

_TICK_S = 0.25  # between two queries
_GRACE_S = 1.0  # until all processes know that another is lost, or that all leave
_TOGETHER_S = 10  # for processes that fail for the same reason
_ALIKE_S = 3  # for this process to fail for the same reason as another one
_AT_THE_END_S = 7 * 24 * 3600  # for processes that finish while process 0 may test for hours
_FAILED = "decent_jax/failed/"  # in jax's key-value store, followed by the number of a process
_LONGEST = 600  # characters of another process's sentence
_OF_A_SERVICE = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")

Value = TypeVar("Value")
_watch: "_Watch | None" = None  # of this process
_barriers, _gathered = itertools.count(), itertools.count()


class _Watch(threading.Thread):
    """Asks which processes are alive, and ends this process when another is not."""

    def __init__(self, hosts: list[str], heartbeat_s: float):
        super().__init__(name="watch over peers", daemon=True)
        self.hosts, self.heartbeat_s = hosts, heartbeat_s
        self.index: int = global_state.process_id
        self.client: Any = global_state.client
        self.leaving = threading.Event()
        self.failures = 0  # of this process, as published to the others

    def live(self) -> list[int]:
        """The processes that are alive; waits until each of them has asked, too, or is lost."""
        return list(self.client.get_live_nodes(range(len(self.hosts))))

    def run(self) -> None:
        try:
            while not self.leaving.is_set():
                # Process 0 sets the pace; the others always wait for its answer, so that they
                # notice its end at once.
                if self.index == 0:
                    self.leaving.wait(_TICK_S)
                lost = sorted(set(range(len(self.hosts))) - set(self.live()))
                if lost and not self.leaving.wait(_GRACE_S):
                    self.end(lost, f"no sign of life for {self.heartbeat_s:g} s")
                if self.failed_elsewhere() and not self.leaving.wait(_ALIKE_S):
                    self.end_as_another()
        except jax.errors.JaxRuntimeError:
            if not self.leaving.is_set():
                self.end([0], "its connection broke")

    def end(self, lost: list[int], why: str) -> None:
        """End this process with a sentence that names the lost processes."""
        verb = "was" if len(lost) == 1 else "were"
        then = "the same command resumes from the last checkpoint"
        _say(f"{name_all(lost, self.hosts)} {verb} lost: {why}; {then}")
        if self.index == 0:
            time.sleep(_GRACE_S)  # so that the others do not lose the service before they end
        exit_at_once(PEER_LOST)

    def tell(self, error: Exception) -> None:
        """Publish to the other processes that this one fails, its exit code, and why."""
        code, words = getattr(error, "code", None), (str(error).splitlines() or [""])[0]
        if code not in (1, 2):  # those of the package's errors
            code, words = 1, f"{type(error).__name__}: {words}"
        self.failures += 1
        told = json.dumps([self.failures, code, shorten(printable(words), _LONGEST)])
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.client.key_value_set(f"{_FAILED}{self.index}", told, allow_overwrite=True)

    def failed_elsewhere(self) -> tuple[int, int, str] | None:
        """(process, exit code, why) of a failure that this process does not share, or None."""
        for key, told in self.client.key_value_dir_get(_FAILED):
            count, code, words = json.loads(told)
            if count > self.failures:
                return int(key.rpartition("/")[2]), code, words
        return None

    def end_as_another(self) -> None:
        """End this process like the one that failed, unless this one fails in the same way."""
        failure = self.failed_elsewhere()
        if failure is not None:
            process, code, words = failure
            _say(f"{name_all([process], self.hosts)} failed: {words}")
            self.leave_together(_TOGETHER_S)
            exit_at_once(code)

    def leave_together(self, timeout_s: float) -> None:
        """Wait until all processes leave, then disconnect; gives up after ``timeout_s``."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.client.wait_at_barrier("decent_jax: all leave", round(1000 * timeout_s))
            self.leaving.set()
            if self.index == 0:  # the last, since the service ends with it
                while len(self.live()) > 1:
                    pass
                time.sleep(_TICK_S)  # until its answers have arrived
            if threading.current_thread() is not self:
                self.join(_TOGETHER_S)  # Python must not end while the thread waits in C++
            jax.distributed.shutdown()


def watch(hosts: list[str], heartbeat_s: float) -> None:
    """Start watching the other processes, after `jax.distributed.initialize`.

    Args:
      hosts: host name of every process.
      heartbeat_s: seconds of silence after which jax considers a process lost.
    """
    global _watch
    _watch = _Watch(hosts, heartbeat_s)
    _watch.start()
    atexit.register(_watch.leave_together, _AT_THE_END_S)
    sys.excepthook = _leave_after_a_traceback


def barrier(timeout_s: float) -> None:
    """Wait until every process has called this equally often; a single process returns at once.

    Call it after compiling a program that communicates, before running it. gloo gives the slower
    process 30 s to connect, and on resume process 0 may find its programs in jax's cache while the
    others compile theirs for minutes. The barrier uses jax's coordination service and no device.

    Args:
      timeout_s: seconds to wait for the others, ``cluster.exchange_s``.

    Raises:
      PeerLost: a process did not arrive in time.
      jax.errors.JaxRuntimeError: a process was lost; see `lost_peers_told`.
    """
    if global_state.client is None:
        return
    name = f"decent_jax: barrier {next(_barriers)}"
    try:
        global_state.client.wait_at_barrier(name, round(1000 * timeout_s))
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("DEADLINE_EXCEEDED"):
            raise
        raise PeerLost(
            f"some processes still compile {timeout_s:g} s after this one; increase "
            "cluster.exchange_s"
        ) from error


def gather(value: Value) -> list[Value]:
    """The values of all processes, in order, sent as JSON; all must call this equally often.

    It uses no device. If a process is lost meanwhile, this one ends, see `watch`.
    """
    client = global_state.client
    if client is None:
        return [value]
    folder = f"decent_jax/gathered/{next(_gathered)}/"
    client.key_value_set(f"{folder}{global_state.process_id:06}", json.dumps(value))
    client.wait_at_barrier(folder, round(1000 * _AT_THE_END_S))
    return [json.loads(text) for _, text in sorted(client.key_value_dir_get(folder))]


@contextlib.contextmanager
def lost_peers_told() -> Iterator[None]:
    """In this context, a failed exchange ends this process and names the lost process.

    A connection breaks at once, but which process broke it is known only after ``heartbeat_s``, so
    this process waits for the watch to end it. Any other error in the context ends all other
    processes, too.

    Raises:
      PeerLost: an exchange failed although all processes are alive.
    """
    try:
        yield
    except Exception as error:
        if _watch is None or isinstance(error, Interrupted):
            raise
        if not concerns_an_exchange(error):
            _watch.tell(error)
            raise
        time.sleep(1.5 * _watch.heartbeat_s + 10)
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise PeerLost(
            f"an exchange with other processes failed, though all are alive: {line}"
        ) from error


def concerns_an_exchange(error: BaseException | None) -> bool:
    """Whether an error or one of its causes comes from communication between processes.

    XLA's errors carry their status code only as the first word of their message.
    """
    while error is not None:
        status, _, text = str(error).partition(": ")
        from_a_library = "gloo" in text.lower() or "nccl" in text.lower()
        if status in _OF_A_SERVICE or (status in ("UNKNOWN", "INTERNAL") and from_a_library):
            return True
        error = error.__cause__ or error.__context__
    return False


def leave(code: int) -> None:
    """Exit after a failure, if this process is one of several; returns if it is the only one.

    Processes that fail for the same reason leave together, each with its own exit code. If the
    others continue, this one does not wait for long, and they detect that it is lost.
    """
    if _watch is not None:
        _watch.leave_together(_TOGETHER_S)
        exit_at_once(code)


def _say(words: str) -> None:
    before = "\n" if sys.stderr.isatty() else ""  # below a progress bar
    with contextlib.suppress(OSError):  # its terminal is gone
        print(f"{before}{Path(sys.argv[0]).name}: {words}", file=sys.stderr, flush=True)


def exit_at_once(code: int) -> None:
    """Kill the readers of data and exit, without waiting for other threads."""
    for child in multiprocessing.active_children():  # readers of data
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _leave_after_a_traceback(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    sys.__excepthook__(kind, error, traceback)
    leave(1)
