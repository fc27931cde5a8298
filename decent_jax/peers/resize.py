"""Change the number of peers of a run that is under way.

    decent-jax peers resize --workdir DIR --count N

New peers join with a copy of a live one; peers that are too many leave after a last meeting.
"""

import sys
from pathlib import Path

from decent_jax.command_line import Parser
from decent_jax.errors import ConfigError
from decent_jax.json_files import write_json_atomic
from decent_jax.text import shown

MOST = 2**16  # peers, as in the config


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = Parser(
        "decent-jax peers resize",
        description="Change the number of peers of a run that is under way.",
    )
    parser.add_argument("--workdir", required=True, metavar="DIR", help="of the run")
    parser.add_argument("--count", required=True, type=int, metavar="N", help="peers, at least 1")
    try:
        options = parser.parse_args(arguments)
        if not 1 <= options.count <= MOST:
            raise ConfigError(f"--count must be from 1 to {MOST}, got {shown(options.count)}")
        folder = Path(options.workdir) / "peers"
        if not folder.is_dir() or not (folder.parent / "config.json").is_file():
            raise ConfigError(f"--workdir {options.workdir} holds no run of peers")
        write_json_atomic(folder / "count.json", {"count": options.count})
    except (ConfigError, OSError) as error:
        print(f"peers resize: {ConfigError(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
