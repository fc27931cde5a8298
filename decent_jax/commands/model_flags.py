"""The flags by which `sample`, `export` and `translate` choose a model."""

import argparse

from decent_jax.ground.command_line import Parser


def parser(command: str, description: str | None) -> Parser:
    """A parser with the flags ``--workdir`` and ``--which``."""
    result = Parser(
        prog=f"decent-jax {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--workdir", required=True, metavar="DIR", help="folder of a run")
    result.add_argument(
        "--which",
        choices=("last", "best"),
        default="last",
        help="consensus of the newest checkpoint (default), or that with the best validation loss",
    )
    return result
