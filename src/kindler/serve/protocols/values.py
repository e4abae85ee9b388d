"""JSON, and nested lists in it as arrays: what the protocols that are text have in common."""

from __future__ import annotations

import base64
import binascii
import json
from array import array as Packed
from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import orjson

from kindler.models.signature import Array
from kindler.serve.http_errors import Problem

_T = TypeVar("_T", str, dict[str, Any], list[Any])
_SHOWN = 80
_LONG = 256  # values in a list from which it pays to look at the first of them
_MOST_DIMS = 32
_NUMBERS = frozenset((int, float, bool))
_SINGLE = {str: "a string", dict: "an object", list: "a list"}
_WORDS = {str: "text", dict: "objects", list: "a list", type(None): "null", bool: "booleans", bytes: "bytes"}


def loads(body: bytes) -> Any:
    """The value that a body has. `NaN` and `Infinity` are accepted, as most clients write them."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        if b"NaN" in body or b"Infinity" in body:
            try:
                return json.loads(body)
            except (ValueError, RecursionError):
                pass
        raise Problem(400, f"the body is not valid JSON: {exc}.") from exc


def load_object(body: bytes) -> dict[str, Any]:
    value = loads(body)
    if not isinstance(value, dict):
        raise Problem(400, f"the body must be a JSON object, not {_word(type(value))}.")
    return value


def field_of(fields: Mapping[str, Any], name: str, default: _T) -> _T:
    """A field of a JSON object, which must be of its default's type if it is there."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, type(default)):
        raise Problem(400, f"{name!r} must be {_SINGLE[type(default)]}.")
    return value


def as_tensor(value: Any, what: str) -> Array:
    """Nested lists as an array of numbers, booleans or text."""
    # Never by numpy, which would make all texts as long as the longest.
    if not isinstance(value, list):
        return _array([value], what).reshape(())
    dims = [len(value)]
    while value and type(value[0]) is list:
        lengths = set(map(len, value)) if set(map(type, value)) == {list} else set()
        if len(lengths) != 1:
            raise Problem(400, f"{what} is not an array: its rows have different lengths.")
        if len(dims) == _MOST_DIMS:
            raise Problem(400, f"{what} is not an array: it is nested too deeply.")
        dims.append(lengths.pop())
        value = list(chain.from_iterable(value))
    return _array(value, what).reshape(dims)


def as_tensors(values: Mapping[str, Any]) -> dict[str, Array]:
    return {str(name): as_tensor(value, repr(name)) for name, value in values.items()}


def _array(values: list[Any], what: str) -> Array:
    quick = _packed(values) if len(values) >= _LONG else None
    if quick is not None:
        return quick
    types = set(map(type, values))
    if types <= _NUMBERS:
        array = np.array(values)
        try:
            if types == {int} and array.dtype.kind not in "iu":  # some fit int64 and some only uint64
                return np.array(values, np.uint64 if min(values) >= 0 and max(values) < 1 << 64 else float)
            return array if array.dtype.kind in "biuf" else np.array(list(map(float, values)))
        except OverflowError as exc:
            raise Problem(400, f"{what} has a number that does not fit a float.") from exc
    if types & {list, tuple}:
        raise Problem(400, f"{what} is not an array: its rows have different lengths.")
    texts = types <= {str, bytes, type(None)}
    if texts or (type(None) in types and types <= {str, type(None)} | _NUMBERS):
        return as_objects(values)
    names = ", ".join(sorted({_word(kind) for kind in types}))
    raise Problem(400, f"{what} mixes {names}, which cannot form one array.")


def as_objects(values: list[Any]) -> Array:
    """An array of these objects, whatever they are."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _packed(value: list[Any]) -> Array | None:
    """Bytes or floats, such as an image, in a third of the time that numpy takes.

    Both ways refuse what is not a number, and give what numpy would.
    """
    try:
        if type(value[0]) is int:
            return np.frombuffer(bytes(value), np.uint8).astype(np.int64)
        if type(value[0]) is float:
            return np.frombuffer(Packed("d", value))
    except (TypeError, ValueError, OverflowError):
        pass
    return None


def with_bytes(value: Any, *, depth: int = 0) -> Any:
    """The value with every `{"b64": "..."}` in it replaced by the bytes it stands for."""
    if depth > 64:
        raise Problem(400, "the body is nested too deeply.")
    if isinstance(value, list):
        return [with_bytes(item, depth=depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"b64"}:
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, TypeError, ValueError) as exc:
            raise Problem(400, f"{str(value['b64'])[:_SHOWN]!r} is not valid base64.") from exc
    return {key: with_bytes(item, depth=depth + 1) for key, item in value.items()}


def in_base64(value: bytes) -> dict[str, str]:
    """Bytes as JSON: what `with_bytes` reads."""
    return {"b64": base64.b64encode(value).decode()}


def only(values: Mapping[str, Any]) -> Any:
    """The value alone if there is just one, else all by name."""
    return next(iter(values.values())) if len(values) == 1 else values


def plain(value: Any) -> Any:
    """The value as `dumps` can write it: arrays of numbers as they are, what JSON does not have as text."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf":
            return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
        return plain((value.astype(str) if value.dtype.kind == "M" else value).tolist())
    if isinstance(value, str | float | None):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return in_base64(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    for form, arguments in (("tolist", ()), ("to_pydict", ()), ("to_dict", ("list",))):  # of pandas and Arrow
        if hasattr(value, form):
            return plain(getattr(value, form)(*arguments))
    return str(value)


def dumps(value: Any, *, tokens: bool) -> bytes:
    """JSON of values and arrays. What is not finite is `NaN` and `Infinity` with `tokens`, and else null."""
    if tokens and not _all_finite(value):
        return json.dumps(value, default=_listed, separators=(",", ":")).encode()
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS, default=_listed)


def _all_finite(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    if isinstance(value, Mapping):
        return all(_all_finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_all_finite(item) for item in value)
    return not isinstance(value, float) or bool(np.isfinite(value))


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else plain(value)


def _word(kind: type) -> str:
    return _WORDS.get(kind, "numbers")
