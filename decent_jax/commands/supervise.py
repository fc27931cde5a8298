"""Keep a run alive when a process or a host is lost: start its processes, and restart them.

    decent-jax supervise --processes 4 -- \\
        train.py --config configs/quickstart.py --workdir runs/mine
    decent-jax supervise --hosts gpu1,gpu2,gpu3 --spares gpu4 \\
        --via "ssh {host} 'cd /shared/here &&'" -- \\
        train.py --config configs/gpt2_openwebtext.py --workdir /shared/runs/gpt2

The command adds --config.cluster.coordinator, num_processes and process_id to the flags of
train.py. When a process is lost (killed by a signal, ended with an unexpected exit code, lost with
its host, or silent for cluster.heartbeat_s), all processes end and restart within seconds, from the
in-memory checkpoints of their hosts (recovery.every) or else from disk. The lost process restarts
on its own host or on a spare one; if neither answers, the run continues without it. Each replica
then keeps its share of the batch: without one of four processes, num_replicas and batch_size shrink
to three quarters. The learning rate does not change, nor does the number of steps unless the run is
given in epochs. If the schedule does not allow the new number of replicas, one_peer_exp replaces
it.

A mistake in the config (exit code 2), failed training (1) and an interruption (130, 143) end the
run with that code. The terminal shows the output of process 0; the other processes write to
WORKDIR/process-K.log. If the supervisor itself ends, its processes end within
cluster.heartbeat_s, after saving a checkpoint if there is time.
"""

import argparse
import functools
import os
import secrets
import shlex
import shutil
import signal
import sys
from pathlib import Path

from decent_jax import tasks
from decent_jax.cluster import rendezvous
from decent_jax.cluster.supervise import PLACE, AgentLink, Member, Supervisor
from decent_jax.ground import extras
from decent_jax.ground.command_line import Parser, command
from decent_jax.ground.connections import free_port
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.fields import Field
from decent_jax.monitor import goodput_file
from decent_jax.train import config as config_lib
from decent_jax.train import flags
from decent_jax.train.settings import Config

FALLBACK = "one_peer_exp"  # a schedule for any number of replicas
FLAGS = {
    "processes": Field(0, "number of processes, all on this machine", at_least=0, at_most=1024),
    "port": Field(9876, "first port of process 0, with --hosts", at_least=1, at_most=2**16 - 101),
    "again": Field(3, "restarts per process while the run is stuck", at_least=0, at_most=10**6),
}
# Modules that every process needs, imported once per host.
WARM = ("decent_jax.train.synchronous", "decent_jax.commands.main", "decent_jax.plots.runs")
WARM += ("decent_jax.peers", "decent_jax.pipelines", "flax.linen", "grain")


