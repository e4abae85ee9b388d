"""Encodes arguments and results as buffers, never as pickles: JSON in the first, and what it refers to.

Numbers, text, lists and dicts are JSON. Arrays are their bytes and tables Arrow streams, each in a buffer
that the JSON refers to by number. The sender rejects other types.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from kindler.data import received
from kindler.data.arrow import stream
from kindler.errors import DataError, FrameError
from kindler.store import Version

Resolve: TypeAlias = Callable[[Mapping[str, Any]], Any]

_MARK = "$"
_DEEPEST = 64
_MOST_VERSIONS = 1000
_PLAIN = (type(None), bool, int, float, str)
_KINDS = "biufcmMSU"  # of numpy's dtypes, those whose values are their bytes


def encode(value: Any) -> tuple[bytes, ...]:
    """Encode a value as buffers; raises DataError if it, or something in it, cannot be sent."""
    buffers = [b""]
    buffers[0] = json.dumps(_encoded(value, buffers, 0)).encode()
    return tuple(buffers)


def decode(buffers: Sequence[bytes], resolve: Resolve | None = None) -> Any:
    """Decode what `encode` wrote; raises FrameError if it is malformed.

    `resolve` finds a version in the store by bucket, shelf, name and number; without it a version becomes the
    text `name@number`.
    """
    unread: list[bytes | None] = list(buffers)
    versions = 0

    def take(number: Any) -> bytes:
        if type(number) is not int or not 0 <= number < len(unread):
            raise FrameError(f"a value refers to buffer {number!r} of {len(unread)}.")
        content, unread[number] = unread[number], None
        if content is None:  # a few bytes could stand for any number of copies of it
            raise FrameError(f"a value refers to buffer {number} twice.")
        return content

    def decoded(tree: dict[str, Any]) -> Any:
        nonlocal versions
        form = tree.get(_MARK, "")
        if form == "":
            return tree
        if form in ("tuple", "dict"):
            if type(tree["items"]) is not list:
                raise FrameError(f"the items of a {form} are not a list.")
            return tuple(tree["items"]) if form == "tuple" else dict(tree["items"])
        if form == "version":
            versions += 1
            if versions > _MOST_VERSIONS:  # each is looked up
                raise FrameError(f"a value refers to more than {_MOST_VERSIONS} versions.")
            return resolve(tree) if resolve is not None else f"{tree['name']}@{tree['number']}"
        return _from_buffer(form, tree, take(tree["buffer"]))

    try:
        return json.loads(received.check_json(take(0)), object_hook=decoded)
    except FrameError:
        raise
    except Exception as exc:  # whatever the libraries make of what was sent
        raise FrameError(f"malformed value: {type(exc).__name__}: {exc}") from exc


def _encoded(value: Any, buffers: list[bytes], depth: int) -> Any:
    if depth > _DEEPEST:
        raise DataError(f"a value is nested deeper than {_DEEPEST} levels.")
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [_encoded(inside, buffers, depth + 1) for inside in value]
    if isinstance(value, tuple):
        return {_MARK: "tuple", "items": [_encoded(inside, buffers, depth + 1) for inside in value]}
    if isinstance(value, Mapping):
        return _encoded_dict(value, buffers, depth)
    if isinstance(value, np.ndarray | np.generic):
        return _encoded_array(np.asarray(value), buffers, scalar=isinstance(value, np.generic))
    if isinstance(value, bytes | bytearray | memoryview):
        return {_MARK: "bytes", "buffer": _added(bytes(value), buffers)}
    if isinstance(value, Version):
        fields = {"bucket": value.bucket, "shelf": value.shelf, "name": value.name, "number": value.number}
        return {_MARK: "version", **fields}
    if isinstance(value, int | float | str):  # of a subclass, such as an enum's member
        return (
            int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else str(value)
        )
    table = _table(value)
    if table is not None:
        form, content = table
        return {_MARK: form, "buffer": _added(stream(content), buffers)}
    raise DataError(
        f"cannot send a {type(value).__module__}.{type(value).__qualname__} to a worker.\n"
        "Hint: send numbers, text, lists, dicts, arrays, pandas and Arrow tables; store anything else and"
        " pass its name."
    )


def _encoded_dict(value: Mapping[Any, Any], buffers: list[bytes], depth: int) -> Any:
    if all(type(key) is str for key in value) and _MARK not in value:
        return {key: _encoded(inside, buffers, depth + 1) for key, inside in value.items()}
    pairs = [
        [_encoded(key, buffers, depth + 1), _encoded(inside, buffers, depth + 1)]
        for key, inside in value.items()
    ]
    return {_MARK: "dict", "items": pairs}


def _encoded_array(array: np.ndarray[Any, Any], buffers: list[bytes], *, scalar: bool) -> Any:
    shape = list(array.shape)
    if array.dtype.kind == "O":
        try:
            column = pa.array(array.ravel())
        except (pa.ArrowException, ValueError, TypeError) as exc:
            raise DataError(f"cannot send an array of objects to a worker: {exc}.") from exc
        number = _added(stream(pa.table({"values": column})), buffers)
        return {_MARK: "objects", "shape": shape, "buffer": number}
    if array.dtype.kind not in _KINDS or array.dtype.hasobject:
        raise DataError(
            f"cannot send an array of {array.dtype} to a worker.\nHint: convert it, for example with"
            f" astype('float32')."
        )
    form = "scalar" if scalar else "array"
    number = _added(np.ascontiguousarray(array).tobytes(), buffers)
    return {_MARK: form, "dtype": array.dtype.str, "shape": shape, "buffer": number}


def _table(value: Any) -> tuple[str, pa.Table] | None:
    if isinstance(value, pa.RecordBatch):
        value = pa.Table.from_batches([value])
    if isinstance(value, pa.Table):
        return "table", _without_views(value)
    pandas: Any = sys.modules.get("pandas")  # an object of it cannot be there before it is loaded
    try:
        if pandas is not None and isinstance(value, pandas.DataFrame):
            return "frame", pa.Table.from_pandas(value)
        if pandas is not None and isinstance(value, pandas.Series):
            named = "" if value.name is None else value.name
            return "series", pa.Table.from_pandas(value.to_frame(named))
    except (pa.ArrowException, ValueError, TypeError) as exc:
        raise DataError(f"cannot send a table to a worker: {exc}.") from exc
    return None


def _without_views(table: pa.Table) -> pa.Table:
    """Columns of views, as Polars has them, as plain ones: views of strangers are not read."""
    plain = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}
    found = {i: plain[str(field.type)] for i, field in enumerate(table.schema) if str(field.type) in plain}
    for i, kind in found.items():
        table = table.set_column(i, table.schema.field(i).with_type(kind), table.column(i).cast(kind))
    return table


def _added(content: bytes, buffers: list[bytes]) -> int:
    buffers.append(content)
    return len(buffers) - 1


def _from_buffer(form: str, tree: Mapping[str, Any], content: bytes) -> Any:
    if form == "bytes":
        return bytes(content)
    if form in ("array", "scalar"):
        array = received.array(content, tree["dtype"], tree["shape"])
        return array if form == "array" else array[()]
    table = received.arrow_table(content)
    if form == "objects":
        return table.column("values").to_numpy().astype(object).reshape(received.shape(tree["shape"]))
    if form == "table":
        return table
    if form == "frame":
        return table.to_pandas()
    if form == "series":
        series = table.to_pandas().iloc[:, 0]
        return series.rename(None) if series.name == "" else series
    raise FrameError(f"unknown form of a value: {form!r}.")
