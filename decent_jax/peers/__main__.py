"""Manage a run of peers: ``decent-jax peers replay|resize --workdir DIR ...``."""

import sys
from pathlib import Path

from decent_jax.ground.command_line import Parser, command
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import shown
from decent_jax.ground.json_files import write_json_atomic
from decent_jax.peers import peer_run
from decent_jax.peers.replay import replay


@command("peers")
def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 if a replay differs, 2 for wrong input."""
    parser = Parser(
        "decent-jax peers",
        description="Manage a run of peers.",
        epilog="decent-jax train --config quickstart_peers --workdir DIR starts such a run.",
    )
    commands = parser.add_subparsers(dest="command", metavar="replay|resize", required=True)
    for name, words in (
        ("replay", "repeat a run of peers from its event logs and compare every bit"),
        ("resize", "change the number of peers of a running or interrupted run"),
    ):
        own = commands.add_parser(name, help=words, description=f"{words.capitalize()}.")
        own.add_argument("--workdir", required=True, metavar="DIR", help="the run directory")
        if name == "resize":
            most = "new number of peers, at least 1"
            own.add_argument("--count", required=True, type=int, metavar="N", help=most)
    options = parser.parse_args(arguments)
    if options.command == "replay":
        return _replay(options.workdir)
    resize(Path(options.workdir), options.count)
    print(
        f"{options.workdir} will have {shown(options.count)} peers: its train.py follows "
        "within seconds, or when the run is resumed, and reports which peers join or leave"
    )
    return 0


def _replay(workdir: str) -> int:
    peers = replay(workdir, print)
    survivors = [peer for peer in peers if peer.survived]
    different = [peer for peer in peers if peer.differs]
    print(
        f"{len(peers)} peers replayed, {len(survivors)} of which finished: "
        + (f"{len(different)} differ" if different else "every parameter is identical")
    )
    return 1 if different else 0


def resize(workdir: Path, count: int) -> None:
    """Change the number of peers of a run.

    New peers join with the state of a live peer; surplus peers leave after a last average.

    Raises:
      ConfigError: the count is out of range, or the folder holds no run of peers.
    """
    if not 1 <= count <= peer_run.MOST:
        raise ConfigError(f"--count must be from 1 to {peer_run.MOST}, got {shown(count)}")
    folder = workdir / peer_run.FOLDER
    if not folder.is_dir() or not (workdir / "config.json").is_file():
        raise ConfigError(f"--workdir {workdir} holds no run of peers")
    write_json_atomic(folder / peer_run.COUNT, {"count": count})


if __name__ == "__main__":
    sys.exit(main())
