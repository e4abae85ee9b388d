"""An image file as an image of Pillow."""

from __future__ import annotations

from typing import Any

from kindler.errors import DataError, MissingExtraError
from kindler.readers.files import opened


def picture(file: str) -> Any:
    """The image, whole, so that it can travel."""
    try:
        from PIL import Image
    except ModuleNotFoundError as exc:
        raise MissingExtraError(what="images", package="Pillow", extra="images") from exc
    try:
        with opened(file) as raw:
            image = Image.open(raw)
            image.load()
    except (OSError, SyntaxError, ValueError) as exc:
        raise DataError(f"{file} cannot be read as an image: {exc}") from exc
    return image
