"""``peers.json``: how far a run of peers is, who was alive, and which streams of data there are."""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from decent_jax.errors import ConfigError, DataError
from decent_jax.json_files import read_json, write_json_atomic
from decent_jax.peers.setup import FOLDER

MANIFEST = "peers.json"


def write(workdir: Path, **entries: Any) -> None:
    """Write the manifest; a reader finds the old one or the new."""
    write_json_atomic(workdir / MANIFEST, entries)


def free_slots(taken: list[int], count: int) -> list[int]:
    """The lowest slots that are free."""
    free, slot = [], 0
    while len(free) < count:
        if slot not in taken:
            free.append(slot)
        slot += 1
    return free


def read(workdir: Path, config: ConfigDict) -> dict[str, Any]:
    """The manifest of an earlier session, or an empty one.

    Raises:
      ConfigError: it is damaged, or of peers with another batch.
    """
    try:
        manifest = read_json(workdir / MANIFEST, "is damaged; take another --workdir")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except DataError as error:
        raise ConfigError(str(error)) from None
    if not _is_manifest(manifest):
        raise ConfigError(f"{workdir / MANIFEST} is damaged; take another --workdir")
    size = config.batch_size // config.num_replicas
    if manifest["batch"] != size:
        raise ConfigError(
            f"{workdir} holds a run in which a peer's batch is {manifest['batch']} examples, and "
            f"batch_size / num_replicas is {size}; to change the number of peers, set peers.count"
        )
    return manifest


def _is_manifest(found: Any) -> bool:
    """Whether it has the entries that are read, with values that a run has."""
    if not isinstance(found, dict) or not isinstance(found.get("peers"), dict):
        return False
    entries = found["peers"]
    best: Any = found.get("best")
    seconds: Any = found.get("seconds")
    return (
        all(type(found.get(k)) is int and 1 <= found[k] < 2**31 for k in ("batch", "streams"))
        and (best is None or (type(best) in (int, float) and abs(best) < 1e300))
        and type(seconds) in (int, float)
        and 0 <= seconds < 2**31
        and all(
            slot.isdecimal()
            and len(slot) < 10
            and isinstance(one, dict)
            and type(one.get("steps")) is int
            and 0 <= one["steps"] < 2**62
            and isinstance(one.get("alive"), bool)
            for slot, one in entries.items()
        )
    )


def known_steps(workdir: Path, manifest: dict[str, Any]) -> dict[int, int]:
    """{slot: steps}: those of the newest checkpoint where the slot goes on from it."""
    entries = manifest.get("peers", {})
    saved = {slot: saved_steps(workdir / FOLDER / slot) for slot in entries}
    if not any(saved.values()):  # killed before any peer has saved: all begin anew
        return {}
    return {
        int(slot): max(saved[slot]) if entry["alive"] and saved[slot] else entry["steps"]
        for slot, entry in entries.items()
    }


def saved_steps(folder: Path) -> list[int]:
    """Of the checkpoints of a peer's folder."""
    return [int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdecimal()]