@command("supervise")
def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code of the run, or 1 if it gave up."""
    extras.need_system("decent-jax supervise", "Linux")  # for pidfd_open
    options, program = _parse(sys.argv[1:] if arguments is None else arguments)
    fields, workdir = flags.parse(program[1:])
    if workdir is None:
        raise ConfigError("--check starts no run: check the config without a supervisor")
    config = config_lib.parse(fields)
    members, count = _members(options)
    if members[0].argv and shutil.which(members[0].argv[0]) is None:
        raise ConfigError.about("--via", members[0].argv[0], "must begin with a command")
    fit(config, count, count)  # refused before the folder is created
    if options.hosts is None:  # other hosts may have data that this one lacks
        config_lib.check_run(config)
    _make_logs(Path(workdir), count)
    secret = os.environ.get(rendezvous.SECRET) or secrets.token_hex(32)
    supervisor = Supervisor(
        members,
        count,
        functools.partial(_connect, [*WARM, *filter(None, [tasks.TASKS.get(config.task)])]),
        functools.partial(_start, options, program, config, Path(workdir), count, secret),
        patience_s=2 * config.cluster.heartbeat_s + 30,
        again=options.again,
        say=functools.partial(_tell, Path(workdir)),
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, _: supervisor.stop(number))
    return supervisor.run()


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(prog="decent-jax supervise", description=__doc__)
    add = parser.add_argument
    add("--hosts", metavar="NAME[=ADDRESS],...", help="hosts, each of which runs one process")
    add("--spares", metavar="NAME[=ADDRESS],...", help="hosts that replace a lost one")
    via = "how to start a shell command on a host (default: %(default)s)"
    add("--via", default="ssh {host}", metavar="COMMAND", help=via)
    parser.add_fields(FLAGS)
    add("program", nargs=argparse.REMAINDER, help="--, then train.py and its flags")
    options = parser.parse_args(arguments)
    program = options.program[options.program[:1] == ["--"] :]
    if not program or not Path(program[0]).is_file():
        why = "must be followed by a program to start, such as train.py --config FILE ..."
        raise ConfigError.about("--", " ".join(program[:1]), why)
    if (options.hosts is None) == (options.processes == 0):
        raise ConfigError.about("--processes", options.processes, "or --hosts must be given")
    return options, program


def _members(options: argparse.Namespace) -> tuple[list[Member], int]:
    """The hosts, with the spare ones at the end, and the number of those that start a process."""
    if options.hosts is None:
        if options.spares is not None:
            raise ConfigError.about("--spares", options.spares, "must come with --hosts")
        return [
            Member(str(k), "localhost", []) for k in range(options.processes)
        ], options.processes
    named = [_hosts("--hosts", options.hosts, options.via)]
    if options.spares is not None:
        named.append(_hosts("--spares", options.spares, options.via))
    members = [member for each in named for member in each]
    names = [member.name for member in members]
    if len(set(names)) < len(names):
        why = "must name every host once, also with --spares"
        raise ConfigError.about("--hosts", ",".join(names), why)
    return members, len(named[0])


def _hosts(flag: str, listed: str, via: str) -> list[Member]:
    members = []
    for entry in listed.split(","):
        name, _, address = entry.strip().partition("=")
        if not name:
            raise ConfigError.about(flag, listed, "must be names separated by commas")
        try:
            argv = shlex.split(via.format(host=name))
        except (ValueError, KeyError, IndexError, AttributeError):
            argv = []
        if not argv:
            why = "must be a command in which {host} stands for the host"
            raise ConfigError.about("--via", via, why)
        members.append(Member(name, address or name, argv))
    return members


def fit(config: Config, before: int, after: int) -> dict[str, object]:
    """The new values of config fields that change when ``before`` processes become ``after``.

    Raises:
      ConfigError: the replicas cannot be spread evenly over the processes.
    """
    if config.num_replicas % before:
        why = f"must be a multiple of the {before} processes"
        raise ConfigError.about("num_replicas", config.num_replicas, why)
    if before == after:
        return {}
    plan = config_lib.load_plan(config)
    planned = config_lib.config_of_plan(config, plan) if plan else config
    n = config.num_replicas // before * after
    batch_size = config.batch_size // config.num_replicas * n
    scaled = {"eval.batch_size": config.eval.batch_size, "mesh.devices": config.mesh.devices}
    scaled = {k: v // before * after for k, v in scaled.items() if v % before == 0}
    # Without the plan: some of its devices are gone.
    changes = {"cluster.plan": "", "num_replicas": n, "batch_size": batch_size} | scaled
    new = config_lib.changed(planned, **changes)
    try:
        config_lib.make_schedule(new)
    except ConfigError:
        new = config_lib.changed(new, schedule=FALLBACK)
    values = config.by_name
    return {name: value for name, value in new.by_name.items() if value != values[name]}


def _log(workdir: Path, index: int) -> Path | None:
    return workdir / f"process-{index}.log" if index else None  # process 0 has the terminal


def _make_logs(workdir: Path, count: int) -> None:
    """Create the folder and the logs, so that an obstacle is reported before the start."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for log in filter(None, (_log(workdir, index) for index in range(count))):
            log.open("a").close()
    except (OSError, ValueError) as error:
        raise ConfigError.about("--workdir", workdir, f"must be writable ({error})") from None


def _connect(modules: list[str], member: Member) -> AgentLink:
    """Start an agent that imports the modules on a host."""
    command = [sys.executable, "-m", "decent_jax.cluster.agent", *modules]
    argv = [*member.argv, shlex.join(command)] if member.argv else command
    return AgentLink(argv, os.environ.copy())


def _start(
    options: argparse.Namespace,
    program: list[str],
    config: Config,
    workdir: Path,
    first: int,
    secret: str,
    members: list[Member],
    attempt: int,
) -> None:
    """Start a process on each member; the run began with ``first`` members."""
    changes = fit(config, first, len(members))
    port = free_port() if options.hosts is None else options.port + attempt % 100
    command = [*program, *(f"--config.{name}={value}" for name, value in changes.items())]
    command += [f"--config.cluster.coordinator={members[0].address}:{port}"]
    command += [f"--config.cluster.num_processes={len(members)}"]
    for index, member in enumerate(members):
        own = {rendezvous.SECRET: secret, PLACE: member.name}
        numbered = [*command, f"--config.cluster.process_id={index}"]
        member.agent.start(numbered, own, _log(workdir, index))
    notes = [f"{name} is {value}" for name, value in changes.items()]
    _say("; ".join([f"{len(members)} processes start", *notes]))


def _tell(workdir: Path, sentence: str) -> None:
    """Report a failure, and record it for `decent-jax status`."""
    _say(sentence)
    goodput_file.add_incident(workdir, sentence)


def _say(sentence: str) -> None:
    print(f"supervise: {sentence}", file=sys.stderr, flush=True)
