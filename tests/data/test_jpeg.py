"""Decoding: every kind of file that is called .jpg, whole or refused with a reason."""

import io

import cv2
import numpy as np
import pytest
import simplejpeg
from mini_imagenet import encoded
from PIL import Image
from refusals import refuses

from decent_jax.data.images import jpeg

KEEP_COLOURS = {"subsampling": 0, "quality": 95}  # so that all decoders agree
EXIF = b"Exif\0\0II*\0\10\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"  # turned by a quarter


def picture(height=40, width=52, mode="RGB", seed=0):
    """Smooth and coloured, as photographs are."""
    rough = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    image = Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)
    return image.convert(mode)


def by_pillow(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def assert_close(pixels, wanted, atol=1):
    assert pixels.dtype == np.uint8
    np.testing.assert_allclose(pixels.astype(int), np.asarray(wanted).astype(int), atol=atol)


# --- EXIF -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_pictures_are_read_as_they_are_stored(mode):
    """As torchvision reads them: an orientation, even a damaged one, does not matter."""
    plain = encoded(picture(mode=mode), **KEEP_COLOURS)
    for exif in (EXIF, EXIF[:-10]):
        data = encoded(picture(mode=mode), exif=exif, **KEEP_COLOURS)
        np.testing.assert_array_equal(jpeg.decode(data), jpeg.decode(plain))


# --- kinds of files -------------------------------------------------------------------------------


def ycck():
    """As Photoshop writes it; libjpeg-turbo makes it from CMYK."""
    return simplejpeg.encode_jpeg(np.ascontiguousarray(picture(mode="CMYK")), 95, "CMYK", "444")


def transparent(mode):
    """Whose transparency is left out, and not the pixels below it."""
    image = picture(mode=mode)
    image.putalpha(Image.fromarray(np.tile(np.arange(52, dtype=np.uint8), (40, 1))))
    return image


FILES = {
    "JPEG": lambda: encoded(picture(), **KEEP_COLOURS),
    "progressive": lambda: encoded(picture(), progressive=True, **KEEP_COLOURS),
    "grey": lambda: encoded(picture(mode="L")),
    "CMYK": lambda: encoded(picture(mode="CMYK")),
    "YCCK": ycck,
    "stored as RGB": lambda: encoded(picture(), keep_rgb=True, **KEEP_COLOURS),
    "PNG": lambda: encoded(picture(), "PNG"),
    "grey PNG": lambda: encoded(picture(mode="L"), "PNG"),
    "black and white PNG": lambda: encoded(picture(mode="1"), "PNG"),
    "transparent PNG": lambda: encoded(transparent("RGBA"), "PNG"),
    "transparent grey PNG": lambda: encoded(transparent("LA"), "PNG"),
    "PNG with a palette": lambda: encoded(picture().quantize(16), "PNG", transparency=3),
    "PNG with a palette of as much transparency": lambda: encoded(
        picture().quantize(16), "PNG", transparency=bytes(range(16))
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_of_file(kind):
    data = FILES[kind]()
    header = jpeg.read_header(data)
    assert (header.height, header.width) == (40, 52)
    assert header.turbo == (kind in ("JPEG", "progressive", "grey", "stored as RGB"))
    assert_close(jpeg.decode(data), by_pillow(data), atol=0 if "PNG" in kind else 1)


def test_16_bits_keep_the_upper_8():
    grey = np.linspace(0, 65535, 40 * 52).reshape(40, 52).astype(np.uint16)
    wanted = np.repeat((grey >> 8)[..., None], 3, axis=-1)
    np.testing.assert_array_equal(jpeg.decode(encoded(grey, "PNG")), wanted)
    rgb = np.random.default_rng(0).integers(0, 65536, (9, 7, 3)).astype(np.uint16)
    data = cv2.imencode(".png", rgb[..., ::-1])[1].tobytes()
    np.testing.assert_array_equal(jpeg.decode(data), rgb >> 8)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_without_a_known_range_are_refused(dtype):
    data = encoded(np.full((9, 8), 7, dtype), "TIFF")
    with refuses("mode"):
        jpeg.decode(data)


# --- shrinking ------------------------------------------------------------------------------------


def box_filter(pixels, shrink):
    """Means over shrink x shrink pixels, or over what is left of them at the edges."""
    height, width = pixels.shape[:2]
    rows = [pixels[i : i + shrink].astype(float).mean(axis=0) for i in range(0, height, shrink)]
    rows = np.stack(rows)
    return np.stack([rows[:, i : i + shrink].mean(axis=1) for i in range(0, width, shrink)], axis=1)


@pytest.mark.parametrize(("shrink", "subsampling"), [(2, 2), (4, 0), (8, 2)])
def test_shrunk_pixels_are_means(shrink, subsampling):
    image = picture(203, 318)
    apart = jpeg.decode(encoded(image, quality=97, subsampling=subsampling), shrink=shrink)
    apart = np.abs(apart - box_filter(np.asarray(image), shrink))
    assert apart.mean() < 1.0
    assert apart.max() < 12  # at the edges, where blocks are padded
    exact = jpeg.decode(encoded(image, "PNG"), shrink=shrink)
    np.testing.assert_allclose(exact, box_filter(np.asarray(image), shrink), atol=0.6)


# --- files that are not whole ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "progressive", "CMYK", "PNG"])
def test_truncated_at_any_length(kind):
    data = FILES[kind]()
    missing = 23 if kind == "PNG" else 1  # its last 22 bytes are check sums and say that it ends
    lengths = {*range(0, len(data) - missing, 13), *range(len(data) - 40, len(data) - missing + 1)}
    for length in sorted(lengths):
        for shrink in (1, 8):
            with pytest.raises(ValueError):
                jpeg.decode(data[:length], shrink=shrink)


def test_no_image():
    with refuses("empty"):
        jpeg.read_header(b"")
    for data in (b"<html>Not found</html>", b"\xff", b"\xff\xd8\xff", bytes(1000)):
        with refuses("image"):
            jpeg.read_header(data)


def test_bytes_that_do_not_belong_there():
    """At the end, as downloads leave them, and in front of the marker of the end."""
    data = encoded(picture(), **KEEP_COLOURS)
    wanted = jpeg.decode(data)
    for odd in (data + b"\r\n", data + bytes(500), data[:-2] + bytes(8) + data[-2:]):
        assert by_pillow(odd).shape == wanted.shape
        assert_close(jpeg.decode(odd), wanted)
        half = jpeg.decode(odd, shrink=2)  # by Pillow, as the mean of pixels
        assert half.shape == (20, 26, 3)
        np.testing.assert_allclose(half, box_filter(wanted, 2), atol=12)


@pytest.mark.parametrize("kind", ["JPEG", "progressive", "PNG"])
def test_damaged_bytes_are_no_other_error(kind):
    """Anything may come of them but a picture of another size than the header said."""
    data, random = FILES[kind](), np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(random.integers(1, 4)):
            damaged[random.integers(len(data))] = random.integers(256)
        damaged = bytes(damaged)
        try:
            header = jpeg.read_header(damaged)
            pixels = jpeg.decode(damaged, header=header)
        except ValueError as error:
            assert str(error)
        else:
            assert pixels.shape == (header.height, header.width, 3)
