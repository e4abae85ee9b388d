"""The messages: their classes, and those of predictions as the server's own request and answer. Pure.

The classes are made of the descriptors that the .proto file was compiled to, in a pool of their own: a client
of another package that has the same messages may be in the same process.

The rules for shapes, datatypes and parameters are those of the protocol's HTTP form. The raw bytes of tensors
are taken out of a message before protobuf sees it, and stay where they are: they are most of it, and are not
copied. What is left may become many times as large in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from kindler.models.safety.protobuf_fields import Malformed, spans
from kindler.models.signature import Array
from kindler.serve.http_errors import Problem
from kindler.serve.protocols import Answer, InferRequest
from kindler.serve.protocols.v2 import (
    DTYPES,
    checked_shape,
    datatype_of,
    from_bytes,
    infer_request,
    raw_bytes,
    typed,
)
from kindler.serve.protocols.values import as_objects
from kindler_tfrecord import varints

INFERENCE = "inference.GRPCInferenceService"
MOST_FIELDS = 10_000  # of a message
_WIDE = {"i": np.int64, "u": np.uint64}  # what values have before they are made what their datatype says
_INPUTS, _RAW_INPUTS, _RAW_OUTPUTS, _INFER_RESPONSE = 5, 7, 6, 2  # numbers of fields
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


@lru_cache(None)
def descriptors() -> descriptor_pool.DescriptorPool:
    content = Path(__file__).with_name("descriptors.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(content).file:
        pool.Add(file)
    return pool


@lru_cache(None)
def message(name: str) -> Any:
    return message_factory.GetMessageClass(descriptors().FindMessageTypeByName(name))


def parsed(kind: Any, content: bytes) -> Any:
    try:
        return kind.FromString(content)
    except DecodeError as exc:
        raise Problem(400, "the message cannot be read.") from exc


class TooManyFields(Exception):
    """A message of so many fields that they are not looked at on the event loop."""


class InferMessage:
    """A `ModelInferRequest`: the raw bytes of its tensors, and the `rest` of its bytes.

    With more than `most_fields` fields it is `TooManyFields`, or no message for the default; a look at one
    takes about a microsecond.
    """

    __slots__ = ("raw", "rest")

    def __init__(self, content: bytes, most_fields: int = MOST_FIELDS) -> None:
        self.rest, self.raw = _without(content, _RAW_INPUTS, most_fields)

    def parsed(self) -> Any:
        return parsed(message("inference.ModelInferRequest"), self.rest)

    def without_tensors(self) -> Any:
        """The message without its inputs, whose values may be many."""
        left, _ = _without(self.rest, _INPUTS)
        if len(left) > _MOST_LEFT:
            raise Problem(413, f"the message has {len(left)} bytes in addition to its tensors.")
        return parsed(message("inference.ModelInferRequest"), left)


def _without(content: bytes, number: int, most: int = MOST_FIELDS) -> tuple[bytes, list[memoryview]]:
    """A message without the fields of a number, and what these hold, which stays where it is."""
    view, kept, taken = memoryview(content), [], []
    after = 0
    try:
        for i, (field, _, start, begin, end) in enumerate(spans(content)):
            if i == _LOOKED_AT and start < _LOOKED_AT * _LEAST_BYTES:
                raise Malformed(f"{_LOOKED_AT} fields in its first {start} bytes")
            if i >= most:
                raise TooManyFields if most < MOST_FIELDS else Malformed(f"more than {MOST_FIELDS} fields")
            if field == number:
                kept.append(view[after:start])
                taken.append(view[begin:end])
                after = end
    except Malformed as exc:
        raise Problem(400, f"the message cannot be read: {exc}.") from exc
    kept.append(view[after:])
    return b"".join(kept), taken


def request_from(sent: Any, raw: Sequence[memoryview] = (), most_texts: int | None = None) -> InferRequest:
    if not sent.inputs:
        raise Problem(400, "the request needs inputs.")
    if raw and len(raw) != len(sent.inputs):
        raise Problem(
            400,
            f"the request has {len(sent.inputs)} inputs, but {len(raw)} raw_input_contents.",
        )
    outputs = {tensor.name: _values(tensor.parameters) for tensor in sent.outputs}
    return infer_request(_tensors(sent.inputs, raw, most_texts), _values(sent.parameters), outputs, sent.id)


def response_to(answer: Answer, request: InferRequest, in_stream: bool) -> bytes:
    """The answer as the bytes of a `ModelInferResponse`, or of the `ModelStreamInferResponse` around it.

    Tensors are copied once, by a call that lets other threads run if they are large.
    """
    reply = message("inference.ModelInferResponse")(
        model_name=answer.model, model_version=str(answer.version), id=request.id
    )
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


def _tensors(
    inputs: Sequence[Any], raw: Sequence[memoryview], most_texts: int | None
) -> Iterator[tuple[str, Array]]:
    for i, tensor in enumerate(inputs):
        name, datatype = tensor.name, tensor.datatype
        shape = checked_shape(name, datatype, list(tensor.shape))
        if any(parameter.startswith("shared_memory") for parameter in tensor.parameters):
            raise Problem(400, f"the input {name!r} is in shared memory, which is not supported.")
        if raw:
            if tensor.HasField("contents"):
                raise Problem(400, f"the input {name!r} has both contents and raw_input_contents.")
            yield name, from_bytes(raw[i], datatype, shape, name, most_texts=most_texts)
            continue
        field = _CONTENTS.get(datatype)
        if field is None:
            raise Problem(400, f"the input {name!r} of datatype {datatype} must be in raw_input_contents.")
        values = getattr(tensor.contents, field)
        if datatype == "BYTES":
            array = as_objects(list(values))
        else:
            dtype = np.dtype(DTYPES[datatype])
            array = np.fromiter(values, _WIDE.get(dtype.kind, dtype), len(values))
        yield name, typed(array, datatype, shape, name)


def _values(parameters: Any) -> dict[str, Any]:
    chosen = {name: (value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}
    return {name: kind and getattr(value, kind) for name, (value, kind) in chosen.items()}
