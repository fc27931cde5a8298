"""Code that the commands share: flags, refusals, names of configs, and protection of files."""

import argparse
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from decent_jax.ground.errors import ConfigError, RunError
from decent_jax.ground.extras import Unavailable
from decent_jax.ground.json_files import check_regular


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError for a wrong flag, which `command` reports in a sentence."""

    def __init__(self, prog: str, **options):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, **{"formatter_class": form, "allow_abbrev": False} | options)
        self._fields: dict[str, Any] = {}

    def add_fields(self, table: Mapping[str, Any]) -> None:
        """Adds a flag for each `decent_jax.ground.fields.Field`, whose bounds the parser checks."""
        self._fields |= table
        for name, field in table.items():
            kind, about = type(field.default), f"{field.doc} (default: {field.default})"
            self.add_argument(f"--{name}", type=kind, default=field.default, help=about)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in `argparse`, but raises ConfigError for a value out of bounds."""
        known, rest = super().parse_known_args(args, namespace)
        for name, field in self._fields.items():
            field.check(f"--{name}", getattr(known, name))
        return known, rest

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} ({self.prog} --help shows how)")


def command(name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorates the ``main`` of ``decent-jax NAME``.

    A refusal becomes one sentence on stderr and exit code 2.
    """

    def decorated(main: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(main)
        def called(*arguments: object, **options: object) -> int:
            try:
                return main(*arguments, **options)
            except BrokenPipeError:  # broken pipe; see `console`
                raise
            except (ValueError, RunError, Unavailable, OSError) as error:
                said = str(ConfigError(error))
                if isinstance(error, OSError) and error.filename is not None:
                    said = f"{str(error.filename)!r} cannot be used ({error.strerror})"
                print(f"decent-jax {name}: {said}", file=sys.stderr)
                return 2

        return called

    return decorated


def model_parser(name: str, description: str | None) -> Parser:
    """A parser with the flags that choose a model in `sample`, `export` and `translate`."""
    parser = Parser(prog=f"decent-jax {name}", description=description)
    parser.add_argument("--workdir", required=True, metavar="DIR", help="the run directory")
    which = "the newest checkpoint (default), or the one with the best validation loss"
    parser.add_argument("--which", choices=("last", "best"), default="last", help=which)
    return parser


# --- Config files ---------------------------------------------------------------------------------

_PACKAGE = Path(__file__).parents[1]
# The folder of configs is inside the package in a wheel, and next to it in a checkout.
_FOLDER = next((p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir()), None)

# The included configs by name, such as "quickstart".
CONFIGS = {path.stem: path for path in sorted(_FOLDER.glob("*.py"))} if _FOLDER else {}


def chosen(arguments: str, *kinds: Sequence[str]) -> list[str]:
    """One name of each kind, from the ``arguments`` of a config file's `get_config`.

    The names may come in any order; the default of each kind is its first name.

    Raises:
      ConfigError: a name belongs to no kind, or two names belong to one kind.

    >>> chosen("runlocal,ring", ("complete", "ring"), ("", "runlocal"))
    ['ring', 'runlocal']
    """
    names = arguments.split(",")
    matches = [[name for name in names if name and name in kind] for kind in kinds]
    if sum(map(len, matches)) < len(names) or max(map(len, matches)) > 1:
        known = "; ".join(", ".join(filter(None, kind)) for kind in kinds)
        raise ConfigError.about("--config FILE:ARGUMENTS", arguments, f"takes one each of {known}")
    return [of[0] if of else kind[0] for of, kind in zip(matches, kinds, strict=True)]


# --- Files that a command writes ------------------------------------------------------------------


def output_file(text: str, endings: Sequence[str] = ()) -> Path:
    """The argparse ``type`` of a flag that names a writable file in an existing folder.

    The file is checked when the flags are parsed, not after the work.

    Args:
      text: the path.
      endings: the allowed endings of its name, such as ``(".json",)``; if empty, any is allowed.
    """
    path = Path(text)
    if endings and path.suffix.lower() not in endings:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(endings)}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot write {text!r}: no file can be created in the folder {str(path.parent)!r} "
            f"({error.strerror}); make it, or name another"
        ) from None
    return path


picture_file = functools.partial(output_file, endings=(".png", ".pdf", ".svg"))

MARK = "decent_jax"  # in the metadata of pictures, and in the format of JSON files
_OURS = re.compile(rb"(\{|\x89PNG|%PDF|<\?xml|<!doctype html>).*" + MARK.encode(), re.DOTALL)


def check_replaceable(path: str | Path, flag: str, ours: re.Pattern[bytes] = _OURS) -> None:
    """Raises ConfigError if ``path`` exists and is not a file written by this package.

    Args:
      path: the path in ``flag``.
      flag: the name of the flag, for the message, such as ``"--out"``.
      ours: pattern for the first bytes of this package's files.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError.about(flag, path, "must be a file, not a folder")
    if not os.path.lexists(path):
        return
    try:
        check_regular(path)
        with path.open("rb") as file:
            content = file.read(1 << 24)
    except OSError as error:  # FileNotFoundError: a link to nothing
        raise ConfigError.about(flag, path, f"must be another file ({error.strerror})") from None
    if content and not ours.match(content):
        raise ConfigError.about(flag, path, "must be new, or a file that this command has written")


def check_removable(
    folder: Path, ours: re.Pattern[str], error: type[Exception] = ConfigError
) -> None:
    """Raises ``error`` if a folder to be removed holds anything but this package's files.

    Args:
      folder: an existing folder.
      ours: pattern for the names of this package's files, and of its folders with a trailing "/".
      error: ConfigError or DataError.
    """
    for path in sorted(folder.iterdir()):
        if not ours.fullmatch(path.name + "/" * path.is_dir()):
            raise error(
                f"{path}: was not made by this package and would be lost; move it elsewhere"
            )
