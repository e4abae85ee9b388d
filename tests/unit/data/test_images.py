"""Images in rows: decoded, cut, scaled and normalised; damaged and hostile bytes are refused."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from kindler.data import images
from kindler.data.columns import Column, ColumnPlan
from kindler.data.preparation import Prepare, Preparer
from kindler.errors import ConfigError, DataError

Image = pytest.importorskip("PIL.Image")

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (20, 30, 3), dtype=np.uint8)


def encoded(pixels: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A small PNG that claims to be a huge image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def test_png_is_decoded_exactly_and_jpeg_nearly() -> None:
    smooth = np.add.outer(np.arange(40), np.arange(3)).astype(np.uint8)[None].repeat(40, 0) * 4

    np.testing.assert_array_equal(images.decode(encoded(PIXELS)), PIXELS)
    assert np.abs(images.decode(encoded(smooth, "JPEG", quality=95)).astype(int) - smooth).mean() < 3
    grey = images.decode(encoded(PIXELS), mode="L")
    assert (grey.shape, grey.dtype) == ((20, 30, 1), np.uint8)
    palette = Image.fromarray(PIXELS).quantize(16)
    file = io.BytesIO()
    palette.save(file, "PNG")
    np.testing.assert_array_equal(images.decode(file.getvalue()), np.array(palette.convert("RGB")))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "0 bytes"),
        (b"not an image at all", "cannot be read as an image"),
        (encoded(PIXELS)[:200], "cannot be read as an image"),
        (encoded(PIXELS)[:60] + b"\xff" * 40 + encoded(PIXELS)[100:], "cannot be read as an image"),
        (encoded(PIXELS, "GIF"), "cannot be read as an image .PNG or JPEG."),
        (bomb(9_000, 9_000), "9000 x 9000 pixels, more than max_pixels"),
        (bomb(60_000, 60_000), "too many pixels"),
        (encoded(PIXELS[:, :, 0].astype(np.uint16) * 256), "more than 8 bits"),
        ("text", "is a str"),
    ],
)
def test_damaged_and_hostile_bytes_are_refused(data: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        images.decode(data)


def test_scaling_is_that_of_pillow() -> None:
    for size in ((10, 15), (40, 45), (7, 60)):
        ours = images.resize(PIXELS, size).astype(int)
        theirs = np.array(Image.fromarray(PIXELS).resize(size[::-1], Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(ours - theirs).max() <= 1
    flat = np.full((9, 9, 1), 7, np.uint8)
    np.testing.assert_array_equal(images.resize(flat, 4), np.full((4, 4, 1), 7))
    assert images.resize(PIXELS.astype(np.float32), 5).dtype == np.float32


def test_parts_mirrors_and_norms() -> None:
    np.testing.assert_array_equal(images.crop(PIXELS, (10, 10)), PIXELS[5:15, 10:20])
    np.testing.assert_array_equal(images.flip(PIXELS), PIXELS[:, ::-1])
    normed = images.normalise(PIXELS, (0.1, 0.2, 0.3), (0.5, 0.5, 2.0))
    expected = (PIXELS / 255 - np.array([0.1, 0.2, 0.3])) / np.array([0.5, 0.5, 2.0])
    np.testing.assert_allclose(normed, expected, atol=1e-6)
    cut = images.random_crop(PIXELS, (20, 30), np.random.default_rng(1), padding=3)
    assert cut.shape == PIXELS.shape
    with pytest.raises(DataError, match="20 x 30 pixels, from which 40 x 40 cannot be cut"):
        images.crop(PIXELS, 40)


def test_one_line_augments_what_is_trained_on_and_nothing_else() -> None:
    line = images.from_bytes("png", to="image", crop=16, padding=2, flip=True, channels="first", mean=0.5)
    row = {"png": encoded(PIXELS), "age": 3}
    trained = [line(row, np.random.default_rng(seed)) for seed in range(8)]
    judged = line.without_chance(row, np.random.default_rng(0))

    assert len({made["image"].tobytes() for made in trained}) == 8
    assert all(made["image"].shape == (3, 16, 16) and made["age"] == 3 for made in trained)
    middle = images.normalise(images.crop(PIXELS, 16), 0.5).transpose(2, 0, 1)
    np.testing.assert_array_equal(judged["image"], middle)
    assert not Prepare(transform=line).augments_all
    assert Prepare(transform=line).function(trains=False)[1] == line.without_chance


def test_a_damaged_image_is_named_by_column_row_and_worker() -> None:
    columns = ColumnPlan(features=(Column(name="png", role="feature"),), labels=())
    preparer = Preparer(Prepare(transform=images.from_bytes("png")), columns, trains=True, seed=0, rank=1)

    with pytest.raises(
        DataError, match=r"column 'png', row 41: cannot be read.*in transform, worker 1"
    ) as found:
        preparer({"png": [encoded(PIXELS), b"oops"]}, rows=2, where=lambda row: 40 + row)

    assert (found.value.column, found.value.row) == ("png", 41)


@pytest.mark.parametrize(
    "given", [{"mode": "CMYK"}, {"size": 0}, {"crop": (1, 2, 3)}, {"padding": 2}, {"channels": "both"}]
)
def test_arguments_that_cannot_work_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="must be"):
        images.from_bytes("png", **given)
