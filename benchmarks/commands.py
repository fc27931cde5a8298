"""What the command lines of the benchmarks share."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path


def parser(doc: str | None, **options: bool) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring, which also has the usage."""
    return argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
