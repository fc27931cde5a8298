"""Keeps a run going when one of its processes is lost: starts the remaining ones again.

A process counts as lost when a signal ended it, its host or its connection is gone, or it does not
end after another was lost. Which process it was decides what happens, not which exit code is seen
first: a survivor may well end before the supervisor notices the death of another.

The supervisor holds the other end of a pipe that is the standard input of each of its processes
(`ssh` and `srun` pass it on), and never closes it. However the supervisor ends, the kernel closes
the pipe: then the process stops as after SIGTERM, which saves a checkpoint, and where that takes
too long it ends without one. A line in the pipe says that another process is lost, long before that
is silent for a heartbeat: then this one ends at once, to be started again.
"""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decent_jax.ground.errors import PEER_LOST

VARIABLE = "DECENT_JAX_SUPERVISED"  # set where the standard input is the supervisor's pipe
GREETING = b"supervised\n"  # a launcher that does not pass the pipe on does not pass this on either
_TICK_S = 0.2
_IN_VAIN = 20  # starts after which no process was known to be lost
_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_REFUSED, _FAILED = 2, 1  # of `train`; another start would change nothing
# Of a process that lost another: after its sentence, or by jax's abort.
_OF_SURVIVORS = (PEER_LOST, -signal.SIGABRT, 128 + signal.SIGABRT)


@dataclasses.dataclass
class Member:
    """A place where a process runs until it is lost."""

    name: str  # of the host; on one machine, the number at the first start
    address: str  # where the others reach it
    argv: list[str]  # stands before the command; may be empty
    deaths: int = 0


class Child:
    """A process that ends when this one does.

    Args:
      argv: its command.
      environment: its variables besides `VARIABLE`.
      log: a file to which its output is appended; None: it writes where this process does.
    """

    def __init__(self, argv: list[str], environment: dict[str, str], log: Path | None):
        with contextlib.nullcontext() if log is None else log.open("a") as words:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,  # never closed while this process lives
                stdout=words,
                stderr=words,
                env=environment | {VARIABLE: "1"},
                start_new_session=True,
            )
        self.pid, self.poll = self._popen.pid, self._popen.poll
        self._write(GREETING)

    def signal(self, number: int) -> None:
        """Send a signal to it and its children, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def tell(self, line: str) -> None:
        """Send it a line, which `end_with_supervisor` reads."""
        self._write(f"{line}\n".encode())

    def _write(self, data: bytes) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self._popen.stdin.fileno(), data)

    def close(self) -> None:
        """Kill it, if it still runs, and release it."""
        self.signal(signal.SIGKILL)
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait()


def died(code: int | None) -> bool:
    """Whether the exit code is that of a process which was lost, not of one that ended itself."""
    ended = (0, _FAILED, _REFUSED, *_INTERRUPTED, *_OF_SURVIVORS)
    return code is not None and code not in ended


def verdict(codes: Sequence[int | None]) -> int | None:
    """The exit code of the run, or None if it should start again.

    Args:
      codes: of all processes; None: it had to be killed.

    >>> verdict([0, 0]), verdict([143, 143]), verdict([None, 2])
    (0, 143, 2)
    >>> verdict([75, -9]), verdict([1, -9]), verdict([-9, 1]), verdict([75, None])
    (None, None, None, None)
    """
    ends = list(_INTERRUPTED)
    if not any(map(died, codes)):  # else these are consequences
        ends += [_REFUSED, _FAILED]
    found = next((code for code in ends if code in codes), None)
    return 0 if found is None and set(codes) == {0} else found


class Supervisor:
    """Starts the processes of a run, and again those that remain when one is lost.

    Args:
      members: where processes run at first.
      start: ``start(members, attempt)`` starts a process of each member.
      patience_s: for the others to end when one has.
      stop_s: for all to end when they are asked to.
      again: deaths of a member after each of which it is started again.
      say: gets sentences for the user.
      clock: has ``monotonic()`` and ``sleep(seconds)``.
    """

    def __init__(
        self,
        members: list[Member],
        start: Callable[[list[Member], int], Sequence[Child]],
        *,
        patience_s: float,
        stop_s: float = 600.0,
        again: int = 0,
        say: Callable[[str], None] = print,
        clock: Any = time,
    ):
        self._members, self._start, self._say, self._clock = members, start, say, clock
        self._patience_s, self._stop_s = patience_s, stop_s
        self._again = again
        self._signals: list[int] = []  # asked for and not passed on so far
        self._stopped: int | None = None

    def stop(self, number: int) -> None:
        """Pass a signal on to all processes and do not start them again; for a signal handler."""
        self._signals.append(number)

    def run(self) -> int:
        """The exit code of the run: that of its processes, 128 + a signal, or 1: given up."""
        starts = _IN_VAIN + (1 + self._again) * len(self._members)
        for attempt in range(starts):
            began = self._clock.monotonic()
            processes = self._start(self._members, attempt)
            try:
                codes = self._wait(processes)
            finally:
                for process in processes:
                    process.close()
            code = verdict(codes)
            if code is None and self._stopped is not None:
                code = 128 + self._stopped
            if code is not None:
                return code
            self._leave_out_the_lost(codes, self._clock.monotonic() - began)
            if not self._members:
                self._say("no process is left: giving up")
                return 1
        self._say(f"the run was started {starts} times: giving up")
        return 1

    def _wait(self, processes: Sequence[Child]) -> list[int | None]:
        """The exit codes when all have ended; None for one that did not end in time."""
        deadline, has_ended, has_told = math.inf, False, False
        while None in (codes := [process.poll() for process in processes]):
            now = self._clock.monotonic()
            if now > deadline:
                break
            while self._signals:  # the processes save a checkpoint and end
                self._stopped = number = self._signals.pop()
                for process in processes:
                    # A lost terminal is the supervisor's, and `train` knows only these two.
                    process.signal(signal.SIGTERM if number == signal.SIGHUP else number)
                deadline = min(deadline, now + self._stop_s)
            if any(codes) and not has_ended:
                has_ended, deadline = True, min(deadline, now + self._patience_s)
            lost = next((k for k, code in enumerate(codes) if died(code)), None)
            if lost is not None and not has_told and self._stopped is None:  # else they all save
                has_told = True
                name, how = self._members[lost].name, describe(codes[lost])
                for process in processes:
                    process.tell(f"process {lost} ({name}) was lost: it {how}")
            self._clock.sleep(_TICK_S)
        return codes

    def _leave_out_the_lost(self, codes: list[int | None], seconds: float) -> None:
        lost = [k for k, code in enumerate(codes) if code is None or died(code)]
        if not lost:  # a process that aborted by itself looks like a survivor, too
            self._say("a connection broke, but no process is known to be lost: all start again")
        for k in lost:
            member = self._members[k]
            member.deaths += 1
            then = "it is left out" if member.deaths > self._again else "it is started again"
            how = describe(codes[k])
            self._say(f"process {k} ({member.name}) {how} after {seconds:.0f} s: {then}")
        gone = [k for k in lost if self._members[k].deaths > self._again]
        self._members = [m for k, m in enumerate(self._members) if k not in gone]


def describe(code: int | None) -> str:
    """How a process was lost.

    >>> describe(-9), describe(137), describe(255), describe(None)
    ('died of SIGKILL', 'died of SIGKILL', 'ended with code 255', 'did not end with the others')
    """
    if code is None:
        return "did not end with the others"
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"died of {signal.Signals(number).name}"
    return f"ended with code {code}"


# --- In the processes -----------------------------------------------------------------------------


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
    os._exit(128 + signal.SIGTERM)
