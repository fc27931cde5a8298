"""Images from the bytes of their files: JPEG by libjpeg-turbo, everything else by Pillow.

libjpeg-turbo decodes at 1/2, 1/4 or 1/8 of the size for less than the full cost, because it drops
frequencies before it transforms them; a caller that needs a small picture asks for a `shrink`.
Most files store colours at half the resolution; the decoder repeats them and does not interpolate
(`fastupsample`): crops were 6% faster and differed by 0.3 of 255 on average. (Its fast DCT would
add 2%, and differs by 0.9.)

Pillow reads what libjpeg-turbo's binding does not: CMYK files (ImageNet has some), PNG files (one
of ImageNet's is named .JPEG), and files with stray bytes. A file that neither reads to the end is
an error: a truncated photograph would otherwise be half grey.
"""

import io
import struct
import threading
import warnings
from typing import NamedTuple

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

SHRINKS = (8, 4, 2, 1)

_MOST_PIXELS = 1 << 26  # Pillow needs 11 bytes for each while it decodes

_APP1, _START_OF_SCAN = 0xE1, 0xDA  # the segment that holds EXIF data, and that before pixels
_EXIF = b"Exif\x00\x00"
_BYTE_ORDERS = {b"II": "<", b"MM": ">"}  # of TIFF
_ORIENTATION = 0x0112  # of TIFF, 1 to 8

_opening = threading.Lock()  # warnings.catch_warnings is not thread-safe


class Header(NamedTuple):
    """What is known before decoding; the size is that of the upright picture."""

    height: int  # pixels
    width: int
    turbo: bool  # whether libjpeg-turbo decodes it
    orientation: int  # EXIF's: 1 upright, 2 to 8 mirrored, turned or both


def read_header(data: bytes) -> Header:
    """The header of an image file; ValueError where `data` is no image."""
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        height, width = int(height), int(width)  # type: ignore
        turbo = space not in ("CMYK", "YCCK")
    except ValueError:
        with _open(data) as image:
            (width, height), turbo = image.size, False
    if height * width > _MOST_PIXELS:
        raise ValueError(f"has {width} x {height} pixels, more than {_MOST_PIXELS}")
    orientation = _orientation(data)
    if orientation >= 5:
        height, width = width, height
    return Header(height, width, turbo, orientation)


def decode(data: bytes, *, shrink: int = 1, header: Header | None = None) -> np.ndarray:
    """The picture, upright, in RGB.

    Args:
      data: an image file.
      shrink: 1, 2, 4 or 8; height and width are divided by it, rounded up.
      header: of `data`, where it has been read already.

    Returns:
      (ceil(H / shrink), ceil(W / shrink), 3) uint8.

    Raises:
      ValueError: `data` is no image, or not whole.
    """
    header = header or read_header(data)
    pixels = _decode_turbo(data, shrink, header) if header.turbo else None
    if pixels is None:
        pixels = _decode_pillow(data, shrink)
    return _upright(pixels, header.orientation)


def _decode_turbo(data: bytes, shrink: int, header: Header) -> np.ndarray | None:
    """The picture as stored, or None if the file may not be whole."""
    height, width = header.height, header.width
    if header.orientation >= 5:
        height, width = width, height
    try:
        return simplejpeg.decode_jpeg(
            data,
            "RGB",
            fastupsample=True,
            min_height=-(-height // shrink),
            min_width=-(-width // shrink),
        )
    except ValueError:
        return None


def _decode_pillow(data: bytes, shrink: int) -> np.ndarray:
    with _open(data) as image:
        try:
            if image.mode.startswith("I;16"):  # convert would make all but the darkest white
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            elif image.mode in ("P", "LA", "PA"):
                image = image.convert("RGBA")  # a palette's transparent colour needs this step
            return np.asarray(image.convert("RGB").reduce(shrink))
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(_reason(error)) from None


def _open(data: bytes) -> Image.Image:
    try:
        with _opening, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged EXIF data do not matter
            return Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise ValueError("is empty" if not data else "is no image") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(_reason(error)) from None


def _reason(error: Exception) -> str:
    return f"cannot be decoded ({error})"


def _orientation(data: bytes) -> int:
    """The EXIF orientation of a JPEG file, 1 where there is none or it is not valid.

    Read by hand in 4 us; Pillow's `getexif` takes 103.
    """
    try:
        value = _orientation_in(_exif(data))
    except (IndexError, KeyError, struct.error):
        return 1
    return value if value in range(1, 9) else 1


def _exif(data: bytes) -> bytes:
    """The TIFF structure in a JPEG file, empty if there is none."""
    start = 2
    while data[start] == 0xFF and data[start + 1] != _START_OF_SCAN:
        (length,) = struct.unpack_from(">H", data, start + 2)
        if data[start + 1] == _APP1 and data.startswith(_EXIF, start + 4):
            return data[start + 4 + len(_EXIF) : start + 2 + length]
        start += 2 + length
    return b""


def _orientation_in(tiff: bytes) -> int:
    order = _BYTE_ORDERS[tiff[:2]]
    (directory,) = struct.unpack_from(order + "I", tiff, 4)
    (entries,) = struct.unpack_from(order + "H", tiff, directory)
    for entry in range(entries):
        tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, directory + 2 + 12 * entry)
        if tag == _ORIENTATION:
            return value
    return 1


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """The picture turned and mirrored according to its EXIF orientation."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels
