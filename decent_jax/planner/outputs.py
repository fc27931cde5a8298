"""What commands write: paths, checked when the flags are read and not after the work, and tables.

`file`, `json_file` and `picture` are each the ``type`` of a flag of `argparse`.
"""

import argparse
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

PICTURES = (".png", ".pdf", ".svg")


def file(text: str) -> Path:
    """A file that can be written, in a folder that exists."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file")
    _check_folder(text, path.parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} may not be overwritten; name another file")
    return path


def json_file(text: str) -> Path:
    """The same, and its name ends in .json."""
    return _ending(text, (".json",))


def picture(text: str) -> Path:
    """The same, and its name ends in one of `PICTURES`."""
    return _ending(text, PICTURES)


def _ending(text: str, endings: tuple[str, ...]) -> Path:
    if Path(text).suffix.lower() not in endings:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(endings)}")
    return file(text)


def _check_folder(text: str, parent: Path) -> None:
    if not parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"cannot write {text!r}: there is no folder {str(parent)!r}; make it first"
        )
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot write {text!r}: the folder {str(parent)!r} takes no files "
            f"({error.strerror}); name another"
        ) from None


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a row is a cell for each heading."""
    lines = [
        "".join(f"| {cell} " if cell != "" else "| " for cell in row) + "|"
        for row in (headings, *rows)
    ]
    lines.insert(1, "|---" * len(headings) + "|")
    return "\n".join(lines)
