"""TensorFlow Serving's REST protocol: rows (`instances`, `predictions`) or columns (`inputs`, `outputs`)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from kindler.models.signature import Array, Signature
from kindler.serve.http_errors import Problem
from kindler.serve.protocols import Answer, Codec, InferRequest, RawRequest, Reply, Target
from kindler.serve.protocols.tables import by_name
from kindler.serve.protocols.values import (
    as_tensor,
    as_tensors,
    dumps,
    field_of,
    in_base64,
    load_object,
    only,
    plain,
    with_bytes,
)

_ROWS = "rows"


class TfServing(Codec):
    name = "tfserving"
    path = re.compile(
        r"/v1/models/(?P<name>[^:]+?)(?:/(?:versions|labels)/(?P<version>[^/:]+))?:\w+",
        re.IGNORECASE,
    )

    def target(self, method: str, path: str) -> Target | None:
        target, verb = super().target(method, path), path.rpartition(":")[2]
        if target is not None and verb.lower() != "predict":
            raise Problem(404, f":{verb} is not supported; use :predict.")
        return target

    def decode(self, sent: RawRequest, signature: Signature, target: Target) -> InferRequest:
        body: Any = load_object(sent.body)
        if b'"b64"' in sent.body:
            body = with_bytes(body)  # which may be nothing but bytes
        if not isinstance(body, dict) or ("instances" in body) == ("inputs" in body):
            raise Problem(400, "the request must have either 'instances' or 'inputs'.")
        by_row = "instances" in body
        word = "instances" if by_row else "inputs"
        inputs = _inputs(body[word], word)
        signature_name = field_of(body, "signature_name", "") or None
        return InferRequest(inputs=inputs, signature=signature_name, params={_ROWS: by_row})

    def encode(self, answer: Answer, request: InferRequest, sent: RawRequest) -> Reply:
        outputs = {name: _shown(name, array) for name, array in answer.outputs.items()}
        if not request.params[_ROWS]:
            return Reply(dumps({"outputs": only(outputs)}, tokens=True))
        answer.check_rows()
        rows: Any = only(outputs)
        if len(outputs) != 1:
            rows = [{name: values[i] for name, values in outputs.items()} for i in range(answer.rows)]
        return Reply(dumps({"predictions": rows}, tokens=True))


def _inputs(value: Any, word: str) -> dict[str, Array]:
    if word == "instances":
        if not isinstance(value, list) or not value:
            raise Problem(400, "'instances' must be a non-empty list.")
        if isinstance(value[0], dict):
            return as_tensors(by_name(value))
    elif isinstance(value, dict):
        return as_tensors(value)
    return {"": as_tensor(value, repr(word))}


def _shown(name: str, array: Array) -> Any:
    if name.endswith("_bytes"):
        return _encoded(np.asarray(array, dtype=object).tolist())
    return plain(array)


def _encoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    return in_base64(value if isinstance(value, bytes) else str(value).encode())
