"""What failed in a run: ``incidents.jsonl``, a line for each, written by whoever notices it.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     append(folder, "process 2 died of SIGKILL", date=1e9)
...     read(folder)
[(1000000000.0, 'process 2 died of SIGKILL')]
"""

import contextlib
import json
import time
from pathlib import Path

from decent_jax.ground.json_files import check_regular, is_real, read_bytes

FILE = "incidents.jsonl"  # of a run directory


def append(folder: str | Path, sentence: str, date: float | None = None) -> None:
    """Add a line, in one system call; a folder that takes none loses it.

    Args:
      folder: of the run.
      sentence: what failed.
      date: seconds since the epoch; None: now.
    """
    line = json.dumps({"date": time.time() if date is None else date, "what": sentence}) + "\n"
    with contextlib.suppress(OSError):
        check_regular(Path(folder) / FILE)
        with open(Path(folder) / FILE, "ab", buffering=0) as file:
            file.write(line.encode())


def read(folder: str | Path) -> list[tuple[float, str]]:
    """(date, sentence) of each line that is one, the oldest first."""
    try:
        lines = read_bytes(Path(folder) / FILE).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            entry = json.loads(line)
            if is_real(entry["date"], 0) and isinstance(entry["what"], str):
                found.append((float(entry["date"]), entry["what"]))
    return found
