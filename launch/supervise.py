"""Keep a run going when a host is lost: start its processes, and start the remaining ones again.

    python launch/supervise.py --processes 4 -- \\
        train.py --config configs/quickstart.py --workdir runs/mine
    python launch/supervise.py --hosts gpu1,gpu2,gpu3 --via "ssh {host} 'cd /shared/here &&'" -- \\
        train.py --config configs/gpt2_openwebtext.py --workdir /shared/runs/gpt2

It adds --config.cluster.coordinator, num_processes and process_id to the flags of train.py. When a
process dies (of a signal, with its host, or silent for cluster.heartbeat_s), the others end too,
and all but the dead one start again from the last checkpoint. A replica keeps its share: when one
of four processes is gone, num_replicas and batch_size become three quarters, and learning rate and
steps stay. A schedule that the new number of replicas does not allow becomes one_peer_exp.

A mistake in the config (exit code 2), failed training (1) and an interruption (130, 143) end the
run with that code. The terminal shows process 0; the others write WORKDIR/process-K.log. However
the supervisor itself ends, its processes end within cluster.heartbeat_s, after saving a checkpoint
if there is time.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from ml_collections import ConfigDict

from decent_jax.cluster import secret, supervised
from decent_jax.ground.command_line import Parser
from decent_jax.ground.errors import PEER_LOST, ConfigError
from decent_jax.ground.format import shown
from decent_jax.ground.json_files import flat
from decent_jax.train import config as config_lib
from decent_jax.train import flags

MOST_PROCESSES = 1024  # on one machine
FALLBACK = "one_peer_exp"  # a schedule for any number of replicas
STOP_S = 600.0  # for processes to stop once asked: until the next row, and to save a checkpoint
_ENDS = (1, 2, 130, 143)  # exit codes of train.py after which another start changes nothing
# Exit codes of a process that lost another: after its sentence, or by jax's abort; 1: processes
# could not write a checkpoint together.
_OF_SURVIVORS = (0, 1, PEER_LOST, -signal.SIGABRT, 128 + signal.SIGABRT)


@dataclasses.dataclass
class Member:
    """A place where a process runs until it is lost."""

    name: str  # of the host; on one machine, the number at the first start
    address: str  # where the others reach it
    argv: list[str]  # stands before the command; may be empty
    deaths: int = 0


def main(arguments: list[str]) -> int:
    """The exit code of the run, or 1 if too few processes are left."""
    try:
        options, program = _parse(arguments)
        config, workdir = flags.parse(program[1:])
        if workdir is None:
            raise ConfigError("--check starts no run: check it without supervise.py")
        members = _members(options)
        if members[0].argv and shutil.which(members[0].argv[0]) is None:
            raise ConfigError(f"--via: there is no command {shown(members[0].argv[0])}")
        fit(config, len(members), len(members))  # refused before the folder is made
        if options.hosts is None:  # the data of other hosts may be there alone
            config_lib.validate(config)
        try:
            Path(workdir).mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--workdir {workdir} cannot be made: {error}") from None
        return _supervise(options, program, config, Path(workdir), members)
    except ConfigError as error:
        return _say(str(error), 2)


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        prog="supervise.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--processes", type=int, metavar="N", help="processes on this machine")
    where.add_argument("--hosts", metavar="NAME[=ADDRESS],...", help="one process on each")
    parser.add_argument(
        "--via",
        default="ssh {host}",
        help="how to start a shell command on a host (default: %(default)s)",
    )
    add = parser.add_argument
    add("--port", type=int, default=9876, help="port of process 0, with --hosts (default: 9876)")
    add("--again", type=int, default=0, help="restarts of a process that died (default: 0)")
    add("--restarts", type=int, default=20, help="restarts of the run, at most (default: 20)")
    add("--fewest", type=int, default=1, metavar="N", help="give up below N (default: 1)")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="-- train.py and its flags")
    options = parser.parse_args(arguments)
    program = options.program[options.program[:1] == ["--"] :]
    if not program or not Path(program[0]).is_file():
        raise ConfigError("say what to start after --, such as: -- train.py --config FILE ...")
    for name, least, most in (
        ("processes", 1, MOST_PROCESSES),
        ("port", 1, 2**16 - 101),
        ("again", 0, 10**6),
        ("restarts", 0, 10**6),
    ):
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(
                f"--{name} must be at least {least} and at most {most}, got {shown(value)}"
            )
    started = options.processes if options.hosts is None else len(options.hosts.split(","))
    if not 1 <= options.fewest <= started:
        raise ConfigError(
            f"--fewest must be from 1 to {started}, the processes that are started, "
            f"got {options.fewest}"
        )
    return options, program


def _members(options: argparse.Namespace) -> list[Member]:
    if options.hosts is None:
        return [Member(f"first {k}", "localhost", []) for k in range(options.processes)]
    members = []
    for entry in options.hosts.split(","):
        name, _, address = entry.strip().partition("=")
        if not name:
            raise ConfigError(f"--hosts must be names between commas, got {shown(options.hosts)}")
        try:
            argv = shlex.split(options.via.format(host=name))
        except (ValueError, KeyError, IndexError, AttributeError):
            argv = []
        if not argv:
            raise ConfigError(
                f"--via must be a command in which {{host}} is the host, got {shown(options.via)}"
            )
        members.append(Member(name, address or name, argv))
    return members


def _supervise(options, program, config, workdir: Path, members: list[Member]) -> int:
    first = len(members)
    for attempt in range(options.restarts + 1):
        changes, notes = fit(config, first, len(members))
        if options.hosts is None:
            address = f"localhost:{_free_port()}"
        else:  # another port each time, since the last one may still be taken
            address = f"{members[0].address}:{options.port + attempt % 100}"
        command = [sys.executable, *program]
        command += [f"--config.{name}={value}" for name, value in changes.items()]
        command += [f"--config.cluster.coordinator={address}"]
        began = time.monotonic()
        processes = _start(members, command, workdir)
        pids = ", ".join(str(process.pid) for process in processes)
        _say("; ".join([f"{len(members)} processes started (pids {pids})", *notes]))
        codes, code = _wait(processes, config.cluster.heartbeat_s)
        if code is not None:
            return code
        left = _without_the_lost(members, codes, options.again, time.monotonic() - began)
        if len(left) < options.fewest:
            return _say(f"{len(left)} of {first} processes are left: giving up", 1)
        members = left
    return _say(f"the run was started again {options.restarts} times: giving up", 1)


def fit(config: ConfigDict, before: int, after: int) -> tuple[dict[str, object], list[str]]:
    """Fields of the config that change when ``before`` processes become ``after``.

    Returns:
      {name: value}, and sentences for the user.

    Raises:
      ConfigError: replicas that cannot be spread evenly over the processes.
    """
    if config.num_replicas % before:
        raise ConfigError(
            f"{config.num_replicas} replicas cannot be spread evenly over {before} processes"
        )
    if before == after:
        return {}, []
    changes, values = {}, flat(config)
    for name in ("num_replicas", "batch_size", "eval.batch_size", "mesh.devices"):
        value = values[name]
        if value:
            changes[name] = value // before * after if value % before == 0 else value
    changed = ConfigDict(config.to_dict())
    changed.num_replicas = changes["num_replicas"]
    changes["batch_size"] = config.batch_size // config.num_replicas * changed.num_replicas
    notes = [f"{name} is {value}" for name, value in changes.items()]
    if config.cluster.plan:  # some of its devices are gone
        plan = config_lib.load_plan(config)
        changes |= {"cluster.plan": "", "mix_every": plan.mix_every}
        changes |= {
            "schedule": plan.schedule.name,
            "local_size": plan.schedule.rounds[0].group_size,
        }
        changed.schedule, changed.cluster.plan = plan.schedule.name, ""
        notes.append("the plan no longer holds")
    try:
        config_lib.make_schedule(changed)
    except ConfigError as error:
        changes["schedule"] = FALLBACK
        notes.append(f"{error}: {FALLBACK} takes its place")
    return changes, notes


def _start(members: list[Member], command: list[str], workdir: Path) -> list[subprocess.Popen]:
    processes, environment = [], os.environ.copy()
    if not members[0].argv:  # on other hosts, they find their secret in the working directory
        environment.setdefault(secret.VARIABLE, secrets.token_hex(32))
    for index, member in enumerate(members):
        own = ["env", f"{supervised.VARIABLE}=1", *command]
        own += [f"--config.cluster.num_processes={len(members)}"]
        own += [f"--config.cluster.process_id={index}"]
        argv = [*member.argv, shlex.join(own)] if member.argv else own
        with contextlib.ExitStack() as stack:
            words = None  # process 0 writes to the terminal
            if index:
                words = stack.enter_context((workdir / f"process-{index}.log").open("a"))
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,  # never closed while this process lives
                stdout=words,
                stderr=words,
                env=environment,
                start_new_session=True,
            )
        processes.append(process)
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            os.write(process.stdin.fileno(), supervised.GREETING)
    return processes


def _wait(
    processes: list[subprocess.Popen], heartbeat_s: float
) -> tuple[list[int | None], int | None]:
    """Wait until all processes have ended.

    Returns:
      The exit code of each, None where it had to be killed; and that of the run, None if it should
      start again.
    """
    asked, stopped, first, deadline = [], 0, None, math.inf
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        numbers.remove(signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number)) for number in numbers
    }
    try:
        while None in [process.poll() for process in processes]:
            while asked:  # the processes save a checkpoint and end
                stopped = asked[-1]
                number = asked.pop()
                # The terminal is lost to the supervisor, and train.py knows only these two.
                _signal(processes, signal.SIGTERM if number == signal.SIGHUP else number)
                deadline = min(deadline, time.monotonic() + STOP_S)
            if first is None:
                first = next((p.returncode for p in processes if p.returncode), None)
                if first is not None:  # time for the others to notice and to end
                    deadline = min(deadline, time.monotonic() + 2 * heartbeat_s + 30)
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        codes = [process.poll() for process in processes]
    finally:
        _signal(processes, signal.SIGKILL)
        for process in processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if first is None:
        first = next((code for code in codes if code), 0)
    if first in _ENDS or (first == 0 and None not in codes):
        return codes, first
    return codes, 128 + stopped if stopped else None


def _without_the_lost(
    members: list[Member], codes: list[int | None], again: int, seconds: float
) -> list[Member]:
    """The members that can continue; prints which died."""
    lost = [k for k, code in enumerate(codes) if code not in _OF_SURVIVORS]
    if not lost:  # a process that aborted by itself looks like a survivor, too
        _say("a connection broke, but no process is known to be lost: all start again")
    for k in lost:
        members[k].deaths += 1
        how = "did not end with the others" if codes[k] is None else _describe(codes[k])
        gone = members[k].deaths > again
        then = "it is left out" if gone else "it is started again"
        _say(f"process {k} ({members[k].name}) {how} after {seconds:.0f} s: {then}")
    return [m for k, m in enumerate(members) if k not in lost or m.deaths <= again]


def _describe(code: int) -> str:
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    if code > 128 and code - 128 in set(signal.Signals):
        return f"died of {signal.Signals(code - 128).name}"
    return f"ended with code {code}"


def _signal(processes: list[subprocess.Popen], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def _say(sentence: str, code: int = 0) -> int:
    print(f"supervise: {sentence}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
