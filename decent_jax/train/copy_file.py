"""One file with the parts of arrays that this process's devices hold, and a checksum.

It is the length of a header, the header (JSON), the bytes of the parts, and a CRC-32 of both.
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

_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
_FORMAT = "decent_jax.copy/1"


class Part(NamedTuple):
    """What one device holds of an array.

    Attributes:
      index: [[start, stop], ...] in the whole array, for each of its dimensions.
      data: on the host.
    """

    index: list[list[int]]
    data: np.ndarray


def parts_of(x: jax.Array) -> list[Part]:
    """Those of the devices of this process, in the order of their numbers."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.device.id)
    return [Part(spans(shard.index, x.shape), np.asarray(shard.data)) for shard in shards]


def spans(index: Any, shape: tuple[int, ...]) -> list[list[int]]:
    return [list(one.indices(size)[:2]) for one, size in zip(index, shape, strict=True)]


def write(path: Path, header: dict[str, Any], arrays: dict[str, list[Part]]) -> None:
    """Write a file that `read` reads; OSError where it cannot be written."""
    about = {
        name: [[part.index, part.data.dtype.name, part.data.shape] for part in parts]
        for name, parts in arrays.items()
    }
    text = json.dumps(header | {"format": _FORMAT, "arrays": about}).encode()
    checksum = zlib.crc32(text)
    with path.open("wb", buffering=0) as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for part in (part for parts in arrays.values() for part in parts):
            data = np.ascontiguousarray(part.data).reshape(-1).view(np.uint8)
            checksum = zlib.crc32(data.data, checksum)
            written = 0
            while written < data.nbytes:  # the kernel takes 2 GB at once
                written += file.write(data[written:].data)
        file.write(_CHECKSUM.pack(checksum))


def read_header(path: Path) -> dict[str, Any]:
    """The header alone, without a look at the arrays.

    Raises:
      OSError, ValueError, LookupError: it cannot be read.
    """
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size))
        header = json.loads(file.read(min(length, 1 << 30)))
    if not isinstance(header, dict) or header["format"] != _FORMAT:
        raise ValueError("it has another format")
    return header


def read(path: Path) -> tuple[dict[str, Any], dict[str, list[Part]]]:
    """The header and the arrays.

    Raises:
      OSError, ValueError, LookupError: it cannot be read, or it is damaged.
    """
    header, raw = read_header(path), np.fromfile(path, np.uint8)
    (length,) = _LENGTH.unpack(raw[: _LENGTH.size].data)
    start, end = _LENGTH.size + length, len(raw) - _CHECKSUM.size
    if zlib.crc32(raw[_LENGTH.size : end].data) != _CHECKSUM.unpack(raw[end:].data)[0]:
        raise ValueError("it does not match its checksum")
    arrays: dict[str, list[Part]] = {}
    for name, parts in header["arrays"].items():
        arrays[name] = []
        for index, dtype, shape in parts:
            kind = jnp.dtype(dtype)
            size = math.prod(shape) * kind.itemsize
            arrays[name].append(Part(index, raw[start : start + size].view(kind).reshape(shape)))
            start += size
    return header, arrays
