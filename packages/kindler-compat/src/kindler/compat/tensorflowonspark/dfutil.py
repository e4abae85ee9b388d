"""DataFrames as TFRecord files, with TensorFlowOnSpark's names and types; no jar is needed.

Types are inferred as there (int64 -> long, float -> double, bytes -> string unless listed as binary; one
value is a scalar, several are an array), but from a sample of records rather than from the first one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from kindler import tfrecord
from kindler.errors import DataError
from kindler.spark.feeding import session_of

_loaded: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def saveAsTFRecords(df: Any, output_dir: str) -> None:
    """Write a DataFrame as a folder of TFRecord files, one for each partition."""
    tfrecord.write(df, output_dir)


def loadTFRecords(sc: Any, input_dir: str, binary_features: Sequence[str] = ()) -> Any:
    found = tfrecord.infer_schema(input_dir, binary=tuple(binary_features))
    schema = pa.schema([pa.field(f.name, _wide(f.type, f.name in binary_features)) for f in found])
    frame = tfrecord.scan(session_of(sc), input_dir, schema=schema)
    _loaded[id(frame)] = frame
    return frame


def isLoadedDF(df: Any) -> bool:
    return _loaded.get(id(df)) is df


def toTFExample(
    dtypes: Sequence[tuple[str, str]],
) -> Callable[[Iterable[Any]], Iterator[tuple[bytearray, None]]]:
    """A function for `mapPartitions` that makes serialized Examples of rows with these Spark types."""
    for name, kind in dtypes:
        _feature_kind(name, kind)

    def convert(rows: Iterable[Any]) -> Iterator[tuple[bytearray, None]]:
        import tensorflow as tf

        for row in rows:
            features = {}
            for name, kind in dtypes:
                field = _feature_kind(name, kind)
                values = row[name] if kind.startswith("array<") else [row[name]]
                if field == "bytes_list":
                    values = [v.encode() if isinstance(v, str) else bytes(v) for v in values]
                lists = {"int64_list": tf.train.Int64List, "float_list": tf.train.FloatList}
                made = lists.get(field, tf.train.BytesList)(value=values)
                features[name] = tf.train.Feature(**{field: made})
            example = tf.train.Example(features=tf.train.Features(feature=features))
            yield bytearray(example.SerializeToString()), None

    return convert


def fromTFExample(iter: Iterable[Any], binary_features: Sequence[str] = ()) -> list[Any]:  # noqa: A002
    """Rows of serialized Examples: of pairs whose first item is the bytes, as Hadoop's reader gives them."""
    import tensorflow as tf
    from pyspark.sql import Row

    rows = []
    for record in iter:
        example = tf.train.Example()
        example.ParseFromString(bytes(record[0]))
        features = example.features.feature
        rows.append(Row(**{name: _value(name, features[name], binary_features) for name in sorted(features)}))
    return rows


def infer_schema(example: Any, binary_features: Sequence[str] = ()) -> Any:
    from pyspark.sql import types as T

    fields = []
    for name in sorted(example.features.feature):
        feature = example.features.feature[name]
        field = feature.WhichOneof("kind")
        text = T.BinaryType() if name in binary_features else T.StringType()
        kind: Any = {"int64_list": T.LongType(), "float_list": T.DoubleType()}.get(field or "", text)
        several = field is not None and len(getattr(feature, field).value) > 1
        fields.append(T.StructField(name, T.ArrayType(kind, True) if several else kind, True))
    return T.StructType(fields)


def _value(name: str, feature: Any, binary_features: Sequence[str]) -> Any:
    field = feature.WhichOneof("kind")
    values: list[Any] = [] if field is None else list(getattr(feature, field).value)
    if field == "bytes_list":
        values = [bytearray(v) if name in binary_features else v.decode() for v in values]
    return None if not values else values[0] if len(values) == 1 else values


def _feature_kind(name: str, kind: str) -> str:
    inner = kind.removeprefix("array<").removesuffix(">")
    is_array = inner != kind
    if inner in ("tinyint", "smallint", "int", "bigint", "long", "boolean"):
        return "int64_list"
    if inner in ("float", "double"):
        return "float_list"
    if inner in ("string", "binary") and not is_array:
        return "bytes_list"
    raise DataError(f"unsupported dtype {kind!r}.", column=name)


def _wide(kind: pa.DataType, binary: bool) -> pa.DataType:
    """TensorFlowOnSpark's type for what is in the files."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_wide(kind.value_type, binary))
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return pa.binary() if binary else pa.string()
    return kind
