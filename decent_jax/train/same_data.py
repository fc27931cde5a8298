"""Checks that all processes and sessions of a run read the same data, by comparing facts."""

import contextlib
import json
import os
import re
import socket
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from decent_jax.data import prepared_folder
from decent_jax.ground import json_files
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.pytree import PyTree
from decent_jax.tasks import Task
from decent_jax.train.settings import Config

# The data files in a folder that `decent-jax prepare` did not make.
_DATA = re.compile(r"(train|val)\.bin|.+\.array_record\S*")


def facts_of(config: Config, task: Task) -> dict[str, str]:
    """Facts about the data that must be equal in all processes and sessions of a run."""
    facts = {
        "the training data": f"{len(task.train_source)} records",
        "the validation data": f"{len(task.eval_source)} records",
    }
    folder, names = Path(str(getattr(config.data, "path", "")) or os.devnull), []
    with contextlib.suppress(OSError):  # such as data that are in no folder
        names = sorted(name for name in os.listdir(folder) if _DATA.fullmatch(name))
    with contextlib.suppress(OSError, DataError, LookupError, TypeError):  # not prepared
        manifest = json_files.read_json(folder / "manifest.json")
        about = [manifest["splits"], *map(manifest.get, ("class_names", "languages", "tokenizer"))]
        sums = zlib.crc32(json.dumps(about, sort_keys=True).encode())
        facts["the manifest of data.path"] = f"checksum {sums:08x}"
        names = manifest["files"]
    with contextlib.suppress(OSError, TypeError, ValueError):
        if sums := prepared_folder.checksum([folder / name for name in names]):
            facts["the files of data.path"] = f"checksum {sums:08x}"
    sampled = [_sampled(task.train_source), _sampled(task.eval_source)]
    if None not in sampled:
        facts["some of the records"] = "checksums {:08x} and {:08x}".format(*sampled)
    return facts


def _sampled(source: Sequence[PyTree]) -> int | None:
    """A checksum of the first, middle and last record; None if it differs when read twice.

    The checksum starts from the source's ``fingerprint`` of all records, if it has one.
    """

    def checksum() -> int | None:
        sums = getattr(source, "fingerprint", 0)
        for index in (0, len(source) // 2, len(source) - 1) if len(source) else ():
            for leaf in jax.tree.leaves(source[index]):
                if isinstance(leaf, str):  # such as a file's name, in the encoding of this host
                    leaf = leaf.encode(errors="surrogateescape")
                array = np.asarray(leaf)
                if array.dtype == object:
                    return None
                sums = zlib.crc32(array.tobytes(), sums)
        return sums

    try:
        sums = checksum()
        return sums if sums == checksum() else None
    except Exception:  # the run reports it, with the step at which it reads this record
        return None


def check_data(
    config: Config, facts: dict[str, str], others: dict[str, str], here: str, there: str
) -> None:
    """Refuse data whose facts differ from an earlier session's or another process's.

    Args:
      config: the run's config.
      facts: see `facts_of`.
      others: the facts of the other session or process.
      here: words for when or where ``facts`` were found.
      there: the same for ``others``.
    """
    for name in others | facts:
        own, other = facts.get(name, "none"), others.get(name, "none")
        if own != other:
            raise ConfigError(
                f"{name}: {other} {there}, {own} {here}; give every session and every machine of "
                "the run the same data, or take another --workdir",
                field="data.path",
                value=getattr(config.data, "path", ""),
            )


def check_same_as_train_py(config: Config, task: Task, data: dict[str, str]) -> None:
    """In an actor, refuse data whose facts differ from ``data``, the facts in `train.py`."""
    check_data(config, facts_of(config, task), data, f"on {socket.gethostname()}", "in train.py")
