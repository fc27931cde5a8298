"""``peers.json``: how far a run of peers is, who was alive, and which streams of data there are."""

import itertools
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.json_files import is_real, is_whole, read_json
from decent_jax.peers.setup import FOLDER

MANIFEST = "peers.json"


def free_slots(taken: list[int], count: int) -> list[int]:
    """The lowest slots that are free."""
    free = (slot for slot in itertools.count() if slot not in taken)
    return list(itertools.islice(free, max(count, 0)))


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
    return (
        all(is_whole(found.get(k), 1) for k in ("batch", "streams"))
        and (found.get("best") is None or is_real(found["best"]))
        and is_real(found.get("seconds"), 0, 2**31)
        and all(
            slot.isdecimal()
            and len(slot) < 10
            and isinstance(one, dict)
            and is_whole(one.get("steps"), most=2**62 - 1)
            and isinstance(one.get("alive"), bool)
            for slot, one in found["peers"].items()
        )
    )


def resumed(workdir: Path, manifest: dict[str, Any]) -> dict[int, int]:
    """{slot: step of its newest checkpoint}: the peers that go on from their own.

    Those that were alive; where none of them has saved, those that had died or left, too.
    """
    entries = manifest.get("peers", {})
    saved = {slot: saved_steps(workdir / FOLDER / slot) for slot in entries}
    slots = [slot for slot in entries if saved[slot]]
    alive = [slot for slot in slots if entries[slot]["alive"]]
    return {int(slot): max(saved[slot]) for slot in alive or slots}


def known_steps(workdir: Path, manifest: dict[str, Any]) -> dict[int, int]:
    """{slot: steps}: those of the newest checkpoint where the slot goes on from it."""
    known = resumed(workdir, manifest)
    if not known:  # killed before any peer has saved: all begin anew
        return {}
    entries = manifest.get("peers", {})
    return {int(slot): entry["steps"] for slot, entry in entries.items()} | known


def saved_steps(folder: Path) -> list[int]:
    """Of the checkpoints of a peer's folder."""
    return [int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdecimal()]
