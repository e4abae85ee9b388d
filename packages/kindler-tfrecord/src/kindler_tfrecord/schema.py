"""Maps Arrow types to the three kinds of a tf.train.Feature.

Arrow                                          Feature
bool, int8 ... int64, uint8 ... uint64         int64_list
float16, float32, float64                      float_list (of 32 bits)
string, binary                                 bytes_list
lists of these, fixed or not, and tensors      the same with more values
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from pyarrow import types

from kindler_tfrecord.framing import TFRecordError

SchemaLike: TypeAlias = "pa.Schema | Mapping[str, Any]"

BYTES, FLOAT, INT64 = 1, 2, 3  # the numbers of a Feature's fields
LENGTH = b"kindler.length"  # in a field's metadata: how many values all sampled records have
KIND_NAMES = {BYTES: "bytes_list", FLOAT: "float_list", INT64: "int64_list"}

_TYPES = "integers, floats, booleans, strings, binary, and lists of those"
_INSTEAD = (
    (types.is_timestamp, "cast it to an integer first, for example microseconds since 1970"),
    (types.is_date, "cast it to an integer first, for example days since 1970"),
    (types.is_time, "cast it to an integer first"),
    (types.is_duration, "cast it to an integer first"),
    (types.is_decimal, "cast it to a float or to a string first"),
    (types.is_map, "make its keys columns of their own"),
    (
        types.is_struct,
        "make its fields columns of their own; a Spark ML vector becomes an array with vector_to_array",
    ),
)


@dataclass(frozen=True, slots=True)
class Feature:
    """`leaf` is the type of one value; `width` the values per row: None for a scalar, -1 for any number."""

    field: pa.Field
    kind: int
    leaf: pa.DataType
    width: int | None

    @property
    def name(self) -> str:
        return str(self.field.name)

    @property
    def key(self) -> bytes:
        return self.name.encode()

    @property
    def per_row(self) -> int:
        return 1 if self.width is None else self.width


def is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def kind_of(leaf: pa.DataType) -> int | None:
    if types.is_boolean(leaf) or types.is_integer(leaf):
        return INT64
    if types.is_floating(leaf):
        return FLOAT
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return BYTES if str(leaf) in names or types.is_fixed_size_binary(leaf) else None


def check_types(schema: pa.Schema) -> None:
    """Raises TFRecordError, with a hint, for the first column that an Example cannot hold."""
    for field in schema:
        kind = field.type
        while isinstance(kind, pa.BaseExtensionType) or types.is_dictionary(kind) or is_list(kind):
            kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
        if not types.is_null(kind) and kind_of(kind) is None:
            hint = next((text for check, text in _INSTEAD if check(kind)), "cast it to one of those first")
            raise TFRecordError(
                f"column {field.name!r}: values of type {kind} have no place in a tf.train.Example, which"
                f" holds {_TYPES}.\nHint: {hint}.",
                column=str(field.name),
            )


def as_schema(schema_like: SchemaLike) -> pa.Schema:
    """Of Arrow's own, or of a dict of Arrow types, numpy dtypes, "string", "binary" and (dtype, shape)."""
    if isinstance(schema_like, pa.Schema):
        schema = schema_like
    elif isinstance(schema_like, Mapping):
        schema = pa.schema([(str(name), _type(str(name), kind)) for name, kind in schema_like.items()])
    else:
        raise ValueError(
            f"schema={schema_like!r} is neither a pyarrow.Schema nor a dict.\n"
            "Hint: schema={'label': 'int64', 'image': ('float32', (28, 28)), 'name': pa.string()}."
        )
    if len(set(schema.names)) < len(schema.names):
        raise ValueError(f"schema has duplicate names: {schema.names}.")
    features(schema)
    return schema


def features(schema: pa.Schema) -> list[Feature]:
    return [_feature(field) for field in schema]


def _feature(field: pa.Field) -> Feature:
    kind = field.type
    leaf, width = kind, None
    if isinstance(kind, pa.FixedShapeTensorType):
        leaf, width = kind.value_type, math.prod(kind.shape)
    elif types.is_fixed_size_list(kind):
        leaf, width = kind.value_type, kind.list_size
    elif is_list(kind):
        leaf, width = kind.value_type, -1
    feature_kind = kind_of(leaf)
    if feature_kind is None:
        raise ValueError(
            f"schema: column {field.name!r} of type {kind} cannot be read from TFRecord files, which hold"
            f" {_TYPES}.\nHint: write a two-dimensional array as ('float32', (28, 28)), or a"
            " pa.fixed_shape_tensor."
        )
    return Feature(field, feature_kind, leaf, width)


def _type(name: str, type_like: Any) -> pa.DataType:
    if isinstance(type_like, pa.DataType):
        return type_like
    if isinstance(type_like, tuple) and len(type_like) == 2 and isinstance(type_like[1], Sequence):
        leaf, shape = _type(name, type_like[0]), [int(n) for n in type_like[1]]
        if len(shape) > 1 and kind_of(leaf) != BYTES:
            return pa.fixed_shape_tensor(leaf, shape)
        return pa.list_(leaf, math.prod(shape)) if shape else leaf
    if type_like in (str, "str", "string"):
        return pa.string()
    if type_like in (bytes, "bytes", "binary"):
        return pa.binary()
    try:
        return pa.from_numpy_dtype(np.dtype(type_like))
    except (TypeError, pa.ArrowNotImplementedError):
        raise ValueError(
            f"schema: column {name!r}: {type_like!r} is not a type.\n"
            "Hint: a pyarrow type, a numpy dtype, 'string', 'binary', or (dtype, shape)."
        ) from None
