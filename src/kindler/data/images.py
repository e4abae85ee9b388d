"""Decode, crop and normalise images stored as PNG or JPEG bytes.

Arrays are numpy, of shape (height, width, channels). Pillow decodes and scales; the rest is numpy.
`from_bytes` combines it all into one transform:

    Estimator.from_torch(..., prepare=Prepare(transform=images.from_bytes("png", crop=32, flip=True)))
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from kindler.data.columns import Array
from kindler.errors import ConfigError, DataError, MissingExtraError

__all__ = [
    "MAX_PIXELS",
    "ImageTransform",
    "crop",
    "decode",
    "flip",
    "from_bytes",
    "normalise",
    "random_crop",
    "resize",
]

Size: TypeAlias = "int | tuple[int, int]"

MAX_PIXELS = 1 << 26  # 64 megapixels, 192 MB of RGB: more is an attack, or wants to be asked for
_FORMATS = ("PNG", "JPEG")
_MODES = ("RGB", "L", "RGBA")


def decode(
    data: bytes, *, mode: str = "RGB", max_pixels: int = MAX_PIXELS, formats: Sequence[str] = _FORMATS
) -> Array:
    """Decode an image to a uint8 array of shape (height, width, channels).

    Args:
        data: The bytes of a file.
        mode: "RGB", "L" (grey, one channel) or "RGBA"; images of another kind are converted.
        max_pixels: The largest image to accept, checked before decoding: a small file can claim to be a
            huge image.
        formats: Accepted formats, by Pillow's names.

    Raises:
        DataError: The bytes are not such an image, are truncated or damaged, or have too many pixels.
    """
    pixels: Array = _decoded(data, mode, max_pixels, formats).copy()
    return pixels


def _decoded(data: bytes, mode: str, max_pixels: int, formats: Sequence[str] = _FORMATS) -> Array:
    image_module = _pillow()
    if not isinstance(data, bytes | bytearray | memoryview | np.bytes_):
        raise DataError(f"is a {type(data).__name__}; expected the bytes of an image.")
    try:
        with image_module.open(io.BytesIO(data), formats=list(formats)) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise DataError(
                    f"claims to be an image of {width} x {height} pixels, more than"
                    f" max_pixels={max_pixels:,}.\n"
                    "Hint: pass max_pixels=... if you expect such images."
                )
            if image.mode.startswith(("I", "F")):
                raise DataError(
                    f"is an image of more than 8 bits per channel (mode {image.mode!r}), which uint8 cannot"
                    " hold.\nHint: scale its values to 0-255 first."
                )
            raw = (image if image.mode == mode else image.convert(mode)).tobytes()
    except DataError:
        raise
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning) as exc:
        raise DataError(f"claims to be an image of too many pixels: {exc}") from exc
    except Exception as exc:
        begins = bytes(data[:8])
        raise DataError(
            f"cannot be read as an image ({' or '.join(formats)}): {str(exc) or type(exc).__name__}; it has"
            f" {len(data):,} bytes and begins with {begins!r}."
        ) from exc
    return np.frombuffer(raw, np.uint8).reshape(height, width, len(raw) // (height * width))


def resize(image: Array, size: Size) -> Array:
    """Scale the image to (height, width) with Pillow's antialiased bilinear filter."""
    height, width = _pair(size)
    if image.shape[:2] == (height, width):
        return image
    pillow = _pillow()
    planes = image if image.dtype == np.uint8 else image.astype(np.float32)
    # Channel by channel: of a whole image with alpha, Pillow would weigh the colours by it.
    scaled = [
        pillow.fromarray(plane).resize((width, height), pillow.Resampling.BILINEAR)
        for plane in np.ascontiguousarray(np.moveaxis(np.atleast_3d(planes), 2, 0))
    ]
    whole = np.stack([np.asarray(plane) for plane in scaled], axis=2)
    return whole.reshape(height, width, *image.shape[2:]).astype(image.dtype, copy=False)


def crop(image: Array, size: Size, *, top: int | None = None, left: int | None = None) -> Array:
    """Cut out a part of size (height, width): the centre, unless `top` and `left` are passed."""
    height, width = _pair(size)
    rest = image.shape[0] - height, image.shape[1] - width
    if min(rest) < 0:
        raise DataError(
            f"is an image of {image.shape[0]} x {image.shape[1]} pixels, from which {height} x {width} cannot"
            " be cut.\nHint: resize it first, or pass padding=..."
        )
    first = rest[0] // 2 if top is None else top
    second = rest[1] // 2 if left is None else left
    return image[first : first + height, second : second + width]


def random_crop(image: Array, size: Size, rng: np.random.Generator, *, padding: int = 0) -> Array:
    """Cut out a random part of size (height, width), after adding a black border of `padding` pixels."""
    height, width = _pair(size)
    high, wide = image.shape[0] + 2 * padding, image.shape[1] + 2 * padding
    if high < height or wide < width:
        return crop(image, size)  # which says what is wrong
    if padding:
        bordered = np.zeros((high, wide, *image.shape[2:]), image.dtype)
        bordered[padding:-padding, padding:-padding] = image
        image = bordered
    first, second = rng.random(2).tolist()
    return crop(image, size, top=int(first * (high - height + 1)), left=int(second * (wide - width + 1)))


def flip(image: Array) -> Array:
    """Mirror the image from left to right."""
    return image[:, ::-1]


