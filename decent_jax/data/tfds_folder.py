"""Folders that TensorFlow Datasets prepared as array_record, read without TensorFlow."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decent_jax.data.reading import short
from decent_jax.ground import extras
from decent_jax.ground.errors import DataError


def open_builder(folder: str | Path) -> Any:
    """TFDS's builder for the version folder `folder`.

    Raises:
      DataError: TFDS cannot read the folder, or its records are not array_record.
    """
    extras.need("train", "tensorflow_datasets")
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder_from_directory(folder)
        info = builder.info
        _ = info.features, info.splits
    except Exception as error:  # of many kinds
        raise DataError(f"{folder}: not a readable TFDS folder ({short(error)})") from None
    if info.file_format is None or info.file_format.value != "array_record":
        found = info.file_format.value if info.file_format else "an unknown format"
        raise DataError(
            f"{folder}: stored as {found}; only array_record is read without TensorFlow:"
            " prepare it again with file_format='array_record'"
        )
    return builder


def files(folder: Path, split: str) -> list[Path]:
    """The files that a split consists of, the description of its features last."""
    return [*sorted(folder.glob(f"*-{split}.*")), folder / "features.json"]


@functools.lru_cache(maxsize=4)
def records(folder: Path, split: str) -> Any:
    """The records of a split, by index."""
    return open_builder(folder).as_data_source(split=split)


def read(folder: Path, split: str, rows: range) -> Sequence[dict[str, Any]]:
    """Some records of a split; DataError where they cannot be read."""
    source = records(folder, split)
    try:
        return source.__getitems__(list(rows))
    except Exception as error:  # array_record's own kinds
        place = f"{folder}, split {split}"
        which = f"records {rows.start} to {rows.stop - 1}"
        raise DataError(f"{place}: cannot read {which} ({short(error)})") from None
