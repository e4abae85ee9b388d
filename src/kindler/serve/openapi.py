"""The OpenAPI document: FastAPI's routes, and the prediction paths, which FastAPI does not route."""

from __future__ import annotations

import re
from typing import Any

from kindler.serve.protocols.omega import RAW
from kindler.serve.protocols.tables import ARROW, PARQUET
from kindler.serve.requests import METHODS

_BYTES = {"schema": {"type": "string", "format": "binary"}}
_TENSOR: dict[str, Any] = {"description": "A number or a string, or nested lists of them"}
_PARAMETERS = {"type": "object", "additionalProperties": True}

_V2_REQUEST = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": _PARAMETERS,
        "inputs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "shape", "datatype", "data"],
                "properties": {
                    "name": {"type": "string"},
                    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    "datatype": {
                        "type": "string",
                        "enum": [
                            "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
                            "FP16", "FP32", "FP64", "BYTES",
                        ],
                    },
                    "parameters": _PARAMETERS,
                    "data": _TENSOR,
                },
            },
        },
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "parameters": _PARAMETERS},
            },
        },
    },
}  # fmt: skip
_TFS_REQUEST = {
    "type": "object",
    "properties": {"signature_name": {"type": "string"}, "instances": {"type": "array"}, "inputs": _TENSOR},
    "oneOf": [{"required": ["instances"]}, {"required": ["inputs"]}],
}
_SPLIT = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "columns": {"type": "array", "items": {"type": "string"}},
        "index": {"type": "array"},
        "data": {"type": "array", "items": {"type": "array"}},
    },
}
_FIELDS = ("dataframe_split", "dataframe_records", "instances", "inputs")
_MLFLOW_REQUEST = {
    "type": "object",
    "properties": {
        "dataframe_split": _SPLIT,
        "dataframe_records": {"type": "array", "items": {"type": "object"}},
        "instances": _TENSOR,
        "inputs": _TENSOR,
        "params": {"type": "object"},
    },
    "oneOf": [{"required": [field]} for field in _FIELDS],
}
_OMEGA_REQUEST = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "columns": {"type": "array", "items": {"type": "string"}},
        "data": {"anyOf": [{"type": "object"}, {"type": "array"}]},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}},
    },
}
_STATUS = {
    "400": "Bad request",
    "401": "Missing, unknown or expired API key",
    "403": "The API key lacks the required scope",
    "404": "Model or version not found",
    "413": "Request too large",
    "415": "Unsupported content type",
    "429": "Too many requests; see Retry-After",
    "503": "Service unavailable; see Retry-After",
    "504": "The model timed out",
}


def with_predictions(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the prediction paths and the security scheme added."""
    paths = document.setdefault("paths", {})
    json: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    v2 = {"application/json": {"schema": _V2_REQUEST}}
    binary = {**json, "application/octet-stream": _BYTES}
    for path in ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"):
        paths[path] = {"post": _operation(path, "Open Inference Protocol V2", "v2", v2, binary)}
    tfs = {"application/json": {"schema": _TFS_REQUEST}}
    for middle in ("", "/versions/{version}", "/labels/{version}"):
        path = f"/v1/models/{{name}}{middle}:predict"
        paths[path] = {"post": _operation(path, "TensorFlow Serving", "tfserving", tfs, json)}
    mlflow = {
        "application/json": {"schema": _MLFLOW_REQUEST},
        "text/csv": {"schema": {"type": "string"}},
        PARQUET: _BYTES,
        ARROW: _BYTES,
    }
    for path in ("/invocations", "/models/{name}/invocations"):
        paths[path] = {"post": _operation(path, "MLflow", "mlflow", mlflow, {**json, ARROW: _BYTES})}
    omega = {"application/json": {"schema": _OMEGA_REQUEST}, ARROW: _BYTES, RAW: _BYTES}
    for method in METHODS:
        path = f"/api/v1/model/{{name}}/{method}"
        operation = _operation(path, "omega|ml", "models", omega, {**json, ARROW: _BYTES, RAW: _BYTES})
        operation["parameters"] += [
            _query("datax", "Name of a stored dataset to use instead of a body"),
            _query("flat", "1 to return the result as a flat list"),
            _query("dtype", f"The dtype of a body of {RAW}"),
            _query("shape", f"The shape of a body of {RAW}, such as 8,28,28"),
        ]
        paths[path] = {"put": operation}
    schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes["bearer"] = {"type": "http", "scheme": "bearer"}
    document["security"] = [{}, {"bearer": []}]
    return document


def _operation(
    path: str, summary: str, tag: str, takes: dict[str, Any], gives: dict[str, Any]
) -> dict[str, Any]:
    named = [name for name in ("name", "version") if f"{{{name}}}" in path]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named
    ]
    return {
        "summary": f"Predict ({summary})",
        "operationId": "predict" + re.sub(r"\W+", "_", path),
        "tags": [tag],
        "parameters": [*parameters, _query("bucket", "Bucket of the store")],
        "requestBody": {"required": True, "content": takes},
        "responses": {
            "200": {"description": "Model outputs", "content": gives},
            **{status: {"description": text} for status, text in _STATUS.items()},
        },
    }


def _query(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": description, "schema": {"type": "string"}}
