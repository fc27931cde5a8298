"""Keeps a run alive when one of its processes or hosts is lost.

On every host, an agent (`decent_jax.cluster.agent`) starts one process of the run. When a process
is lost, the supervisor ends all processes at once and restarts them, the lost one on its own host
or on a spare one; they resume from the in-memory checkpoints of their hosts
(`decent_jax.checkpoints.in_memory`), or else from the last checkpoint on disk. If no host can take
the lost process, the run continues on the remaining hosts.

A process is lost if a signal ended it, if it exited with an unexpected code, or if its agent has
died or does not answer. The order in which exit codes arrive does not matter: a survivor may end
before the supervisor notices the death of another process.

However the supervisor ends, the kernel closes the pipes to its agents, which then ask their
processes to stop as after SIGTERM, saving a checkpoint if there is time.
"""

import contextlib
import dataclasses
import json
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

VARIABLE = "DECENT_JAX_SUPERVISED"  # set if the standard input is the supervisor's pipe
REACHED = "DECENT_JAX_REACHED"  # a descriptor to which steps are written, see `reached`
PLACE = "DECENT_JAX_PLACE"  # the name of the member whose process this is
# Read from standard input: a launcher that does not forward the pipe forwards none of these.
GREETING, OF_AGENT = b"supervised\n", b"of an agent\n"
STOP = b"stop\n"  # of an agent whose supervisor is gone
_TICK_S = 0.02
_RETRY_S = 1.0  # between two agents of a host
_BEGIN_S = 5.0  # for a host to start an agent, which then imports the modules
_ANSWER_S = 10.0  # for an agent to report the end of its process after SIGKILL
_IN_VAIN = 20  # consecutive starts without progress
_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_STOP_S = 600.0  # for all to end after a signal
_REFUSED, _FAILED = 2, 1  # of `train`; a restart would not help
# Exit codes of a process that lost another: after its sentence, or by jax's abort.
_OF_SURVIVORS = (PEER_LOST, -signal.SIGABRT, 128 + signal.SIGABRT)
_GONE = 255  # the agent has ended; `ssh` exits with this code if it loses its host


@dataclasses.dataclass
class Member:
    """A host with an agent, and with a process of the run unless it is spare."""

    name: str  # of the host; on one machine, a number
    address: str  # at which the others reach it
    argv: list[str]  # prefix of its agent's command; may be empty
    agent: Any = None  # `AgentLink`
    connected_at: float = -math.inf  # seconds; start of the agent
    deaths: int = 0  # of its processes, in starts without progress


class AgentLink:
    """The supervisor's connection to an agent; the agent ends when this process does.

    Args:
      argv: the agent's command.
      environment: its variables.

    Attributes:
      here: whether the host has started the agent.
      ready: whether the agent can start a process.
      reached: the last step that its process has reported.
    """

    def __init__(self, argv: list[str], environment: dict[str, str]):
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,  # never closed while this process lives
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert self._popen.stdout is not None
        os.set_blocking(self._popen.stdout.fileno(), False)
        self._rest = b""  # the beginning of an incomplete line
        self.here, self.ready, self.reached = False, False, -1
        self._code: int | None = None

    def start(self, program: list[str], variables: dict[str, str], log: Path | None) -> None:
        """Start a process, after the previous one has ended.

        Args:
          program: a Python program and its arguments.
          variables: environment variables, in addition to the agent's.
          log: file to which its output is appended; None: it shares the output of this process.
        """
        self._code = None
        self._tell("start", program, variables, None if log is None else str(log.absolute()))

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children, if the process still runs."""
        self._tell("signal", number)

    def poll(self) -> int | None:
        """The exit code of the process; None: it runs, or was never started."""
        self._listen()
        return _GONE if self.is_gone() else self._code

    def is_ready(self) -> bool:
        """Whether the agent runs and can start a process."""
        return self.is_here() and self.ready

    def is_here(self) -> bool:
        """Whether the agent runs; it may still be importing modules."""
        self._listen()
        return self.here and not self.is_gone()

    def is_gone(self) -> bool:
        """Whether the agent has ended."""
        return self._popen.poll() is not None

    def close(self) -> None:
        """Kill the agent and its process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        with self._popen:  # waits
            pass

    def _listen(self) -> None:
        assert self._popen.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._popen.stdout.fileno(), 1 << 16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._handle(line)

    def _handle(self, line: bytes) -> None:
        try:
            what, *values = json.loads(line)
        except (ValueError, TypeError):  # a greeting of the host's shell
            return
        if what == "here":
            self.here = True
        elif what == "ready":
            self.ready = True
        elif what == "reached":
            self.reached = values[0]
        elif what == "ended":
            self._code = values[0]

    def _tell(self, *command: object) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self._popen.stdin.fileno(), json.dumps(command).encode() + b"\n")


