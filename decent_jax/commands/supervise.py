"""Keep a run going when a host is lost: start its processes, and start the remaining ones again.

    decent-jax supervise --processes 4 -- \\
        train.py --config configs/quickstart.py --workdir runs/mine
    decent-jax supervise --hosts gpu1,gpu2,gpu3 --via "ssh {host} 'cd /shared/here &&'" -- \\
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
import functools
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from decent_jax.cluster import rendezvous
from decent_jax.cluster.supervise import VARIABLE, Child, Member, Supervisor
from decent_jax.ground.command_line import Parser, command
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.fields import Field
from decent_jax.ground.json_files import flat
from decent_jax.train import config as config_lib
from decent_jax.train import flags

FALLBACK = "one_peer_exp"  # a schedule for any number of replicas
FLAGS = {
    "processes": Field(0, "processes on this machine", at_least=0, at_most=1024),
    "port": Field(9876, "port of process 0, with --hosts", at_least=1, at_most=2**16 - 101),
    "again": Field(0, "restarts of a process that died", at_least=0, at_most=10**6),
}


@command("supervise")
def main(arguments: list[str] | None = None) -> int:
    """The exit code of the run, or 1 if too few processes are left."""
    options, program = _parse(sys.argv[1:] if arguments is None else arguments)
    config, workdir = flags.parse(program[1:])
    if workdir is None:
        raise ConfigError("--check starts no run: check it without a supervisor")
    members = _members(options)
    if members[0].argv and shutil.which(members[0].argv[0]) is None:
        raise ConfigError.about("--via", members[0].argv[0], "must begin with a command")
    fit(config, len(members), len(members))  # refused before the folder is made
    if options.hosts is None:  # the data of other hosts may be there alone
        config_lib.validate(config)
    _make_logs(Path(workdir), len(members))
    supervisor = Supervisor(
        members,
        functools.partial(_start, options, program, config, Path(workdir), len(members)),
        patience_s=2 * config.cluster.heartbeat_s + 30,
        again=options.again,
        say=_say,
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, _: supervisor.stop(number))
    return supervisor.run()


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(prog="decent-jax supervise", description=__doc__)
    add = parser.add_argument
    add("--hosts", metavar="NAME[=ADDRESS],...", help="one process on each")
    via = "how to start a shell command on a host (default: %(default)s)"
    add("--via", default="ssh {host}", metavar="COMMAND", help=via)
    parser.add_fields(FLAGS)
    add("program", nargs=argparse.REMAINDER, help="-- train.py and its flags")
    options = parser.parse_args(arguments)
    program = options.program[options.program[:1] == ["--"] :]
    if not program or not Path(program[0]).is_file():
        raise ConfigError(
            "say what to start after --, such as: -- train.py --config FILE ...",
            field="--",
            value=" ".join(program[:1]),
        )
    if (options.hosts is None) == (options.processes == 0):
        raise ConfigError.about("--processes", options.processes, "or --hosts must be given")
    return options, program


def _members(options: argparse.Namespace) -> list[Member]:
    if options.hosts is None:
        return [Member(f"first {k}", "localhost", []) for k in range(options.processes)]
    members = []
    for entry in options.hosts.split(","):
        name, _, address = entry.strip().partition("=")
        if not name:
            raise ConfigError.about("--hosts", options.hosts, "must be names between commas")
        try:
            argv = shlex.split(options.via.format(host=name))
        except (ValueError, KeyError, IndexError, AttributeError):
            argv = []
        if not argv:
            why = "must be a command in which {host} is the host"
            raise ConfigError.about("--via", options.via, why)
        members.append(Member(name, address or name, argv))
    return members


def fit(config: ConfigDict, before: int, after: int) -> dict[str, object]:
    """Fields of the config that change when ``before`` processes become ``after``.

    Raises:
      ConfigError: replicas that cannot be spread evenly over the processes.
    """
    if config.num_replicas % before:
        why = f"must be a multiple of the {before} processes"
        raise ConfigError.about("num_replicas", config.num_replicas, why)
    if before == after:
        return {}
    plan = config_lib.load_plan(config)
    new = ConfigDict((config_lib.config_of_plan(config, plan) if plan else config).to_dict())
    new.cluster.plan = ""  # some of its devices are gone
    new.num_replicas = config.num_replicas // before * after
    new.batch_size = config.batch_size // config.num_replicas * new.num_replicas
    for section, name in ((new.eval, "batch_size"), (new.mesh, "devices")):
        if section[name] % before == 0:
            section[name] = section[name] // before * after
    try:
        config_lib.make_schedule(new)
    except ConfigError:
        new.schedule = FALLBACK
    values = flat(config)
    return {name: value for name, value in flat(new).items() if value != values[name]}


def _log(workdir: Path, index: int) -> Path | None:
    return workdir / f"process-{index}.log" if index else None  # process 0 has the terminal


def _make_logs(workdir: Path, count: int) -> None:
    """Make the folder and the logs, so that whatever prevents it is said before the start."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for log in filter(None, (_log(workdir, index) for index in range(count))):
            log.open("a").close()
    except (OSError, ValueError) as error:
        raise ConfigError.about("--workdir", workdir, f"must be writable ({error})") from None


def _start(
    options: argparse.Namespace,
    program: list[str],
    config: ConfigDict,
    workdir: Path,
    first: int,
    members: list[Member],
    attempt: int,
) -> Sequence[Child]:
    """Start a process of each member, of which there were ``first`` at first."""
    changes = fit(config, first, len(members))
    environment = os.environ.copy()
    if options.hosts is None:
        address = f"localhost:{_free_port()}"
        environment.setdefault(rendezvous.SECRET, secrets.token_hex(32))
    else:  # the secret is in the working directory; the last port may still be taken
        address = f"{members[0].address}:{options.port + attempt % 100}"
    command = ["env", f"{VARIABLE}=1", sys.executable, *program]  # also over ssh
    command += [f"--config.{name}={value}" for name, value in changes.items()]
    command += [f"--config.cluster.coordinator={address}"]
    command += [f"--config.cluster.num_processes={len(members)}"]
    children = []
    for index, member in enumerate(members):
        own = [*command, f"--config.cluster.process_id={index}"]
        argv = [*member.argv, shlex.join(own)] if member.argv else own
        children.append(Child(argv, environment, _log(workdir, index)))
    pids = ", ".join(str(child.pid) for child in children)
    notes = [f"{name} is {value}" for name, value in changes.items()]
    _say("; ".join([f"{len(members)} processes started (pids {pids})", *notes]))
    return children


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def _say(sentence: str) -> None:
    print(f"supervise: {sentence}", file=sys.stderr, flush=True)
