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


def read_rows(path: Path) -> list[dict]:
    """The JSON objects of a file's lines; none where there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def last_step(workdir: Path) -> int:
    """The step of the last row of a run's metrics; 0 if there is none yet."""
    from decent_jax.ground.run_folder import read_metrics  # other environments lack it

    try:
        rows = read_metrics(workdir)
    except FileNotFoundError:
        return 0
    return rows[-1]["step"] if rows else 0
