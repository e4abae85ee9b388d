"""What an ONNX model would reach: tensors may lie in other files, and operations may be code of others."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kindler.errors import ConfigError
from kindler.models.safety.protobuf_fields import Malformed, fields, texts

_DEEPEST = 64
# ONNX's own operations, and those that every onnxruntime has.
_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
# A compiled graph of some device, which may lie in a file that the node names.
_REFUSED = frozenset({"EPContext"})
# What lies in a message of ONNX's schema, by the number of its field.
_INSIDE = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "external data"},
    "external data": {},
}


class Found(NamedTuple):
    """What is in a model.

    Attributes:
        files: The places of tensors that it names, each once.
        strange: The operations that are neither ONNX's own nor functions of the model.
    """

    files: list[str]
    strange: list[str]


def scan(path: Path) -> Found:
    """Look through a model."""
    try:
        with path.open("rb") as file:
            return _found(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (Malformed, ValueError) as exc:  # an empty file cannot be mapped
        raise ConfigError(f"{path.name} is not an ONNX model: {exc}.") from exc


def _found(model: memoryview) -> Found:
    functions: set[tuple[str, str]] = set()
    operations, files, graphs = [], [], 0
    for kind, data in _messages(model):
        graphs += kind == "graph"
        if kind == "function":  # FunctionProto: name = 1, domain = 10
            functions.update((domain, name) for domain in texts(data, 10) or [""] for name in texts(data, 1))
        elif kind == "node":  # NodeProto: op_type = 4, domain = 7
            operations += [(domain, op) for domain in texts(data, 7) or [""] for op in texts(data, 4)]
        elif kind == "external data" and "location" in texts(data, 1):  # key = 1, value = 2
            files += texts(data, 2)
    if not graphs:
        raise Malformed("no graph in it")
    strange = [
        f"{domain}.{op}"
        for domain, op in operations
        if (domain, op) not in functions and (domain not in _DOMAINS or op in _REFUSED)
    ]
    return Found(list(dict.fromkeys(files)), list(dict.fromkeys(strange)))


def _messages(model: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Every message in a model that could hold an operation or name a file, and what it is."""
    waiting = deque([("model", model, 0)])
    while waiting:
        kind, data, depth = waiting.popleft()
        if depth > _DEEPEST:
            raise Malformed("graphs within graphs without end")
        yield kind, data
        for number, value in fields(data):
            inside = _INSIDE[kind].get(number)
            if inside is not None and isinstance(value, memoryview):
                waiting.append((inside, value, depth + (inside == "graph")))
