"""Labelled images that TensorFlow Datasets prepared as array_record, read without TensorFlow."""

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from decent_jax.data.reading import short
from decent_jax.ground import extras
from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import Json

_BLOCK = 256  # records read at a time for their labels


def is_tfds(folder: str | Path) -> bool:
    """Whether the folder is the version folder of a TFDS data set."""
    return Path(folder, "features.json").exists() and Path(folder, "dataset_info.json").exists()


class TfdsImages:
    """A split of a data set with `image` and `label`, as storage for `image_folder.ImageFiles`.

    Args:
      path: the data set's version folder, see `is_tfds`.
      split: "train" or "val"; "val" is the data set's `validation`, or else its `test`.

    Raises:
      DataError: TFDS cannot read the folder, it is not stored as array_record, or a feature or the
        split is missing.
    """

    layout = "TFDS"

    def __init__(self, path: str, split: str):
        extras.need("train", "tensorflow_datasets")
        import tensorflow_datasets as tfds

        try:
            builder: Any = tfds.builder_from_directory(path)
            info, features, format_ = builder.info, builder.info.features, builder.info.file_format
        except Exception as error:  # TFDS raises many kinds
            raise DataError(f"{path}: not a readable TFDS folder ({short(error)})") from None
        if format_ is None or format_.value != "array_record":
            raise DataError(
                f"{path}: stored as {format_ and format_.value}; only array_record is read without "
                "TensorFlow: prepare it again with file_format='array_record'"
            )
        for name, kind in (("image", tfds.features.Image), ("label", tfds.features.ClassLabel)):
            if name not in features or not isinstance(features[name], kind):
                listed = ", ".join(map(repr, features))
                what = f"{kind.__name__} feature {name!r}"
                raise DataError(f"{path}: has no {what} among its features {listed}")
        names = {"train": ("train",), "val": ("validation", "test")}[split]
        theirs = next((name for name in names if name in info.splits), None)
        if theirs is None:
            wanted = " or ".join(names)
            raise DataError(f"{path}: has no split {wanted}; prepare it with TFDS again")
        skip: Any = tfds.decode.SkipDecoding
        try:
            self._records = builder.as_data_source(theirs, decoders={"image": skip()})
        except Exception as error:  # a shard is missing or cut short
            raise DataError(f"{path}: cannot open its split {theirs!r} ({short(error)})") from None
        self._name, self._split = f"{info.full_name}, split {theirs}", split
        self.class_names = tuple(features["label"].names)
        self.left_out: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._records)

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """The labels, (N,) int64, which only the records hold; this therefore reads all records."""
        labels = []
        for start in range(0, len(self), _BLOCK):
            block = self._read(range(start, min(start + _BLOCK, len(self))))
            labels += [record["label"] for record in block]
        return np.array(labels, np.int64)

    def read(self, index: int) -> tuple[bytes, int, str]:
        """(data, label, name) of an image."""
        (record,) = self._read(range(index, index + 1))
        label, file = int(record["label"]), record.get("file_name", f"record-{index:07}")
        name = os.fsdecode(file)
        return record["image"], label, f"{self._split}/{self.class_names[label]}/{name}"

    def _read(self, rows: range) -> list[Json]:
        try:
            return [self._records[row] for row in rows]
        except Exception as error:  # array_record has its own exceptions
            place = f"{self._name}: cannot read records {rows.start} to {rows.stop - 1}"
            raise DataError(f"{place} ({short(error)}); prepare it with TFDS again") from None
