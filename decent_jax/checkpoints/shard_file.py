"""A file with the array shards of this process's devices.

It contains the length of a header, the header (JSON), the bytes of the shards, and a CRC-32 of
header and shards.
"""

import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decent_jax.ground.json_files import Json

_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
_FORMAT = "decent_jax.shards/1"


class Shard(NamedTuple):
    """The part of an array that one device holds.

    Attributes:
      index: [start, stop] in the whole array, per dimension.
      data: the part, in host memory.
    """

    index: list[list[int]]
    data: np.ndarray


def shards_of(x: jax.Array) -> list[Shard]:
    """The shards of this process's devices, ordered by device id."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.device.id)
    return [Shard(spans(shard.index, x.shape), np.asarray(shard.data)) for shard in shards]


def spans(index: Any, shape: tuple[int, ...]) -> list[list[int]]:
    """[start, stop] per dimension, of an index that is a tuple of slices of ``shape``."""
    return [list(cut.indices(size)[:2]) for cut, size in zip(index, shape, strict=True)]


def write(path: Path, header: Json, arrays: dict[str, list[Shard]]) -> None:
    """Write a file for `read`; raises OSError if that fails."""
    about = {
        name: [[shard.index, shard.data.dtype.name, shard.data.shape] for shard in shards]
        for name, shards in arrays.items()
    }
    text = json.dumps(header | {"format": _FORMAT, "arrays": about}).encode()
    checksum = zlib.crc32(text)
    with path.open("wb", buffering=0) as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for shard in (shard for shards in arrays.values() for shard in shards):
            data = np.ascontiguousarray(shard.data).reshape(-1).view(np.uint8)
            checksum = zlib.crc32(data.data, checksum)
            written = 0
            while written < data.nbytes:  # the kernel writes at most 2 GB per call
                written += file.write(data[written:].data)
        file.write(_CHECKSUM.pack(checksum))


def read_header(path: Path) -> Json:
    """The header; the arrays are neither read nor verified.

    Raises:
      OSError, ValueError, LookupError: the file cannot be read.
    """
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size))
        header = json.loads(file.read(min(length, 1 << 30)))
    if not isinstance(header, dict) or header["format"] != _FORMAT:
        raise ValueError("it has another format")
    return header


def read(path: Path) -> tuple[Json, dict[str, list[Shard]]]:
    """The header and the arrays.

    Raises:
      OSError, ValueError, LookupError: the file cannot be read or is damaged.
    """
    header, raw = read_header(path), np.fromfile(path, np.uint8)
    (length,) = _LENGTH.unpack(raw[: _LENGTH.size].data)
    start, end = _LENGTH.size + length, len(raw) - _CHECKSUM.size
    if zlib.crc32(raw[_LENGTH.size : end].data) != _CHECKSUM.unpack(raw[end:].data)[0]:
        raise ValueError("it does not match its checksum")
    arrays: dict[str, list[Shard]] = {}
    for name, shards in header["arrays"].items():
        arrays[name] = []
        for index, dtype, shape in shards:
            kind = jnp.dtype(dtype)
            size = math.prod(shape) * kind.itemsize
            arrays[name].append(Shard(index, raw[start : start + size].view(kind).reshape(shape)))
            start += size
    return header, arrays
