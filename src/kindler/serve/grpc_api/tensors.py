"""Messages of predictions as the server's own request, and its answer as a message. Pure.

The rules for shapes, datatypes and parameters are those of the protocol's HTTP form. The raw bytes of tensors
are taken out of a message before protobuf sees it, and stay where they are: they are most of it, and are not
copied. What is left may become many times as large in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from kindler.models.safety.protobuf_fields import Malformed, spans
from kindler.models.signature import Array
from kindler.serve.grpc_api.messages import message
from kindler.serve.http_errors import Problem
from kindler.serve.protocols.v2 import DTYPES, checked_shape, datatype_of, from_bytes, raw_bytes, timeout_of
from kindler.serve.requests import METHODS, Answer, InferRequest
from kindler_tfrecord import varints

_WIDE = {"i": np.int64, "u": np.uint64}  # what values have before they are made what their datatype says
_INPUTS, _RAW_INPUTS, _RAW_OUTPUTS, _INFER_RESPONSE = 5, 7, 6, 2  # numbers of fields
MOST_FIELDS = 10_000  # of a message
_LOOKED_AT, _LEAST_BYTES = 256, 6  # a tensor has a name and a datatype: no field is so small
_MOST_LEFT = 1 << 18

_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class TooManyFields(Exception):
    """A message of so many fields that they are not looked at on the event loop."""


class InferMessage:
    """A `ModelInferRequest`.

    Args:
        content: Its bytes.
        most_fields: How many fields are looked at; each takes about a microsecond.

    Attributes:
        raw: The raw bytes of its tensors.
        rest: Its bytes without them.

    Raises:
        Problem: 400: it is no message.
        TooManyFields: See `most_fields`; never for the default, with which it is no message.
    """

    __slots__ = ("_parsed", "raw", "rest")

    def __init__(self, content: bytes, most_fields: int = MOST_FIELDS) -> None:
        self.rest, self.raw = _without(content, _RAW_INPUTS, most_fields)
        self._parsed: Any = None

    def parsed(self) -> Any:
        """The message without the raw bytes."""
        if self._parsed is None:
            self._parsed = parsed(message("inference.ModelInferRequest"), self.rest)
        return self._parsed

    def without_tensors(self) -> Any:
        """The message without its inputs, whose values may be many."""
        left, _ = _without(self.rest, _INPUTS)
        if len(left) > _MOST_LEFT:
            raise Problem(413, f"the message has {len(left)} bytes beside its tensors.")
        return parsed(message("inference.ModelInferRequest"), left)


def _without(content: bytes, number: int, most: int = MOST_FIELDS) -> tuple[bytes, list[memoryview]]:
    """A message without the fields of a number, and what these hold, which stays where it is."""
    view, kept, taken = memoryview(content), [], []
    after = 0
    try:
        for i, (found, _, start, begin, end) in enumerate(spans(content)):
            if i == _LOOKED_AT and start < _LOOKED_AT * _LEAST_BYTES:
                raise Malformed(f"{_LOOKED_AT} fields in its first {start} bytes")
            if i >= most:
                raise TooManyFields if most < MOST_FIELDS else Malformed(f"more than {MOST_FIELDS} fields")
            if found == number:
                kept.append(view[after:start])
                taken.append(view[begin:end])
                after = end
    except Malformed as exc:
        raise Problem(400, f"the message cannot be read: {exc}.") from exc
    kept.append(view[after:])
    return b"".join(kept), taken


def parsed(kind: Any, content: bytes) -> Any:
    """A message of a class, of its bytes."""
    try:
        return kind.FromString(content)
    except DecodeError as exc:
        raise Problem(400, "the message cannot be read.") from exc


def request_from(sent: Any, raw: Sequence[memoryview] = (), *, most_texts: int | None = None) -> InferRequest:
    """The request of a `ModelInferRequest`."""
    if not sent.inputs:
        raise Problem(400, "the request needs inputs.")
    if raw and len(raw) != len(sent.inputs):
        raise Problem(
            400,
            f"the request has {len(sent.inputs)} inputs, and {len(raw)} raw_input_contents for them.",
        )
    arrays: dict[str, Array] = {}
    for i, tensor in enumerate(sent.inputs):
        if tensor.name in arrays:
            raise Problem(400, f"the input {tensor.name!r} appears twice.")
        arrays[tensor.name] = _array(tensor, raw[i] if raw else None, most_texts)
    params = {name: _value(parameter) for name, parameter in sent.parameters.items()}
    outputs = {
        tensor.name: {name: _value(parameter) for name, parameter in tensor.parameters.items()}
        for tensor in sent.outputs
    }
    return InferRequest(
        inputs=arrays,
        method=next((name for name in outputs if name in METHODS), "predict"),
        params=params,
        outputs=outputs or None,
        id=sent.id,
        timeout_s=timeout_of(params.get("timeout")),
        batch=params.get("batch", True) is not False,
    )


def response_to(answer: Answer, request: InferRequest, *, in_stream: bool = False) -> bytes:
    """The answer as the bytes of a `ModelInferResponse`, or of the `ModelStreamInferResponse` around it.

    Tensors are copied once, by a call that lets other threads run if they are large.
    """
    made = message("inference.ModelInferResponse")
    reply = made(model_name=answer.model, model_version=str(answer.version), id=request.id)
    parts: list[Any] = [b""]
    for name, array in answer.outputs.items():
        reply.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        content = raw_bytes(array)
        parts += [_field(_RAW_OUTPUTS, len(content)), content]
    parts[0] = reply.SerializeToString()
    if in_stream:
        parts.insert(0, _field(_INFER_RESPONSE, sum(map(len, parts))))
    return b"".join(parts)


def _field(number: int, size: int) -> bytes:
    """What comes before a field of so many bytes."""
    return varints.one(number << 3 | 2) + varints.one(size)


def _array(tensor: Any, raw: memoryview | None, most_texts: int | None) -> Array:
    name, datatype = tensor.name, tensor.datatype
    if datatype not in DTYPES:
        raise Problem(
            400,
            f"the input {name!r} has the unknown datatype {datatype!r}; expected one of {', '.join(DTYPES)}.",
        )
    if any(parameter.startswith("shared_memory") for parameter in tensor.parameters):
        raise Problem(400, f"the input {name!r} is in shared memory, which is not supported.")
    shape = checked_shape(list(tensor.shape), name)
    if raw is not None:
        if tensor.HasField("contents"):
            raise Problem(400, f"the input {name!r} has both contents and raw_input_contents.")
        return from_bytes(raw, datatype, shape, name, most_texts=most_texts)
    field = _CONTENTS.get(datatype)
    if field is None:
        raise Problem(400, f"the input {name!r} of datatype {datatype} must be in raw_input_contents.")
    values = getattr(tensor.contents, field)
    count = int(np.prod(shape, dtype=object)) if shape else 1
    if len(values) != count:
        raise Problem(
            400,
            f"the input {name!r} has {len(values)} values in {field}; its shape {list(shape)} needs {count}.",
        )
    if datatype == "BYTES":
        array = np.empty(len(values), dtype=object)
        array[:] = list(values)
        return array.reshape(shape)
    dtype = np.dtype(DTYPES[datatype])
    wide = np.fromiter(values, _WIDE.get(dtype.kind, dtype), len(values))
    if dtype.kind in "iu" and len(values):
        limits = np.iinfo(dtype)
        if int(wide.min()) < limits.min or int(wide.max()) > limits.max:
            raise Problem(400, f"the input {name!r} has values out of range for the datatype {datatype}.")
    return wide.astype(dtype).reshape(shape)


def _value(parameter: Any) -> Any:
    chosen = parameter.WhichOneof("parameter_choice")
    return None if chosen is None else getattr(parameter, chosen)
