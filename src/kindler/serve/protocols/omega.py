"""omega|ml's route for predictions: columns, data and shape; and bodies that are Arrow or a tensor's bytes.

Outputs keep their shape; `?flat=1` gives the flat list that omega|ml itself gave.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from kindler.models.predictor import METHODS
from kindler.models.signature import Array, Signature
from kindler.serve.http_errors import Problem
from kindler.serve.protocols import Answer, Codec, InferRequest, RawRequest, Reply, Target
from kindler.serve.protocols.tables import ARROW, columns_in, read_columns, to_arrow
from kindler.serve.protocols.values import as_tensor, dumps, field_of, load_object, only, plain

RAW = "application/octet-stream"
_TAG = re.compile(r"/api/v1/model/.+/tags/[^/]+")  # which may have the name of an action
_DTYPES = (
    "bool",
    "float16",
    "float32",
    "float64",
    *(f"{s}int{b}" for s in ("", "u") for b in (8, 16, 32, 64)),
)


class OmegaCodec(Codec):
    name = "omega"
    path = re.compile(rf"/api/v1/model/(?P<name>.+)/(?P<action>{'|'.join(METHODS)})/?")
    error = "message"

    def target(self, method: str, path: str) -> Target | None:
        match = self.path.fullmatch(path)
        if match is None or (method in ("PUT", "DELETE") and _TAG.fullmatch(path)):
            return None
        if method not in ("PUT", "POST"):
            raise Problem(405, f"{method} is not allowed; use PUT.", {"allow": "PUT, POST"})
        return Target(match["name"], action=match["action"])

    def decode(self, sent: RawRequest, signature: Signature, target: Target) -> InferRequest:
        kind = sent.content_type
        if kind == ARROW:
            inputs = read_columns(sent.body, ARROW)
        elif kind == RAW:
            inputs = {"": _raw(sent)}
        elif kind in ("", "application/json", "application/x-www-form-urlencoded"):
            inputs = _inputs(load_object(sent.body))
        else:
            raise Problem(
                415, f"unsupported content type {kind!r}; expected application/json, {ARROW} or {RAW}."
            )
        return InferRequest(inputs=inputs, columns=kind == ARROW or "" not in inputs, method=target.action)

    def encode(self, answer: Answer, request: InferRequest, sent: RawRequest) -> Reply:
        accept, outputs = sent.headers.get("accept", ""), answer.outputs
        if ARROW in accept:
            return Reply(to_arrow(answer), ARROW)
        if RAW in accept:
            return _raw_reply(answer)
        flat = sent.query.get("flat", "") not in ("", "0", "false")
        document = {
            "model": answer.model,
            "result": only({name: plain(a.ravel() if flat else a) for name, a in outputs.items()}),
            "resource_uri": answer.model,
            "version": answer.version,
            "shape": only({name: list(array.shape) for name, array in outputs.items()}),
            "dtype": only({n: "text" if a.dtype.kind in "OU" else a.dtype.name for n, a in outputs.items()}),
        }
        return Reply(dumps(document, tokens=False))


def _inputs(body: dict[str, Any]) -> dict[str, Array]:
    """Columns by name, or an array under "" if it has none or is given a shape."""
    if "data" not in body:
        raise Problem(400, "the request has no 'data'.")
    data, names, shape = body["data"], field_of(body, "columns", []), body.get("shape")
    if isinstance(data, list) and not (data and isinstance(data[0], dict)):
        array = as_tensor(data, "'data'")
        return {"": array if shape is None else _cells(array, shape)}
    columns = columns_in(data)
    if names:
        missing = [str(name)[:80] for name in names if not isinstance(name, str) or name not in columns]
        if missing:
            raise Problem(400, f"'data' lacks the columns {', '.join(missing)}.")
        columns = {name: columns[name] for name in names}
    if shape is None:
        return columns
    if len(columns) != 1:
        raise Problem(400, f"'shape' needs exactly one column; received {len(columns)}.")
    (array,) = columns.values()
    return {"": _cells(array, shape)}


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


def _raw(sent: RawRequest) -> Array:
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
