"""The supervisor's agent on each host: starts the host's process of the run within milliseconds.

    python -m decent_jax.cluster.agent MODULE ...

An agent imports the modules once, including jax, without opening a device. Each process of the run
is a fork of the agent, so that the successor of a dead process has nothing to import. If a module
has started a thread, whose locks a fork would hold forever, the process starts a new interpreter,
which imports everything again.

Supervisor and agent exchange lines of JSON over standard input and output (`ssh` and `srun`
forward them). The agent receives::

    ["start", [PROGRAM, ARGUMENT, ...], {VARIABLE: VALUE}, LOG or null]
    ["signal", NUMBER]

and sends ``["here"]``, ``["ready"]`` after the imports, ``["reached", STEP]``, and
``["ended", CODE]``, where CODE is minus the signal's number if a signal killed the process. When
its standard input ends, the supervisor is gone, and the agent stops its process as after SIGTERM.
If the agent dies, the kernel closes the standard input of its process, which ends at once.
"""

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import sys
import threading
import warnings

from decent_jax.cluster.supervise import OF_AGENT, REACHED, STOP, VARIABLE

_LEAVE_S = 600.0  # for a process without a supervisor, which normally ends itself long before


class _Process:
    """A process of the run, as its agent sees it.

    Attributes:
      pidfd: file descriptor, readable once the process has ended.
      steps: file descriptor, readable when the process has reported a step.
    """

    def __init__(self, pid: int, stdin: int, steps: int):
        self.pid, self._stdin, self.steps = pid, stdin, steps
        self.pidfd = os.pidfd_open(pid)
        os.write(stdin, OF_AGENT)

    def stop(self) -> None:
        """Ask the process to save a checkpoint and end."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stdin, STOP)

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children, such as readers of data."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def end(self) -> int:
        """Kill the children of the ended process; returns its exit code."""
        self.signal(signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        for each in (self.pidfd, self._stdin, self.steps):
            os.close(each)
        return code


class Agent:
    """Starts processes, one after another, as the supervisor asks.

    Args:
      commands: descriptor of the supervisor's commands.
      reports: descriptor of the reports to the supervisor.
    """

    def __init__(self, commands: int, reports: int):
        self._commands, self._reports = commands, reports
        self._process: _Process | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(commands, selectors.EVENT_READ)
        self._rest = b""  # the beginning of an incomplete line
        self._say("here")

    def serve(self) -> list[str] | None:
        """Execute the supervisor's commands until it is gone.

        Returns:
          None in the agent; in each process that it started, the program and its arguments.
        """
        self._say("ready")
        while True:
            ready = {key.fd for key, _ in self._selector.select()}
            process = self._process
            if process is not None and process.steps in ready:
                self._pass_on(process)
            if process is not None and process.pidfd in ready:
                self._ended(process)
            if self._commands in ready:
                data = os.read(self._commands, 1 << 16)
                if not data:
                    return self._leave()
                *lines, self._rest = (self._rest + data).split(b"\n")
                for what, *arguments in map(json.loads, lines):
                    if what == "signal" and self._process is not None:
                        self._process.signal(*arguments)
                    elif what == "start" and self._process is None:
                        program = self._start(*arguments)
                        if program is not None:
                            return program

    def _start(
        self, program: list[str], variables: dict[str, str], log: str | None
    ) -> list[str] | None:
        """The program in the new process, None in the agent."""
        (stdin, ours), (steps, theirs) = os.pipe(), os.pipe()
        anew = threading.active_count() > 1
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():  # about NumPy's idle threads, which handle forks
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            os.close(stdin)
            os.close(theirs)
            self._process = _Process(pid, ours, steps)
            self._selector.register(self._process.pidfd, selectors.EVENT_READ)
            self._selector.register(steps, selectors.EVENT_READ)
            return None
        os.setsid()
        self._selector.close()
        for each in (self._commands, self._reports, ours, steps):
            os.close(each)
        os.dup2(stdin, 0)
        if log is not None:
            words = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.dup2(words, 1)
            os.dup2(words, 2)
        os.environ.update(variables | {VARIABLE: "1", REACHED: str(theirs)})
        if anew:
            os.set_inheritable(theirs, True)
            os.execv(sys.executable, [sys.executable, *program])
        return program

    def _pass_on(self, process: _Process) -> None:
        steps = os.read(process.steps, 1 << 16).split()
        if steps:
            self._say("reached", int(steps[-1]))
        else:  # it has closed its end
            self._selector.unregister(process.steps)

    def _ended(self, process: _Process) -> None:
        for each in (process.pidfd, process.steps):
            with contextlib.suppress(KeyError):
                self._selector.unregister(each)
        self._process = None
        self._say("ended", process.end())

    def _say(self, *report: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, see `serve`
            os.write(self._reports, json.dumps(report).encode() + b"\n")

    def _leave(self) -> None:
        """Let the process save a checkpoint and end, because the supervisor is gone."""
        process = self._process
        if process is None:
            return
        process.stop()
        with selectors.DefaultSelector() as selector:
            selector.register(process.pidfd, selectors.EVENT_READ)
            selector.select(_LEAVE_S)
        process.signal(signal.SIGKILL)


def main() -> None:
    """See the docstring of this module."""
    commands, reports = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # keep the output of processes out of the reports
    agent = Agent(commands, reports)
    for name in sys.argv[1:]:
        with contextlib.suppress(Exception):  # a process that needs it reports the error
            importlib.import_module(name)
    program = agent.serve()
    if program is not None:
        sys.argv[:] = program
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
