"""Compiled programs are kept in the user's cache folder: a second start compiles nothing."""

import contextlib
import hashlib
import os
import platform
from pathlib import Path

import jax

LIMIT = 4 << 30  # bytes; past it, the programs read longest ago are removed

_MIN_SECONDS = 0.2  # what compiles faster is not worth a file


def use() -> Path | None:
    """Let jax keep compiled programs; returns where, or None where the user decided otherwise.

    The folder is ``$XDG_CACHE_HOME/decent_jax/compiled/CPU``, by default in ``~/.cache``, with a
    name for what this machine's CPU can do: programs for another one may not run here, and hosts
    often share a home. jax's own settings come first: ``JAX_COMPILATION_CACHE_DIR`` names another
    folder, ``JAX_ENABLE_COMPILATION_CACHE=false`` keeps nothing.
    """
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "decent_jax" / "compiled" / _cpu()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home, or none
        return None
    if not os.access(folder, os.W_OK):
        return None
    _prune(folder.parent)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_SECONDS)
    return folder


def _cpu() -> str:
    """A name for the instructions that this CPU has."""
    said = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        said = next((line for line in lines if line.startswith(("flags", "Features"))), said)
    return f"{platform.machine()}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"


def _prune(folder: Path) -> None:
    """Removes the files read longest ago until three quarters of `LIMIT` are left."""
    found = []
    for path in folder.glob("*/*"):
        with contextlib.suppress(OSError):  # another process prunes as well
            stat = path.stat()
            found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    total = sum(size for _, size, _ in found)
    if total <= LIMIT:
        return
    for _, size, path in sorted(found):
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
        if total <= 0.75 * LIMIT:
            return
