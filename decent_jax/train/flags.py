"""The command line: ``--config FILE[:ARGUMENTS] [--config.x=y ...] --workdir DIR``.

absl's config flags report an unknown field with a traceback and read a missing file late. This
module reports every mistake in one sentence, before anything starts.
"""

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from decent_jax.ground import fields
from decent_jax.ground.command_line import CONFIGS, Parser
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.extras import Unavailable
from decent_jax.ground.format import shown
from decent_jax.train import config as config_lib
from decent_jax.train.config import table_of

_EPILOG = """\
examples:
  %(prog)s --config quickstart --workdir runs/quickstart
  %(prog)s --config quickstart --config.algorithm=all_reduce --workdir runs/ar
  %(prog)s --config gpt2_openwebtext:decentralized --workdir runs/gpt2 \\
      --config.data.path=DIR --config.batch_size=480

--config.NAME=VALUE sets any field of the config (model.layers, data.path, eval.every, ...); --show
prints all fields with their values. A duration is a number of steps, "2 epochs" or "5%%". Run the
same command again to resume. Ctrl-C and SIGTERM save a checkpoint first; a second Ctrl-C, at least
two seconds later, exits without one.

exit codes: 0 done; 1 failed; 2 refused before training; 75 another process was lost; 128 + the
number of a signal: interrupted (130 Ctrl-C, 143 SIGTERM, 141 broken pipe).
"""


def parse(argv: list[str], prog: str = "train.py") -> tuple[ConfigDict, str | None]:
    """The config with its overrides, and the run directory, which is None with ``--check``.

    Args:
      argv: arguments of the command line.
      prog: name of the command, for messages.

    Raises:
      ConfigError: the command line or the config file is wrong.
      SystemExit: after ``--help``, ``--show`` or ``--on``.
    """
    parser = Parser(
        prog=prog,
        description="Train a model on replicas that gossip instead of all-reducing gradients.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE[:ARGUMENTS]",
        help="config file, or the name of one included in the package: " + ", ".join(CONFIGS),
    )
    parser.add_argument("--workdir", metavar="DIR", help="the run directory")
    parser.add_argument("--show", action="store_true", help="print the config and exit")
    parser.add_argument(
        "--check",
        action="store_true",
        help="open the data, compile and time one step, print the cost of a run, and exit",
    )
    parser.add_argument(
        "--on",
        metavar="DEVICES",
        help="with --check: compile for devices that this machine need not have, without timing: "
        "v5e:4x4, tpu7x:2x2x1,slices=2, h100:2x8 (nodes x GPUs per node)",
    )
    known, rest = parser.parse_known_args(argv)
    config = override_all(load(known.config), rest)
    if known.show:
        print(_shown(config))
        sys.exit(0)
    if known.on is not None and not known.check:
        why = "must come with --check: devices that are only described cannot train"
        raise ConfigError.about("--on", known.on, why)
    if known.on is not None:
        from decent_jax.train import described

        print("\n".join(described.check_on(config_lib.parse(config), known.on)))
        sys.exit(0)
    if known.check:
        return config, None
    if not known.workdir:
        raise ConfigError("--workdir DIR is missing: the folder for metrics and checkpoints")
    return config, known.workdir


def _shown(config: ConfigDict) -> str:
    """Every field with its value and its text in docs/config.md, one per line."""
    values, table = config_lib.values_of(config), table_of(config)
    lines: list[str] = []
    for name, value in values.items():
        field = table.get(name)
        words = [] if field is None else [field.doc, field.aside() and f"({field.aside()})"]
        line = f"{name} = {shown(value) if isinstance(value, int) else repr(value)}"
        lines.append("  # ".join(filter(None, [f"{line:<36}", " ".join(filter(None, words))])))
    return "\n".join(line.rstrip() for line in lines)


def load(path_and_arguments: str) -> ConfigDict:
    """``get_config(arguments)`` of a config file; ``arguments`` is the text after the colon.

    A file included in the package is given by its name, such as ``"quickstart"``. A file may import
    modules from its own folder, as a script may.

    Raises:
      ConfigError: there is no such file, it fails, or it returns no config.
    """
    name, _, arguments = path_and_arguments.partition(":")
    # also False if the name is too long for a file
    path = name if os.path.isfile(name) else CONFIGS.get(name)
    if path is None:
        known = "" if name.endswith(".py") else f"; the package has {', '.join(CONFIGS)}"
        raise ConfigError(f"there is no config file {name!r}{known}")
    folder = str(Path(path).resolve().parent)  # for a link, its target's folder, as in Python
    if folder not in sys.path:
        sys.path.append(folder)
        inherited = os.environ.get("PYTHONPATH", "")  # for peers and workers on this machine
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [inherited, folder]))
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        if get_config is None:
            raise ConfigError(f"{path} has no function get_config()")
        config = get_config(arguments) if arguments else get_config()
    except (ConfigError, Unavailable, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything
        raise ConfigError(f"{path}: {type(error).__name__}: {_in_a_line(error)}") from error
    if not isinstance(config, ConfigDict):
        kind = type(config).__name__
        raise ConfigError(f"{path}: get_config() must return a ConfigDict, got a {kind}")
    return config


def override_all(config: ConfigDict, arguments: list[str]) -> ConfigDict:
    """Set the fields given as ``--config.NAME=VALUE``; returns ``config`` itself."""
    for name, text in _overrides(arguments):
        override(config, name, text)
    return config


def override(config: ConfigDict, name: str, text: str) -> None:
    """Set the field with the dotted ``name`` to ``text``, parsed as the field's type."""
    values, table = config_lib.values_of(config), table_of(config)
    if name not in table or name not in values:
        raise ConfigError(fields.unknown_field(name, table), field=name, value=text)
    with config.ignore_type():
        config.update_from_flattened_dict({name: fields.parse(table[name], name, text)})


def _in_a_line(error: BaseException) -> str:
    """The message of an error, without the list of all fields that a ConfigDict appends."""
    while error.args and isinstance(error.args[0], Exception):  # ConfigDict wraps a KeyError
        error = error.args[0]
    try:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    except Exception:  # the user's class may fail to print, too
        return "it cannot be printed"
    lines = [line for line in text.splitlines() if line.strip()]
    hint = f" {lines[-1]}" if len(lines) > 1 and lines[-1].startswith("Did you mean") else ""
    return (lines[0] if lines else "").partition(" Other fields present")[0] + hint


def _overrides(arguments: list[str]) -> Iterator[tuple[str, str]]:
    for argument in arguments:
        name, equals, text = argument.removeprefix("--config.").partition("=")
        if not equals or not argument.startswith("--config."):
            raise ConfigError(f"unknown argument {argument!r}; a field is --config.NAME=VALUE")
        yield name, text
