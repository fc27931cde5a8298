"""Prepare data for training: `decent-jax prepare text|images|translation --help`.

All kinds of data share the arguments, error messages and exit codes of this module. Each kind has a
module `decent_jax.data.KIND.prepare_KIND`, with a function `prepare` that scripts may call.
"""

import importlib
import signal
import sys

from decent_jax.data import worker_pool
from decent_jax.data.reading import counted
from decent_jax.ground.command_line import Parser, command
from decent_jax.ground.errors import ConfigError

KINDS = ("text", "images", "translation")


@command("prepare")
def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 2 for bad input, 130 when interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(
        prog="decent-jax prepare",
        description="Prepare data for training. `decent-jax prepare KIND --help` lists the flags.",
    )
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    name = parser.parse_args(argv[:1]).kind
    # Only the libraries of this kind need to be installed.
    kind = importlib.import_module(f"decent_jax.data.{name}.prepare_{name}")
    args = vars(_parser(name, kind).parse_args(argv[1:]))
    inputs, out = args.pop("input"), args.pop("out")
    if name == "translation":
        args["languages"] = args.pop("source_lang"), args.pop("target_lang")
    # Schedulers send SIGTERM, a closed terminal sends SIGHUP (unless nohup ignores it): clean up as
    # after Ctrl-C.
    end, is_deaf = signal.default_int_handler, signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    closed = signal.SIG_IGN if is_deaf else end
    with worker_pool.handled(signal.SIGTERM, end), worker_pool.handled(signal.SIGHUP, closed):
        try:
            manifest = kind.prepare(inputs, out, **args)
        except OSError as error:  # while writing, for example because the disk is full
            raise ConfigError(f"{out}: {error.strerror or error}") from None
        except KeyboardInterrupt:
            print("decent-jax prepare: interrupted; nothing was written", file=sys.stderr)
            return 130
    for line in kind.report(manifest):
        print(line)
    if manifest["left_out"]:
        print(f"left out, of other kinds: {counted(manifest['left_out'])}")
    print(f"wrote {out}")
    return 0


def _parser(name: str, kind) -> Parser:
    parser = Parser(
        prog=f"decent-jax prepare {name}",
        description=kind.DESCRIPTION,
        epilog=kind.EXAMPLE,
    )
    add = parser.add_argument
    many = {} if name == "images" else {"nargs": "+"}
    add("--input", required=True, metavar="PATH", help="files and folders to read", **many)
    add("--out", required=True, metavar="DIR", help="folder to create")
    kind.add_arguments(parser)
    add("--workers", type=int, metavar="N", help="number of processes (default: one per core)")
    add("--overwrite", action="store_true", help="replace the folder if it is an earlier result")
    return parser
