"""Data sets that TensorFlow Datasets prepared as array_record, read without TensorFlow."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from decent_jax.data.reading import short
from decent_jax.ground import extras
from decent_jax.ground.errors import DataError


class Split(NamedTuple):
    """One split of a data set.

    Attributes:
      name: of the data set and the split.
      features: TFDS's description, by name.
      files: that hold it.
      records: by index, images as they are stored.
    """

    name: str
    features: Any
    files: tuple[Path, ...]
    records: Sequence[dict[str, Any]]

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.stat().st_size for file in self.files)

    def read(self, rows: range) -> list[dict[str, Any]]:
        """Some records; DataError where they cannot be read."""
        try:
            return [self.records[row] for row in rows]
        except Exception as error:  # array_record's own kinds
            place = f"{self.name}: cannot read records {rows.start} to {rows.stop - 1}"
            raise DataError(f"{place} ({short(error)}); prepare it with TFDS again") from None

    def blocks(self, count: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """All records, ``count`` at a time, each block with the number of its first."""
        for start in range(0, len(self.records), count):
            yield start, self.read(range(start, min(start + count, len(self.records))))


def is_tfds(folder: str | Path) -> bool:
    """Whether the folder is the version folder of a data set."""
    return Path(folder, "features.json").exists() and Path(folder, "dataset_info.json").exists()


def open_split(folder: str | Path, splits: Sequence[str], kinds: dict[str, str]) -> Split | None:
    """The first of these splits that a data set has; None if it has none of them.

    Args:
      folder: its version folder, ``is_tfds``.
      splits: names.
      kinds: features that it must have, with the names of their classes in ``tfds.features``.

    Raises:
      DataError: TFDS cannot read the folder, its records are not array_record, or a feature
        is missing.
    """
    extras.need("train", "tensorflow_datasets")
    import tensorflow_datasets as tfds

    try:
        builder: Any = tfds.builder_from_directory(folder)
        info, features, format_ = builder.info, builder.info.features, builder.info.file_format
    except Exception as error:  # of many kinds
        raise DataError(f"{folder}: not a readable TFDS folder ({short(error)})") from None
    if format_ is None or format_.value != "array_record":
        raise DataError(
            f"{folder}: stored as {format_ and format_.value}; only array_record is read without "
            "TensorFlow: prepare it again with file_format='array_record'"
        )
    for name, kind in kinds.items():
        if name not in features or not isinstance(features[name], getattr(tfds.features, kind)):
            found = ", ".join(map(repr, features))
            raise DataError(f"{folder}: has no {kind} feature {name!r} among its features {found}")
    split = next((name for name in splits if name in info.splits), None)
    if split is None:
        return None
    skip: Any = tfds.decode.SkipDecoding
    kept = {name: skip() for name, kind in kinds.items() if kind == "Image"}
    try:
        records = builder.as_data_source(split, decoders=kept)
    except Exception as error:  # a shard is missing or cut short
        raise DataError(f"{folder}: cannot open its split {split!r} ({short(error)})") from None
    files = tuple(sorted(Path(folder).glob(f"*-{split}.*")))
    return Split(f"{info.full_name}, split {split}", features, files, records)
