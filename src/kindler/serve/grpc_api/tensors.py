"""Messages of predictions as the server's own request, and its answer as a message. Pure.

The rules for shapes, datatypes and parameters are those of the protocol's HTTP form.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kindler.models.signature import Array
from kindler.serve.grpc_api.messages import message
from kindler.serve.http_errors import Problem
from kindler.serve.protocols.v2 import DTYPES, checked_shape, datatype_of, from_bytes, timeout_of, to_bytes
from kindler.serve.requests import METHODS, Answer, InferRequest

__all__ = ["request_from", "response_to"]

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


def request_from(sent: Any) -> InferRequest:
    """The request of a `ModelInferRequest`.

    Raises:
        Problem: 400: it is not one that the protocol allows.
    """
    if not sent.inputs:
        raise Problem(400, "the request needs inputs.")
    raw = list(sent.raw_input_contents)
    if raw and len(raw) != len(sent.inputs):
        raise Problem(
            400,
            f"the request has {len(sent.inputs)} inputs, and {len(raw)} raw_input_contents for them.",
        )
    arrays: dict[str, Array] = {}
    for i, tensor in enumerate(sent.inputs):
        if tensor.name in arrays:
            raise Problem(400, f"the input {tensor.name!r} appears twice.")
        arrays[tensor.name] = _array(tensor, raw[i] if raw else None)
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


def response_to(answer: Answer, request: InferRequest) -> Any:
    """The answer as a `ModelInferResponse`, its tensors as raw bytes."""
    reply = message("inference.ModelInferResponse")(
        model_name=answer.model, model_version=str(answer.version), id=request.id
    )
    for name, array in answer.outputs.items():
        reply.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        reply.raw_output_contents.append(to_bytes(array))
    return reply


def _array(tensor: Any, raw: bytes | None) -> Array:
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
        return from_bytes(memoryview(raw), datatype, shape, name)
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
    wide = np.array(values)
    dtype = np.dtype(DTYPES[datatype])
    if dtype.kind in "iu" and len(values):
        limits = np.iinfo(dtype)
        if int(wide.min()) < limits.min or int(wide.max()) > limits.max:
            raise Problem(400, f"the input {name!r} has values out of range for the datatype {datatype}.")
    return wide.astype(dtype).reshape(shape)


def _value(parameter: Any) -> Any:
    chosen = parameter.WhichOneof("parameter_choice")
    return None if chosen is None else getattr(parameter, chosen)
