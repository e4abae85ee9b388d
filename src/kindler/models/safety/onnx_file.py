"""What an ONNX model would reach: tensors may lie in other files, and operations may be code of others."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kindler.errors import ConfigError
from kindler.models.safety.protobuf_fields import Malformed, messages, texts

_DEEPEST = 64
# ONNX's own operations, and those that every onnxruntime has.
_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
# A compiled graph of some device, which may lie in a file that the node names.
_REFUSED = frozenset({"EPContext"})


@dataclass
class Found:
    """What is in a model.

    Attributes:
        files: The places of tensors that it names, each once.
        strange: The operations that are neither ONNX's own nor functions of the model.
    """

    files: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)


def scan(path: Path) -> Found:
    """Look through a model."""
    try:
        with path.open("rb") as file:
            return _model(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (Malformed, ValueError) as exc:  # an empty file cannot be mapped
        raise ConfigError(f"{path.name} is not an ONNX model: {exc}.") from exc


def _model(data: memoryview) -> Found:
    # ModelProto: graph = 7, training_info = 20 with graphs 1 and 2, functions = 25
    graphs = [*messages(data, 7)]
    if not graphs:
        raise Malformed("no graph in it")
    functions = list(messages(data, 25))
    for number in (1, 2):
        graphs += messages(data, 20, number)
    found = [one for graph in graphs for one in _graph(graph, 0)]
    for function in functions:  # FunctionProto: node = 7, attribute_proto = 11
        found += _nodes(function, 7, 0)
        found += [one for attribute in messages(function, 11) for one in _attribute(attribute, 0)]
    # The model's own functions: name = 1, domain = 10
    own = {(domain, name) for f in functions for domain in texts(f, 10) or [""] for name in texts(f, 1)}
    strange = [
        f"{domain}.{op}"
        for kind, domain, op in found
        if kind == "op" and (domain, op) not in own and (domain not in _DOMAINS or op in _REFUSED)
    ]
    files = [place for kind, _, place in found if kind == "file"]
    return Found(list(dict.fromkeys(files)), list(dict.fromkeys(strange)))


_Thing = tuple[str, str, str]  # ("file", "", place) or ("op", domain, name)


def _graph(graph: memoryview, depth: int) -> Iterator[_Thing]:
    # GraphProto: node = 1, initializer = 5, sparse_initializer = 15
    if depth > _DEEPEST:
        raise Malformed("graphs within graphs without end")
    for tensor in messages(graph, 5):
        yield from _tensor(tensor)
    for sparse in messages(graph, 15):
        yield from _sparse(sparse)
    yield from _nodes(graph, 1, depth)


def _nodes(holder: memoryview, number: int, depth: int) -> Iterator[_Thing]:
    for node in messages(holder, number):  # NodeProto: op_type = 4, attribute = 5, domain = 7
        for domain in texts(node, 7) or [""]:
            for op in texts(node, 4):
                yield "op", domain, op
        for attribute in messages(node, 5):
            yield from _attribute(attribute, depth)


def _attribute(attribute: memoryview, depth: int) -> Iterator[_Thing]:
    # AttributeProto: t = 5, g = 6, tensors = 10, graphs = 11, sparse_tensor = 22, sparse_tensors = 23
    for n in (5, 10):
        for tensor in messages(attribute, n):
            yield from _tensor(tensor)
    for n in (22, 23):
        for sparse in messages(attribute, n):
            yield from _sparse(sparse)
    for n in (6, 11):
        for graph in messages(attribute, n):
            yield from _graph(graph, depth + 1)


def _sparse(sparse: memoryview) -> Iterator[_Thing]:
    for number in (1, 2):
        for tensor in messages(sparse, number):
            yield from _tensor(tensor)


def _tensor(tensor: memoryview) -> Iterator[_Thing]:
    for entry in messages(tensor, 13):  # TensorProto.external_data: key = 1, value = 2
        if "location" in texts(entry, 1):
            yield from (("file", "", place) for place in texts(entry, 2))
