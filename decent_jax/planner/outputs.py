"""What commands write: paths, checked when the flags are read and not after the work, and tables.

`file`, `json_file` and `picture` are each the ``type`` of a flag of `argparse`.
"""

import argparse
import functools
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

PICTURES = (".png", ".pdf", ".svg")


def file(text: str, endings: Sequence[str] = ()) -> Path:
    """A file that can be written, in a folder that exists; its name has one of the endings."""
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


json_file = functools.partial(file, endings=(".json",))
picture = functools.partial(file, endings=PICTURES)


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a row is a cell for each heading."""
    lines = [
        "".join(f"| {cell} " if cell != "" else "| " for cell in row) + "|"
        for row in (headings, *rows)
    ]
    lines.insert(1, "|---" * len(headings) + "|")
    return "\n".join(lines)
