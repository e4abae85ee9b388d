"""TensorFlow Serving's REST protocol: rows (`instances`, `predictions`) or columns (`inputs`, `outputs`)."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kindler.models.signature import Array, Signature
from kindler.serve.http_errors import Problem, require_post
from kindler.serve.protocols import Sent
from kindler.serve.protocols.values import as_object, as_tensor, dumps, loads, plain, with_bytes
from kindler.serve.requests import Answer, InferRequest, Reply, Target

_PATH = re.compile(
    r"/v1/models/(?P<name>[^:]+?)(?:/versions/(?P<version>[^/:]+)|/labels/(?P<label>[^/:]+))?:(?P<verb>\w+)",
    re.IGNORECASE,
)
_ROWS = "rows"


class TfServing:
    """See the module."""

    name = "tfserving"

    def target(self, method: str, path: str) -> Target | None:
        match = _PATH.fullmatch(path)
        if match is None:
            return None
        require_post(method)
        if match["verb"].lower() != "predict":
            raise Problem(404, f":{match['verb']} is not supported; use :predict.")
        return Target(match["name"], match["version"] or match["label"])

    def decode(self, sent: Sent, signature: Signature, target: Target) -> InferRequest:
        body = as_object(loads(sent.body))
        if b'"b64"' in sent.body:
            body = as_object(with_bytes(body))  # which may be nothing but bytes
        if ("instances" in body) == ("inputs" in body):
            both = "instances" in body
            raise Problem(400, f"the request has {'both' if both else 'neither'} 'instances' and 'inputs'.")
        asked = body.get("signature_name")
        if asked is not None and not isinstance(asked, str):
            raise Problem(400, "'signature_name' must be a string.")
        by_row = "instances" in body
        inputs = _by_row(body["instances"]) if by_row else _by_column(body["inputs"])
        return InferRequest(inputs=inputs, signature=asked or None, params={_ROWS: by_row})

    def encode(self, answer: Answer, request: InferRequest, sent: Sent, target: Target) -> Reply:
        outputs = {name: _shown(name, array) for name, array in answer.outputs.items()}
        if not request.params[_ROWS]:
            predictions: Any = next(iter(outputs.values())) if len(outputs) == 1 else outputs
            return Reply(dumps({"outputs": predictions}, tokens=True))
        for name, array in answer.outputs.items():
            if not array.ndim or len(array) != answer.rows:
                raise Problem(400, f"the output {name!r} does not have one row per instance ({answer.rows}).")
        if len(outputs) == 1:
            return Reply(dumps({"predictions": next(iter(outputs.values()))}, tokens=True))
        rows = [{name: values[i] for name, values in outputs.items()} for i in range(answer.rows)]
        return Reply(dumps({"predictions": rows}, tokens=True))

    def problem(self, status: int, message: str) -> Reply:
        return Reply(dumps({"error": message}, tokens=False), status=status)


def _by_row(instances: Any) -> dict[str, Array]:
    if not isinstance(instances, list) or not instances:
        raise Problem(400, "'instances' must be a non-empty list.")
    if not isinstance(instances[0], dict):
        return {"": as_tensor(instances, "'instances'")}
    names = list(instances[0])
    for i, instance in enumerate(instances):
        if not isinstance(instance, dict) or instance.keys() != instances[0].keys():
            raise Problem(400, f"item {i} of 'instances' does not have the names of the first item: {names}.")
    return {name: as_tensor([item[name] for item in instances], f"the input {name!r}") for name in names}


def _by_column(inputs: Any) -> dict[str, Array]:
    if isinstance(inputs, Mapping):
        return {str(name): as_tensor(value, f"the input {name!r}") for name, value in inputs.items()}
    return {"": as_tensor(inputs, "'inputs'")}


def _shown(name: str, array: Array) -> Any:
    if name.endswith("_bytes"):
        return _encoded(np.asarray(array, dtype=object).tolist())
    return plain(array)


def _encoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    content = value if isinstance(value, bytes) else str(value).encode()
    return {"b64": base64.b64encode(content).decode()}
