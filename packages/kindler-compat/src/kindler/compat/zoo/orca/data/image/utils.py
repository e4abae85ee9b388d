"""What a column of a `ParquetDataset` is, the file that says so, as Orca writes it, and images of files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from kindler.compat.zoo.orca.errors import InvalidInput
from kindler.errors import DataError, MissingExtraError
from kindler.readers.files import opened

__all__ = ["DType", "FeatureType", "SchemaField", "decode_schema", "encode_schema", "ndarray_dtype_to_dtype"]


class DType(Enum):
    """The type of a value."""

    STRING = 1
    BYTES = 2
    INT32 = 3
    FLOAT32 = 4
    UINT8 = 5


class FeatureType(Enum):
    """How a value is stored: an image file's bytes, an array, or the value itself."""

    IMAGE = 1
    NDARRAY = 2
    SCALAR = 3


_ENUMS: dict[str, type[Enum]] = {"FeatureType": FeatureType, "DType": DType}


class SchemaField(NamedTuple):
    """A column.

    Attributes:
        feature_type: How its values are stored.
        dtype: What they are; a note for readers, values are stored as they are given.
        shape: Their shape, a note as well.
    """

    feature_type: FeatureType
    dtype: DType
    shape: Any


def ndarray_dtype_to_dtype(dtype: Any) -> DType:
    name = np.dtype(dtype).name.upper()
    if name not in ("INT32", "FLOAT32", "UINT8"):
        raise InvalidInput(f"{name.lower()} is not supported: arrays are int32, float32 or uint8.")
    return DType[name]


def encode_schema(schema: Mapping[str, SchemaField]) -> str:
    return json.dumps(
        {name: field._asdict() for name, field in schema.items()},
        default=lambda value: {"__enum__": str(value)},
    )


def decode_schema(text: str | bytes) -> dict[str, SchemaField]:
    """The schema that `encode_schema`, or Orca, wrote."""
    return {name: SchemaField(**fields) for name, fields in json.loads(text, object_hook=_enum).items()}


def _enum(given: dict[str, Any]) -> Any:
    if "__enum__" not in given:
        return given
    kind, _, member = given["__enum__"].partition(".")
    return _ENUMS[kind][member]


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
