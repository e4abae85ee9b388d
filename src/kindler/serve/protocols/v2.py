"""The Open Inference Protocol V2 (KServe, Triton, MLServer), with its extension for binary tensors.

A body is JSON, or JSON followed by the raw bytes of tensors; then a header tells the length of the JSON.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from kindler.models.predictor import METHODS
from kindler.models.signature import Array, Signature, TensorSpec
from kindler.serve.http_errors import Problem
from kindler.serve.protocols import Answer, Codec, InferRequest, RawRequest, Reply, Target
from kindler.serve.protocols.values import as_objects, as_tensor, dumps, field_of, load_object, plain

LENGTH = "inference-header-content-length"
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


class V2(Codec):
    """The protocol; tensors of more than `most_texts` bytes of texts are not taken apart here."""

    name = "v2"
    path = re.compile(r"/v2/models/(?P<name>.+?)(?:/versions/(?P<version>[^/]+))?/infer")

    def __init__(self, most_texts: int | None = None) -> None:
        self._most_texts = most_texts

    def decode(self, sent: RawRequest, signature: Signature, target: Target) -> InferRequest:
        text, length = sent.headers.get(LENGTH), len(sent.body)
        if text is not None:
            if not re.fullmatch(r"\d{1,12}", text, re.ASCII) or int(text) > length:
                raise Problem(400, f"{LENGTH}: {text[:40]!r} is not within the body's {length} bytes.")
            length = int(text)
            if not length:
                return _raw(sent.body, signature)
        body = load_object(sent.body[:length])
        inputs = _named(body, "inputs")
        if not inputs:
            raise Problem(400, "the request needs 'inputs', a list of tensors.")
        return infer_request(
            _tensors(inputs, memoryview(sent.body)[length:], self._most_texts),
            field_of(body, "parameters", {}),
            {out["name"]: field_of(out, "parameters", {}) for out in _named(body, "outputs")},
            field_of(body, "id", ""),
        )

    def encode(self, answer: Answer, request: InferRequest, sent: RawRequest) -> Reply:
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


def infer_request(
    tensors: Iterable[tuple[str, Array]],
    params: Mapping[str, Any],
    outputs: Mapping[str, Mapping[str, Any]],
    request_id: str,
) -> InferRequest:
    """A request of the protocol, over HTTP or gRPC."""
    arrays: dict[str, Array] = {}
    for name, array in tensors:
        if name in arrays:
            raise Problem(400, f"the input {name!r} appears twice.")
        arrays[name] = array
    timeout = params.get("timeout") or 0
    if not isinstance(timeout, int) or timeout < 0 or timeout is True:
        raise Problem(400, f"timeout={timeout!r}: must be a whole number of microseconds.")
    return InferRequest(
        inputs=arrays,
        method=next((name for name in outputs if name in METHODS), "predict"),
        params=params,
        outputs=outputs or None,
        id=request_id,
        timeout_s=timeout / 1e6 or None,
        batch=params.get("batch", True) is not False,
    )


def datatype_of(array: Array) -> str:
    return _DATATYPES_OF.get(array.dtype, "BYTES")


def described(spec: TensorSpec) -> dict[str, Any]:
    """A tensor of a signature, as metadata has it."""
    shape = [-1] if spec.shape is None else [-1 if n is None else n for n in spec.shape]
    return {"name": spec.name, "datatype": _DATATYPES.get(spec.dtype or "float64", "BYTES"), "shape": shape}


def _named(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects with names; empty if it is not there."""
    entries = field_of(body, name, [])
    if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries):
        raise Problem(400, f"{name!r} must be a list of objects with a name.")
    return entries


def _tensors(
    entries: list[dict[str, Any]], rest: memoryview, most_texts: int | None
) -> Iterator[tuple[str, Array]]:
    """The tensors of a body, whose values are in its JSON or one behind the other after it."""
    for entry in entries:
        name, datatype = entry["name"], entry.get("datatype", "")
        shape = checked_shape(name, datatype, entry.get("shape"))
        params = field_of(entry, "parameters", {})
        if "binary_data_size" in params:
            size = params["binary_data_size"]
            if "data" in entry:
                raise Problem(400, f"the input {name!r} has both data and a binary_data_size.")
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise Problem(400, f"the input {name!r} has the invalid binary_data_size {size!r}.")
            if size > len(rest):
                left = len(rest)
                raise Problem(400, f"the input {name!r} should have {size} bytes; the body has {left} left.")
            content, rest = rest[:size], rest[size:]
            yield name, from_bytes(content, datatype, shape, name, most_texts=most_texts)
            continue
        if "data" not in entry:
            raise Problem(400, f"the input {name!r} has no data.")
        values = entry["data"] if isinstance(entry["data"], list) else [entry["data"]]
        array = as_tensor(values, f"the input {name!r}")
        if datatype == "BYTES":
            array = _texts(array, name, encoded=params.get("content_type") == "base64")
        yield name, typed(array, datatype, shape, name)
    if rest:
        raise Problem(400, f"the body has {len(rest)} bytes that belong to no input.")


def typed(array: Array, datatype: str, shape: tuple[int, ...], name: str) -> Array:
    """Values as the tensor that they are said to be."""
    target = np.dtype(DTYPES[datatype])
    if array.dtype != target:
        whole = array.dtype.kind in "biu"
        if array.dtype.kind == "O" or (target.kind in "biu" and not whole and array.size):
            raise Problem(400, f"the input {name!r} has values that do not match the datatype {datatype}.")
        if target.kind in "iu" and array.size:
            info = np.iinfo(target)
            if int(array.min()) < info.min or int(array.max()) > info.max:
                raise Problem(400, f"the input {name!r} has values out of range for the datatype {datatype}.")
        with np.errstate(over="ignore"):
            array = array.astype(target, copy=False)
    if array.size != math.prod(shape):
        raise Problem(
            400,
            f"the input {name!r} has {array.size} values; its shape {list(shape)} needs {math.prod(shape)}.",
        )
    return array.reshape(shape)


def _texts(array: Array, name: str, *, encoded: bool) -> Array:
    try:
        items = array.ravel().tolist()
        return as_objects([base64.b64decode(i, validate=True) if encoded else i.encode() for i in items])
    except (AttributeError, TypeError, ValueError) as exc:
        raise Problem(400, f"the input {name!r} has values that do not match the datatype BYTES.") from exc


def from_bytes(
    content: memoryview,
    datatype: str,
    shape: tuple[int, ...],
    name: str,
    *,
    most_texts: int | None = None,
) -> Array:
    if datatype != "BYTES":
        dtype = np.dtype(DTYPES[datatype]).newbyteorder("<")
        if len(content) % dtype.itemsize:
            raise Problem(
                400,
                f"the input {name!r} has {len(content)} bytes, which is not a whole number of"
                f" {datatype} values.",
            )
        return typed(np.frombuffer(content, dtype), datatype, shape, name)
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
    return typed(as_objects(items), datatype, shape, name)


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


def checked_shape(name: str, datatype: Any, shape: Any) -> tuple[int, ...]:
    """The shape of a tensor, if that and its datatype are valid."""
    if not isinstance(datatype, str) or datatype not in DTYPES:
        expected = ", ".join(DTYPES)
        raise Problem(
            400, f"the input {name!r} has the unknown datatype {datatype!r}; expected one of {expected}."
        )
    fine = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
    if not fine or len(shape) > 32:
        raise Problem(400, f"the input {name!r} has no valid shape; expected a list of at most 32 lengths.")
    return tuple(shape)
