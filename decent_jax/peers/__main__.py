"""Look after a run of peers: ``decent-jax peers replay|resize --workdir DIR ...``."""

import sys

from decent_jax.peers import replay, resize

COMMANDS = {"replay": replay, "resize": resize}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status of the command that the first argument names, else 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    names = "|".join(COMMANDS)
    helps = f"usage: decent-jax peers {names} --workdir DIR ... (--help after either explains it)"
    if arguments[:1] in (["-h"], ["--help"]):
        print(
            f"{helps}\ndecent-jax train --config quickstart_peers --workdir DIR starts such a run"
        )
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        print(helps, file=sys.stderr)
        return 2
    return COMMANDS[arguments[0]].main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