def normalise(
    image: Array,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
    *,
    channels: Literal["last", "first"] = "last",
) -> Array:
    """Convert to float32 (uint8 is scaled to 0-1), subtract `mean` and divide by `std`, per channel.

    With `channels="first"`, the result has the shape (channels, height, width).
    """
    by = np.float32(255.0) if image.dtype == np.uint8 else np.float32(1.0)
    shift = np.asarray(mean, np.float32) * by
    scale = np.float32(1.0) / (np.asarray(std, np.float32) * by)
    if channels == "first":
        image = np.moveaxis(image, -1, -3)
        shift, scale = (part if not part.ndim else part[:, None, None] for part in (shift, scale))
    made: Array = np.empty(image.shape, np.float32)
    np.subtract(image, shift, out=made)
    made *= scale
    return made


@dataclass(frozen=True)
class ImageTransform:
    """A transform that decodes a column of encoded images and then applies these steps, in this order.

    Training rows are augmented: cropped at random places and flipped at random. Rows that are evaluated or
    scored are cropped at the centre and not flipped.

    Args:
        column: The column of bytes.
        to: The name of the resulting column; defaults to `column`. Other columns stay.
        mode: "RGB", "L" or "RGBA".
        size: (height, width) to scale images to.
        crop: (height, width) to cut out.
        padding: Width of the black border added before a random crop.
        flip: Whether to mirror half of the training images.
        mean: Subtracted from each channel. With `mean` or `std`, images become float32 scaled to 0-1 first.
        std: Divides each channel.
        channels: "first" for PyTorch (channels, height, width), "last" for Keras.
        max_pixels: The largest image to accept; see `decode`.
        augments: Whether training rows are augmented.

    Raises:
        ConfigError: An argument is invalid.
    """

    column: str
    _: KW_ONLY
    to: str | None = None
    mode: str = "RGB"
    size: Size | None = None
    crop: Size | None = None
    padding: int = 0
    flip: bool = False
    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    channels: Literal["last", "first"] = "last"
    max_pixels: int = MAX_PIXELS
    augments: bool = True

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ConfigError(f"mode={self.mode!r}: must be one of {', '.join(_MODES)}.")
        if self.channels not in ("first", "last"):
            raise ConfigError(f"channels={self.channels!r}: must be 'first' or 'last'.")
        if self.padding < 0 or (self.padding and self.crop is None):
            raise ConfigError(
                f"padding={self.padding}: must be 0 or more, and needs crop=..., which removes it again."
            )
        for name, size in (("size", self.size), ("crop", self.crop)):
            if size is not None:
                _pair(size, name)

    @property
    def without_chance(self) -> ImageTransform:
        """The same transform without augmentation, for evaluation and scoring."""
        return replace(self, augments=False)

    def __call__(self, row: Mapping[str, Any], rng: np.random.Generator | None = None) -> dict[str, Any]:
        self._check(row)
        made = {name: value for name, value in row.items() if name != self.column}
        try:
            made[self.to or self.column] = self._finished(self._pixels(row[self.column], rng))
        except DataError as exc:
            raise DataError(str(exc), column=self.column) from exc.__cause__
        return made

    def of_batch(self, columns: Mapping[str, Any], rngs: Any = None) -> dict[str, Any]:
        """Transform many rows at once, which is faster: images of one size are finished together.

        `rngs` holds one generator per row (`kindler.data.row_order.RowRandoms`). A DataError has the index of
        the first bad image in `positions`.
        """
        self._check(columns)
        made = {name: values for name, values in columns.items() if name != self.column}
        cells = columns[self.column]
        drawn = itertools.repeat(None) if rngs is None or not self.augments else rngs.in_turn()
        pixels = []
        for position, (data, rng) in enumerate(zip(cells, drawn, strict=False)):
            try:
                pixels.append(self._pixels(data, rng))
            except DataError as exc:
                raise DataError(str(exc), column=self.column, positions=[position]) from exc.__cause__
        one_size = len({image.shape for image in pixels}) == 1
        made[self.to or self.column] = (
            self._finished(np.stack(pixels)) if one_size else [self._finished(p) for p in pixels]
        )
        return made

    def _check(self, row: Mapping[str, Any]) -> None:
        if self.column not in row:
            raise ConfigError(
                f"from_bytes({self.column!r}): rows have no such column, only {list(row)}.\n"
                f"Hint: feature_cols must name {self.column!r}."
            )

    def _pixels(self, data: bytes, rng: np.random.Generator | None) -> Array:
        image = _decoded(data, self.mode, self.max_pixels)
        if self.size is not None:
            image = resize(image, self.size)
        drawn = rng if self.augments else None
        if self.crop is not None and drawn is not None:
            image = random_crop(image, self.crop, drawn, padding=self.padding)
        elif self.crop is not None:
            image = crop(image, self.crop)
        return flip(image) if self.flip and drawn is not None and drawn.random() < 0.5 else image

    def _finished(self, pixels: Array) -> Array:
        if self.mean is not None or self.std is not None:
            mean, std = 0.0 if self.mean is None else self.mean, 1.0 if self.std is None else self.std
            return normalise(pixels, mean, std, channels=self.channels)
        return np.array(np.moveaxis(pixels, -1, -3) if self.channels == "first" else pixels, order="C")


from_bytes = ImageTransform


def _pair(size: Any, name: str = "size") -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else size
    if not (
        isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(n, int) and n >= 1 for n in pair)
    ):
        raise ConfigError(f"{name}={size!r}: must be (height, width), or one number for both.")
    return int(pair[0]), int(pair[1])


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as exc:
        raise MissingExtraError(what="kindler.data.images", package="Pillow", extra="images") from exc
    return Image
