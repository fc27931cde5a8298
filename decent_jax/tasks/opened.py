"""Folders of data: opened once per run, although both its config and its task need them."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any


def once(open_folder: Callable[..., Any]) -> Callable[..., Any]:
    """``open_folder(folder, *args)``, which keeps its last result until a file there changes."""

    @functools.lru_cache(maxsize=1)
    def opened(folder: Path, files: tuple, *args: Any) -> Any:
        return open_folder(folder, *args)

    @functools.wraps(open_folder)
    def look_and_open(folder: str | Path, *args: Any) -> Any:
        found = ((path.name, path.stat()) for path in sorted(Path(folder).glob("*")))
        files = tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)
        return opened(Path(folder), files, *args)

    return look_and_open