def died(code: int | None) -> bool:
    """Whether the exit code means that the process was lost: a signal or an unexpected code."""
    ended = (0, _FAILED, _REFUSED, *_INTERRUPTED, *_OF_SURVIVORS)
    return code is not None and code not in ended


def verdict(codes: Sequence[int | None]) -> int | None:
    """The exit code of the run, or None if it should restart.

    Args:
      codes: exit codes of all processes; None: the process had to be killed.

    >>> verdict([0, 0]), verdict([143, 143]), verdict([None, 2])
    (0, 143, 2)
    >>> verdict([75, -9]), verdict([1, -9]), verdict([-9, 1]), verdict([75, None])
    (None, None, None, None)
    """
    ends = list(_INTERRUPTED)
    if not any(map(died, codes)):  # otherwise these are consequences
        ends += [_REFUSED, _FAILED]
    end = next((code for code in ends if code in codes), None)
    return 0 if end is None and set(codes) == {0} else end


class Supervisor:
    """Starts the processes of a run, and restarts them when one is lost.

    Args:
      members: hosts; a process runs on each of the first ``count``, and the others are spare.
      count: number of processes.
      connect: ``connect(member)`` starts an agent on that host and returns its `AgentLink`.
      start: ``start(members, attempt)`` lets the agent of each member start its process.
      patience_s: seconds for other processes to end after a failure, and for agents to get ready.
      again: maximum number of restarts of a host's process without progress of the run in between.
      say: callback for sentences to the user.
      clock: object with ``monotonic()`` and ``sleep(seconds)``.
    """

    def __init__(
        self,
        members: list[Member],
        count: int,
        connect: Callable[[Member], AgentLink],
        start: Callable[[list[Member], int], None],
        *,
        patience_s: float,
        again: int = 3,
        say: Callable[[str], None] = print,
        clock: Any = time,
    ):
        self._members, self._active = members, members[:count]
        self._connect, self._start, self._say, self._clock = connect, start, say, clock
        self._patience_s, self._again = patience_s, again
        self._signals: list[int] = []  # received and not forwarded yet
        self._stopped: int | None = None
        self._reached, self._in_vain = -1, 0

    def stop(self, number: int) -> None:
        """Forward a signal to all processes, which are not restarted; for signal handlers."""
        self._signals.append(number)

    def run(self) -> int:
        """Supervise until the end; returns the exit code, 1 if it gave up or not all saved."""
        try:
            for attempt in range(10**9):
                self._find_active()
                if not self._active:
                    self._say("no process is left: giving up")
                    return 1
                if self._stopped is not None:
                    return 128 + self._stopped
                began = self._clock.monotonic()
                self._start(self._active, attempt)
                codes = self._wait()
                code = verdict(codes)
                if code is None and self._stopped is not None:
                    code = _FAILED  # some ended before saving
                if code is not None:
                    return code
                self._judge(codes, self._clock.monotonic() - began)
                if self._in_vain > _IN_VAIN:
                    self._say(f"{_IN_VAIN} starts in a row without progress: giving up")
                    return 1
            raise AssertionError
        finally:
            for member in self._members:
                if member.agent is not None:
                    member.agent.close()

    def _connect_all(self) -> None:
        """Start missing and ended agents, each at most once per `_RETRY_S`."""
        now = self._clock.monotonic()
        for member in self._members:
            gone = member.agent is None or member.agent.is_gone()
            if gone and now >= member.connected_at + _RETRY_S:
                if member.agent is not None:
                    member.agent.close()
                member.agent, member.connected_at = self._connect(member), now

    def _find_active(self) -> None:
        """Wait until agents are ready; a spare host replaces one that does not answer."""
        end = self._clock.monotonic() + self._patience_s
        while not self._signals:
            self._connect_all()
            late = self._clock.monotonic() > end
            spare = self._spare()
            active = [self._in_place_of(member, spare, late) for member in self._active]
            if late or None not in active:
                break
            self._clock.sleep(_TICK_S)
        else:
            self._stopped = self._signals.pop()
            return
        for before, now in zip(self._active, active, strict=True):
            if now is None:
                self._say(f"{before.name} cannot be reached, and there is no spare host")
            elif now is not before:
                self._say(f"{now.name} takes the place of {before.name}")
        self._active = [member for member in active if member is not None]

    def _spare(self) -> list[Member]:
        """Spare hosts that are ready."""
        others = (member for member in self._members if member not in self._active)
        return [spare for spare in others if spare.agent.is_ready() and spare.deaths <= self._again]

    def _in_place_of(self, member: Member, spare: list[Member], late: bool) -> Member | None:
        """The member if ready, else a spare; None if none is ready or the member may soon be.

        If only an agent has died, its host still has the in-memory checkpoints of its process.
        """
        agent = member.agent
        if agent.is_ready():
            return member
        begins = self._clock.monotonic() < member.connected_at + _BEGIN_S and not agent.is_gone()
        return spare.pop(0) if spare and (late or not (agent.is_here() or begins)) else None

    def _wait(self) -> list[int | None]:
        """Wait for all processes; returns their exit codes, None for one that did not end in time.

        If a process was lost, the others are killed and count as survivors, whatever their code is.
        """
        agents = [member.agent for member in self._active]
        deadline, ended, killed = math.inf, False, set()
        while None in (codes := [agent.poll() for agent in agents]):
            now = self._clock.monotonic()
            if now > deadline:
                break
            while self._signals:  # the processes save a checkpoint and end
                self._stopped = number = self._signals.pop()
                for agent in agents:
                    # SIGHUP concerns the supervisor's terminal; `train` handles only the other two.
                    agent.signal(signal.SIGTERM if number == signal.SIGHUP else number)
                deadline = min(deadline, now + _STOP_S)
            if any(codes) and not ended:
                ended, deadline = True, min(deadline, now + self._patience_s)
            lost = any(died(code) or code in _OF_SURVIVORS for code in codes)
            if lost and not killed and self._stopped is None:  # otherwise they all save
                killed = {k for k, code in enumerate(codes) if code is None}
                for k in killed:
                    agents[k].signal(signal.SIGKILL)
                deadline = now + _ANSWER_S
            self._clock.sleep(_TICK_S)
        for agent, code in zip(agents, codes, strict=True):
            if code is None:  # hung; a new agent may answer
                agent.close()
        for k in killed:
            codes[k] = PEER_LOST if codes[k] == -signal.SIGKILL else codes[k]
        return codes

    def _judge(self, codes: Sequence[int | None], seconds: float) -> None:
        """Count the deaths, and exclude members whose processes die repeatedly."""
        reached = max(member.agent.reached for member in self._active)
        if further := reached > self._reached:
            self._reached = reached
            for member in self._members:
                member.deaths = 0
        self._in_vain = 0 if further else self._in_vain + 1
        lost = [k for k, code in enumerate(codes) if code is None or died(code)]
        if not lost:  # a process that aborted looks like a survivor
            self._say("a connection broke, but no process is known to be lost: all restart")
        for k in lost:
            member = self._active[k]
            member.deaths += not further
            then = "it is excluded" if member.deaths > self._again else "all restart"
            how = describe(codes[k])
            self._say(f"process {k} ({member.name}) {how} after {seconds:.0f} s: {then}")
        active, spare = [], self._spare()
        for member in self._active:
            if member.deaths <= self._again:
                active.append(member)
            elif spare:
                active.append(spare.pop(0))
                self._say(f"{active[-1].name} takes the place of {member.name}")
        self._active = active


