"""MLflow's scoring protocol: `/invocations`, for one model, or `/models/<name>/invocations` for any."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from kindler.models.predictor import METHODS
from kindler.models.signature import Array, Signature
from kindler.serve.http_errors import Problem
from kindler.serve.protocols import Answer, Codec, InferRequest, RawRequest, Reply, Target
from kindler.serve.protocols.tables import ARROW, CSV, PARQUET, columns_in, read_columns, to_arrow
from kindler.serve.protocols.values import as_tensor, as_tensors, dumps, load_object, only, plain

_FIELDS = ("dataframe_split", "dataframe_records", "instances", "inputs")
_CODES = {
    400: "BAD_REQUEST",
    404: "RESOURCE_DOES_NOT_EXIST",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
}


class Mlflow(Codec):
    name = "mlflow"
    path = re.compile(r"/(?:models/(?P<name>.+)/)?invocations")

    def decode(self, sent: RawRequest, signature: Signature, target: Target) -> InferRequest:
        kind = sent.content_type
        if kind in (CSV, PARQUET, ARROW):
            return InferRequest(inputs=read_columns(sent.body, kind), columns=True)
        if kind != "application/json":
            expected = f"application/json, {CSV}, {PARQUET} or {ARROW}"
            raise Problem(415, f"unsupported content type {kind!r}; expected {expected}.")
        body = load_object(sent.body)
        fields = [field for field in _FIELDS if field in body]
        if len(fields) != 1:
            raise Problem(
                400,
                "the input must be a JSON dictionary with exactly one of the input fields"
                f" {', '.join(map(repr, _FIELDS))}; received {fields or 'none of them'}.",
            )
        request = _request(fields[0], body[fields[0]])
        params = body.get("params")
        if isinstance(params, dict):
            request.params = params
            # As with a model that `store.models.export_mlflow` wrote.
            request.method = params.get("method", "predict")
            if request.method not in METHODS:
                shown = str(request.method)[:80]
                raise Problem(400, f"'method' must be one of {', '.join(METHODS)}; received {shown!r}.")
        return request

    def encode(self, answer: Answer, request: InferRequest, sent: RawRequest) -> Reply:
        if ARROW in sent.headers.get("accept", ""):
            return Reply(to_arrow(answer), ARROW)
        outputs = {name: plain(array) for name, array in answer.outputs.items()}
        return Reply(dumps({"predictions": only(outputs)}, tokens=True))

    def problem(self, problem: Problem) -> Reply:
        reply = super().problem(problem)
        if problem.status == 415:
            return replace(reply, body=problem.message.encode(), content_type="text/plain")
        code = _CODES.get(problem.status, "BAD_REQUEST" if problem.status < 500 else "INTERNAL_ERROR")
        return replace(reply, body=dumps({"error_code": code, "message": problem.message}, tokens=False))


def _request(field: str, value: Any) -> InferRequest:
    if field == "dataframe_split":
        return InferRequest(inputs=_with_nan(_split(value)), columns=True)
    if field == "dataframe_records":
        if not isinstance(value, list):
            raise Problem(400, "'dataframe_records' must be a list of objects.")
        return InferRequest(inputs=_with_nan(columns_in(value)), columns=True)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return InferRequest(inputs=columns_in(value), columns=True)
    if isinstance(value, dict):
        if not value:
            raise Problem(400, f"{field!r} is empty.")
        return InferRequest(inputs=as_tensors(value), columns=True)
    return InferRequest(inputs={"": as_tensor(value, repr(field))})


def _with_nan(columns: dict[str, Array]) -> dict[str, Array]:
    """Nulls among numbers as NaN, as pandas has them, and so MLflow."""
    filled = {}
    for name, array in columns.items():
        kinds = set(map(type, array.ravel().tolist())) if array.dtype.kind == "O" else set()
        missing = type(None) in kinds and kinds <= {int, float, type(None)}
        filled[name] = array.astype(np.float64) if missing else array
    return filled


def _split(value: Any) -> dict[str, Array]:
    if not isinstance(value, dict) or not isinstance(value.get("data"), list):
        raise Problem(400, "'dataframe_split' must be an object with 'data', a list of rows.")
    rows = value["data"]
    width = len(rows[0]) if rows and isinstance(rows[0], list) else 0
    columns = value.get("columns", list(range(width)))
    if not isinstance(columns, list) or len(set(map(str, columns))) != len(columns):
        raise Problem(400, "'columns' of 'dataframe_split' must be a list of unique names.")
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(columns):
            raise Problem(400, f"row {i} of 'dataframe_split' does not have {len(columns)} values.")
    return columns_in({str(name): [row[i] for row in rows] for i, name in enumerate(columns)})
