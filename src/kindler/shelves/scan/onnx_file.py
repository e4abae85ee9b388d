"""Which other files an ONNX model would read: its large tensors may lie outside, at a place that it names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kindler.errors import ConfigError
from kindler.shelves.scan.wire import Malformed, messages, texts

__all__ = ["external_files"]

# ModelProto.graph, .functions, .training_info; GraphProto.node, .initializer, .sparse_initializer
_DEEPEST = 64


def external_files(path: Path) -> list[str]:
    """The places it names, each once.

    Raises:
        ConfigError: It is no ONNX model.
    """
    try:
        data = path.read_bytes()
        found = [place for graph in messages(data, 7) for place in _graph(graph, 0)]
        found += [place for function in messages(data, 25) for place in _nodes(function, 7, 0)]
        for training in messages(data, 20):
            for number in (1, 2):
                found += [place for graph in messages(training, number) for place in _graph(graph, 0)]
        if not any(True for _ in messages(data, 7)):
            raise Malformed("no graph in it")
    except Malformed as exc:
        raise ConfigError(f"{path.name} is no ONNX model: {exc}.") from exc
    return list(dict.fromkeys(found))


def _graph(graph: memoryview, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        raise Malformed("graphs within graphs without end")
    for tensor in messages(graph, 5):
        yield from _tensor(tensor)
    for sparse in messages(graph, 15):
        yield from _sparse(sparse)
    yield from _nodes(graph, 1, depth)


def _nodes(holder: memoryview, number: int, depth: int) -> Iterator[str]:
    for attribute in messages(holder, number, 5):
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


def _sparse(sparse: memoryview) -> Iterator[str]:
    for number in (1, 2):
        for tensor in messages(sparse, number):
            yield from _tensor(tensor)


def _tensor(tensor: memoryview) -> Iterator[str]:
    for entry in messages(tensor, 13):
        if "location" in texts(entry, 1):
            yield from texts(entry, 2)
