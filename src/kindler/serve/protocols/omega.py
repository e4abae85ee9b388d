"""omega|ml's route for predictions: columns, data and shape; and bodies that are Arrow or a tensor's bytes.

Outputs keep their shape; `?flat=1` gives the flat list that omega|ml itself gave.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kindler.models.signature import Array, Signature
from kindler.serve.http_errors import Problem
from kindler.serve.protocols import Sent
from kindler.serve.protocols.tables import ARROW, columns_of, from_arrow, from_records, to_arrow
from kindler.serve.protocols.values import as_object, as_tensor, dumps, loads, plain
from kindler.serve.requests import METHODS, Answer, InferRequest, Reply, Target

RAW = "application/octet-stream"
_PATH = re.compile(rf"/api/v1/model/(?P<name>.+)/(?P<action>{'|'.join(METHODS)})/?")
_ALIAS = re.compile(r"/api/v1/model/.+/aliases/[^/]+")  # which may have the name of an action
_DTYPES = (
    "bool",
    "float16",
    "float32",
    "float64",
    *(f"{s}int{b}" for s in ("", "u") for b in (8, 16, 32, 64)),
)


class OmegaCodec:
    """See the module."""

    name = "omega"

    def target(self, method: str, path: str) -> Target | None:
        match = _PATH.fullmatch(path)
        if match is None or (method in ("PUT", "DELETE") and _ALIAS.fullmatch(path)):
            return None
        if method not in ("PUT", "POST"):
            raise Problem(405, f"{method} is not allowed; use PUT.", {"allow": "PUT, POST"})
        return Target(match["name"], action=match["action"])

    def decode(self, sent: Sent, signature: Signature, target: Target) -> InferRequest:
        kind = sent.content_type
        if kind == ARROW:
            return InferRequest(inputs=from_arrow(sent.body), columns=True, method=target.action)
        if kind == RAW:
            return InferRequest(inputs={"": _raw(sent)}, method=target.action)
        if kind not in ("", "application/json", "application/x-www-form-urlencoded"):
            raise Problem(
                415, f"unsupported content type {kind!r}; expected application/json, {ARROW} or {RAW}."
            )
        body = as_object(loads(sent.body))
        if "data" not in body:
            raise Problem(400, "the request has no 'data'.")
        columns = body.get("columns")
        if columns is not None and not (
            isinstance(columns, list) and all(isinstance(c, str) for c in columns)
        ):
            raise Problem(400, "'columns' must be a list of names.")
        data, shape = body["data"], body.get("shape")
        if isinstance(data, list) and not (data and isinstance(data[0], dict)):
            array = as_tensor(data, "'data'")
            return InferRequest(
                inputs={"": array if shape is None else _cells(array, shape)}, method=target.action
            )
        arrays = _chosen(data, columns)
        if shape is not None:
            if len(arrays) != 1:
                raise Problem(400, f"'shape' needs exactly one column; received {len(arrays)}.")
            (array,) = arrays.values()
            return InferRequest(inputs={"": _cells(array, shape)}, method=target.action)
        return InferRequest(inputs=arrays, columns=True, method=target.action)

    def encode(self, answer: Answer, request: InferRequest, sent: Sent, target: Target) -> Reply:
        accept = sent.headers.get("accept", "")
        if ARROW in accept:
            return Reply(to_arrow(answer), ARROW)
        if RAW in accept:
            return _raw_reply(answer)
        flat = sent.query.get("flat", "") not in ("", "0", "false")
        outputs = {name: plain(a.ravel() if flat else a) for name, a in answer.outputs.items()}
        one = len(outputs) == 1
        shapes = {name: list(array.shape) for name, array in answer.outputs.items()}
        dtypes = {name: _dtype(array) for name, array in answer.outputs.items()}
        return Reply(
            dumps(
                {
                    "model": answer.model,
                    "result": _only(outputs) if one else outputs,
                    "resource_uri": answer.model,
                    "version": answer.version,
                    "shape": _only(shapes) if one else shapes,
                    "dtype": _only(dtypes) if one else dtypes,
                },
                tokens=False,
            )
        )

    def problem(self, status: int, message: str) -> Reply:
        return Reply(dumps({"message": message}, tokens=False), status=status)


def _chosen(data: Any, columns: list[str] | None) -> dict[str, Array]:
    if isinstance(data, list):
        columns_by_name = from_records(data)
    elif isinstance(data, Mapping):
        columns_by_name = columns_of(data)
    else:
        raise Problem(400, "'data' must be an object of columns, or a list of rows.")
    if columns is None:
        return columns_by_name
    missing = [name for name in columns if name not in columns_by_name]
    if missing:
        raise Problem(400, f"'data' lacks the columns {', '.join(missing)}.")
    return {name: columns_by_name[name] for name in columns}


def _cells(array: Array, shape: Any) -> Array:
    """Rows that were flattened, in their own shape again."""
    fine = isinstance(shape, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 40 for n in shape
    )
    if not fine or len(shape) > 31:
        raise Problem(400, f"'shape' must be a list of lengths; received {str(shape)[:80]}.")
    if not array.ndim:
        raise Problem(400, "'data' has no rows.")
    row = math.prod(array.shape[1:])
    if row != math.prod(shape):
        raise Problem(400, f"a row has {row} values; the shape {shape} has {math.prod(shape)}.")
    return array.reshape(len(array), *shape)


def _raw(sent: Sent) -> Array:
    dtype, shape = sent.query.get("dtype", ""), sent.query.get("shape", "")
    if dtype not in _DTYPES:
        raise Problem(400, f"?dtype={dtype[:40]}: a body of bytes needs one of {', '.join(_DTYPES)}.")
    if not re.fullmatch(r"\d{1,12}(,\d{1,12}){0,31}", shape, re.ASCII):
        raise Problem(400, f"?shape={shape[:80]}: a body of bytes needs lengths such as 8,28,28.")
    dims = [int(n) for n in shape.split(",")]
    wanted = math.prod(dims) * np.dtype(dtype).itemsize
    if wanted != len(sent.body):
        raise Problem(400, f"the body has {len(sent.body)} bytes; {dtype} of shape {dims} needs {wanted}.")
    return np.frombuffer(sent.body, np.dtype(dtype).newbyteorder("<")).reshape(dims)


def _raw_reply(answer: Answer) -> Reply:
    if len(answer.outputs) != 1:
        raise Problem(
            406, f"the model has {len(answer.outputs)} outputs; a response of bytes can hold only one."
        )
    (array,) = answer.outputs.values()
    if array.dtype.kind not in "biuf":
        raise Problem(406, "the model's output is text, which cannot be sent as bytes.")
    shape = ",".join(map(str, array.shape))
    headers = (("x-dtype", array.dtype.name), ("x-shape", shape), ("x-version", str(answer.version)))
    return Reply(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes(), RAW, headers)


def _dtype(array: Array) -> str:
    return "text" if array.dtype.kind in "OU" else str(array.dtype.name)


def _only(found: Mapping[str, Any]) -> Any:
    return next(iter(found.values()))
