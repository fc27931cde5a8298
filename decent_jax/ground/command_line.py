"""What the command lines of this package have in common."""

import argparse
import functools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from decent_jax.ground.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for a wrong flag; a command then refuses it in one short sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} ({self.prog} --help shows how)")


def output_file(text: str, endings: Sequence[str] = ()) -> Path:
    """The ``type`` of a flag: a file that can be written, in a folder that exists.

    Checked when the flags are read and not after the work.

    Args:
      text: the path.
      endings: of its name, such as ``(".json",)``; none: any.
    """
    path = Path(text)
    if endings and path.suffix.lower() not in endings:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(endings)}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file")
    folder = str(path.parent)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"cannot write {text!r}: there is no folder {folder!r}; make it first"
        )
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot write {text!r}: the folder {folder!r} takes no files ({error.strerror}); "
            "name another"
        ) from None
    if path.exists() and not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} may not be overwritten; name another file")
    return path


json_file = functools.partial(output_file, endings=(".json",))
picture_file = functools.partial(output_file, endings=(".png", ".pdf", ".svg"))
