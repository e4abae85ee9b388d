"""The Open Inference Protocol V2 (KServe, Triton, MLServer), with its extension for binary tensors.

A body is JSON, or JSON followed by the raw bytes of tensors; then a header tells the length of the JSON.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from kindler.models.signature import Array, Signature, TensorSpec
from kindler.serve.http_errors import Problem, require_post
from kindler.serve.protocols import Sent
from kindler.serve.protocols.values import as_object, as_tensor, dumps, loads, plain
from kindler.serve.requests import METHODS, Answer, InferRequest, Reply, Target

LENGTH = "inference-header-content-length"
_PATH = re.compile(r"/v2/models/(?P<name>.+?)(?:/versions/(?P<version>[^/]+))?/infer")
DTYPES = {
    "BOOL": "bool",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    **{f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    "BYTES": "object",
}
_DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
_DATATYPES_OF = {np.dtype(dtype): name for name, dtype in DTYPES.items()}  # a dtype's own name takes long


class TooManyTexts(Exception):
    """A tensor of so many texts that they are taken apart in another process."""


class V2:
    """See the module.

    Args:
        most_texts: The most bytes of texts in a tensor that are taken apart here; None is any number.
    """

    name = "v2"

    def __init__(self, most_texts: int | None = None) -> None:
        self._most_texts = most_texts

    def target(self, method: str, path: str) -> Target | None:
        match = _PATH.fullmatch(path)
        if match is None:
            return None
        require_post(method)
        return Target(match["name"], match["version"])

    def decode(self, sent: Sent, signature: Signature, target: Target) -> InferRequest:
        """See `Codec`."""
        json_length = sent.headers.get(LENGTH)
        length = len(sent.body) if json_length is None else _length(json_length, len(sent.body))
        if json_length is not None and length == 0:
            return _raw(sent.body, signature)
        told_body = as_object(loads(sent.body[:length]))
        inputs = told_body.get("inputs")
        if not isinstance(inputs, list) or not inputs:
            raise Problem(400, "the request needs 'inputs', a list of tensors.")
        rest = _Rest(sent.body[length:])
        arrays: dict[str, Array] = {}
        for entry in inputs:
            name, array = _tensor(entry, rest, self._most_texts)
            if name in arrays:
                raise Problem(400, f"the input {name!r} appears twice.")
            arrays[name] = array
        rest.check_empty()
        outputs = _outputs(told_body.get("outputs"))
        params = _object(told_body.get("parameters"), "parameters")
        wanted = next((name for name in outputs or () if name in METHODS), "predict")
        return InferRequest(
            inputs=arrays,
            method=wanted,
            params=params,
            outputs=outputs,
            id=_text(told_body.get("id", ""), "id"),
            timeout_s=timeout_of(params.get("timeout")),
            batch=params.get("batch", True) is not False,
        )

    def encode(self, answer: Answer, request: InferRequest, sent: Sent, target: Target) -> Reply:
        all_binary = bool(request.params.get("binary_data_output", False))
        shown: list[dict[str, Any]] = []
        raw: list[bytes | memoryview] = []
        for name, array in answer.outputs.items():
            asked = (request.outputs or {}).get(name, {})
            entry: dict[str, Any] = {"name": name, "datatype": datatype_of(array), "shape": list(array.shape)}
            if asked.get("binary_data", all_binary):
                content = raw_bytes(array)
                entry["parameters"] = {"binary_data_size": len(content)}
                raw.append(content)
            else:
                entry["data"] = plain(array.ravel())
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    entry["parameters"] = {"nonfinite": "null"}
            shown.append(entry)
        document: dict[str, Any] = {"model_name": answer.model, "model_version": str(answer.version)}
        if request.id:
            document["id"] = request.id
        head = dumps({**document, "outputs": shown}, tokens=False)
        if not raw:
            return Reply(head)
        headers = (("inference-header-content-length", str(len(head))),)
        return Reply(b"".join([head, *raw]), "application/octet-stream", headers)

    def problem(self, status: int, message: str) -> Reply:
        return Reply(dumps({"error": message}, tokens=False), status=status)


def datatype_of(array: Array) -> str:
    """The protocol's name of an array's dtype."""
    return _DATATYPES_OF.get(array.dtype, "BYTES")


def described(spec: TensorSpec) -> dict[str, Any]:
    """A tensor of a signature, as metadata has it."""
    shape = [-1] if spec.shape is None else [-1 if n is None else n for n in spec.shape]
    return {"name": spec.name, "datatype": _DATATYPES.get(spec.dtype or "float64", "BYTES"), "shape": shape}


class _Rest:
    """The bytes behind the JSON, taken tensor by tensor."""

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)
        self._at = 0

    def take(self, size: Any, name: str) -> memoryview:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise Problem(400, f"the input {name!r} has the invalid binary_data_size {size!r}.")
        if self._at + size > len(self._content):
            left = len(self._content) - self._at
            raise Problem(400, f"the input {name!r} should have {size} bytes; the body has {left} left.")
        self._at += size
        return self._content[self._at - size : self._at]

    def check_empty(self) -> None:
        left = len(self._content) - self._at
        if left:
            raise Problem(400, f"the body has {left} bytes that belong to no input.")


def _tensor(entry: Any, rest: _Rest, most_texts: int | None) -> tuple[str, Array]:
    if not isinstance(entry, dict):
        raise Problem(400, "an input must be an object with name, shape, datatype and data.")
    name = _text(entry.get("name"), "name of an input")
    datatype = entry.get("datatype")
    if not isinstance(datatype, str) or datatype not in DTYPES:
        raise Problem(
            400,
            f"the input {name!r} has the unknown datatype {datatype!r}; expected one of {', '.join(DTYPES)}.",
        )
    shape = checked_shape(entry.get("shape"), name)
    params = _object(entry.get("parameters"), f"parameters of the input {name!r}")
    if "binary_data_size" in params:
        if "data" in entry:
            raise Problem(400, f"the input {name!r} has both data and a binary_data_size.")
        content = rest.take(params["binary_data_size"], name)
        return name, from_bytes(content, datatype, shape, name, most_texts=most_texts)
    if "data" not in entry:
        raise Problem(400, f"the input {name!r} has no data.")
    values = entry["data"] if isinstance(entry["data"], list) else [entry["data"]]
    if datatype == "BYTES":
        array = _texts(values, name, encoded=params.get("content_type") == "base64")
    else:
        array = _numbers(_exact(as_tensor(values, f"the input {name!r}"), values, datatype), datatype, name)
    return name, _reshaped(array, shape, name)


def _numbers(array: Array, datatype: str, name: str) -> Array:
    target = np.dtype(DTYPES[datatype])
    if array.dtype == target:
        return array
    whole = array.dtype.kind in "biu"
    if array.dtype.kind == "O" or (target.kind in "biu" and not whole and array.size):
        raise Problem(400, f"the input {name!r} has values that do not match the datatype {datatype}.")
    if target.kind in "iu" and array.size:
        info = np.iinfo(target)
        if int(array.min()) < info.min or int(array.max()) > info.max:
            raise Problem(400, f"the input {name!r} has values out of range for the datatype {datatype}.")
    with np.errstate(over="ignore"):
        return array.astype(target, copy=False)


def _exact(array: Array, values: list[Any], datatype: str) -> Array:
    """Whole numbers beyond those of int64 beside others become floats, which would lose digits."""
    if datatype != "UINT64" or array.dtype.kind != "f":
        return array
    items = np.array(values, dtype=object)
    whole = all(type(item) is int and 0 <= item < 1 << 64 for item in items.ravel())
    return items.astype(np.uint64) if whole else array


def _texts(values: list[Any], name: str, *, encoded: bool) -> Array:
    array = np.array(_flat(values, name), dtype=object)
    try:
        if encoded:
            array[:] = [base64.b64decode(item, validate=True) for item in array]
        else:
            array[:] = [item.encode() for item in array]
    except (AttributeError, TypeError, ValueError, binascii.Error) as exc:
        raise Problem(400, f"the input {name!r} has values that do not match the datatype BYTES.") from exc
    return array


def _flat(values: list[Any], name: str, depth: int = 0) -> list[Any]:
    if depth > 32:
        raise Problem(400, f"the input {name!r} is nested too deeply.")
    flat: list[Any] = []
    for value in values:
        flat += _flat(value, name, depth + 1) if isinstance(value, list) else [value]
    return flat


def from_bytes(
    content: memoryview,
    datatype: str,
    shape: tuple[int, ...],
    name: str,
    *,
    most_texts: int | None = None,
) -> Array:
    """A tensor of its raw bytes."""
    if datatype != "BYTES":
        dtype = np.dtype(DTYPES[datatype]).newbyteorder("<")
        if len(content) % dtype.itemsize:
            raise Problem(
                400,
                f"the input {name!r} has {len(content)} bytes, which is not a whole number of"
                f" {datatype} values.",
            )
        array = np.frombuffer(content, dtype)
        return _reshaped(array.astype(dtype.newbyteorder("="), copy=False), shape, name)
    if most_texts is not None and len(content) > most_texts:
        raise TooManyTexts(f"{len(content)} bytes of texts")
    if 4 * math.prod(shape) > len(content):
        raise Problem(400, f"the input {name!r} has too few bytes for its shape {list(shape)}.")
    items: list[bytes] = []
    at = 0
    while at < len(content):
        end = at + 4
        size = struct.unpack_from("<I", content, at)[0] if end <= len(content) else len(content)
        if end + size > len(content):
            raise Problem(400, f"the input {name!r} ends in the middle of a value.")
        items.append(bytes(content[end : end + size]))
        at = end + size
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return _reshaped(array, shape, name)


def raw_bytes(array: Array) -> bytes | memoryview:
    """The raw bytes of a tensor, where they are if they are in order."""
    if array.dtype.kind != "O" and datatype_of(array) != "BYTES":
        there = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        return there.reshape(-1).view(np.uint8).data
    chunks: list[bytes] = []
    for item in array.ravel().tolist():
        content = item if isinstance(item, bytes) else str(item).encode()
        chunks += [struct.pack("<I", len(content)), content]
    return b"".join(chunks)


def _raw(body: bytes, signature: Signature) -> InferRequest:
    """A body of nothing but one tensor; what it is, the model must know."""
    spec = signature.inputs[0] if len(signature.inputs) == 1 else None
    if spec is None or spec.shape is None or None in spec.shape[1:] or spec.dtype in (None, "object"):
        raise Problem(400, "a body without JSON needs a model with one input of known dtype and shape.")
    dtype, dims = np.dtype(spec.dtype), tuple(int(n or 0) for n in spec.shape[1:])
    row = dtype.itemsize * math.prod(dims)
    if not row or len(body) % row:
        raise Problem(400, f"the body has {len(body)} bytes; one row of the model needs a multiple of {row}.")
    array = np.frombuffer(body, dtype).reshape(-1, *dims)
    return InferRequest(inputs={spec.name: array}, params={"binary_data_output": True})


def _reshaped(array: Array, shape: tuple[int, ...], name: str) -> Array:
    if array.size != math.prod(shape):
        raise Problem(
            400,
            f"the input {name!r} has {array.size} values; its shape {list(shape)} needs {math.prod(shape)}.",
        )
    return array.reshape(shape)


def checked_shape(value: Any, name: str) -> tuple[int, ...]:
    """The shape of a tensor."""
    fine = isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 40 for n in value
    )
    if not fine or len(value) > 32:
        raise Problem(400, f"the input {name!r} has no valid shape; expected a list of at most 32 lengths.")
    return tuple(value)


def _outputs(value: Any) -> dict[str, Mapping[str, Any]] | None:
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise Problem(400, "'outputs' must be a list of objects with a name.")
    return {
        _text(entry.get("name"), "name of an output"): _object(entry.get("parameters"), "parameters")
        for entry in value
    }


def _length(text: str, there: int) -> int:
    length = int(text) if re.fullmatch(r"\d{1,12}", text, re.ASCII) else -1
    if not 0 <= length <= there:
        raise Problem(400, f"{LENGTH}: {text[:40]!r} is not a length within the body's {there} bytes.")
    return length


def timeout_of(value: Any) -> float | None:
    """Seconds, of microseconds by Triton's rule; 0 is none."""
    if value is None or value == 0:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Problem(400, f"timeout={value!r}: must be a whole number of microseconds.")
    return value / 1e6


def _object(value: Any, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Problem(400, f"{what} must be an object.")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise Problem(400, f"the {what} must be a string.")
    return value