def describe(code: int | None) -> str:
    """How a process was lost.

    >>> describe(-9), describe(137), describe(3), describe(255), describe(None)
    ('died of SIGKILL', 'died of SIGKILL', 'ended with code 3', 'is gone', 'does not answer')
    """
    if code in (None, _GONE):
        return "does not answer" if code is None else "is gone"
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"died of {signal.Signals(number).name}"
    return f"ended with code {code}"


# --- In the processes -----------------------------------------------------------------------------


def reached(step: int) -> None:
    """Report the progress of the run to the supervisor, if there is one."""
    if REACHED in os.environ:
        with contextlib.suppress(OSError):  # its agent is gone, and this process ends
            os.write(int(os.environ[REACHED]), b"%d\n" % step)


def end_with_supervisor(heartbeat_s: float) -> None:
    """Let this process end within ``heartbeat_s`` after its supervisor, if it has one.

    It has half of that time for a checkpoint. If only its agent dies, it ends at once.
    """
    if os.environ.pop(VARIABLE, None):  # children of this process are not the supervisor's
        threading.Thread(target=_watch, args=(heartbeat_s,), daemon=True).start()


def _watch(heartbeat_s: float) -> None:
    # sys.stdin would hold a lock that Python needs to exit.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        greeting = pipe.readline()
        if greeting not in (GREETING, OF_AGENT):
            return
        if pipe.readline() != STOP and greeting == OF_AGENT:
            os.killpg(0, signal.SIGKILL)  # the supervisor replaces this process
    with contextlib.suppress(OSError):  # its terminal is gone, too
        program = Path(sys.argv[0]).name
        print(f"{program}: the supervisor is gone: stopping", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(heartbeat_s / 2)
    os._exit(_FAILED)  # without a checkpoint
