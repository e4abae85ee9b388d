"""What a SavedModel would do besides computing: it is a program, and only harmless operations pass.

Every SavedModel with variables also has two functions that save and restore them, by file operations.
TensorFlow 2 does not call them when it loads one, so they pass if nothing else in the model can call them.
A SavedModel of TensorFlow 1 is restored by running them, and needs trust if it has any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kindler.errors import ConfigError
from kindler.models.safety import allowed_names
from kindler.models.safety.protobuf_fields import Malformed, fields, messages, texts
from kindler.store.names import check_path

# SavedModel.meta_graphs; MetaGraphDef.graph_def, .saver_def, .asset_file_def, .object_graph_def
_META, _GRAPH, _SAVER, _ASSETS, _OBJECTS = 2, 2, 3, 6, 7
_NODE, _LIBRARY = 1, 2  # of GraphDef
# TensorProto.dtype, and its values that are no numbers or text but handles and objects
_DTYPE, _HANDLES, _HANDLE_VALUES = 1, (20, 21), (14, 15)

_OPERATIONS = allowed_names("tensorflow operations")
_SAVING = frozenset({"SaveV2", "RestoreV2", "MergeV2Checkpoints", "ShardedFilename"})
_LIKE_AN_OPERATION = re.compile(r"_?[A-Z]|.*>")


@dataclass
class _Piece:
    """What a node of the graph, or a function, does: operations, what they call, its attributes."""

    ops: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    handles: bool = False


def dangers(folder: Path) -> list[str]:
    """What in the folder's SavedModel is not known to be harmless, in words; empty if there is nothing."""
    other = [name for name in ("saved_model.pbtxt", "saved_model.cpb") if (folder / name).exists()]
    if other:
        return [f"{other[0]}, a form that is not inspected"]
    try:
        data = (folder / "saved_model.pb").read_bytes()
        graphs = list(messages(data, _META))
        if not graphs:
            raise Malformed("no graph in it")
        return sorted({problem for graph in graphs for problem in _problems(graph, alone=len(graphs) == 1)})
    except (OSError, Malformed) as exc:
        raise ConfigError(f"{folder} is not a SavedModel: {exc}.") from exc


def graph_dangers(meta_graph: bytes) -> list[str]:
    """The same of a `MetaGraphDef` alone."""
    try:
        return sorted(set(_problems(memoryview(meta_graph), alone=False)))
    except Malformed as exc:
        raise ConfigError(f"the bytes are not a MetaGraphDef: {exc}.") from exc


def _problems(meta_graph: memoryview, *, alone: bool) -> Iterator[str]:
    nodes: dict[str, _Piece] = {}
    functions: dict[str, _Piece] = {}
    for graph in messages(meta_graph, _GRAPH):
        for node in messages(graph, _NODE):
            for name in texts(node, 1):
                _add(nodes.setdefault(name, _Piece()), node)
        for definition in messages(graph, _LIBRARY, 1):
            for name in texts(definition, 1, 1):
                piece = functions.setdefault(name, _Piece())
                piece.attributes.update(texts(definition, 5, 1))
                for node in messages(definition, 3):
                    _add(piece, node)
    # TensorFlow 2 loads a single graph that has objects by these, and not by the graph's saver.
    by_objects = alone and any(True for _ in messages(meta_graph, _OBJECTS))
    savers = _savers(meta_graph, nodes, functions) if by_objects else set()
    pieces = [*nodes.values(), *functions.values()]
    others = [*nodes.values(), *(piece for name, piece in functions.items() if name not in savers)]
    unknown = {op for piece in pieces for op in _unknown(piece, functions)} - _SAVING
    unknown |= {op for piece in others for op in _called(piece)} & _SAVING
    yield from (f"the operation {op}" for op in unknown)
    if any(piece.handles for piece in pieces):
        yield "a constant that is a handle"
    for name in texts(meta_graph, _ASSETS, 2):
        try:
            check_path(name)
        except ConfigError:
            yield f"the asset {name!r}, which is outside the model"


def _unknown(piece: _Piece, functions: Mapping[str, _Piece]) -> Iterator[str]:
    for op in _called(piece):
        # A function that is named like an operation might be shadowed by it.
        if op not in _OPERATIONS and (op not in functions or _LIKE_AN_OPERATION.match(op)):
            yield op


def _add(piece: _Piece, node: memoryview) -> None:
    piece.ops.update(texts(node, 2))
    # AttrValue: func = 10, tensor = 8, list = 1 with func = 9, tensor = 8
    for attribute in messages(node, 5, 2):
        piece.calls.update(texts(attribute, 10, 1))
        piece.calls.update(texts(attribute, 1, 9, 1))
        for path in ((8,), (1, 8)):
            piece.handles |= any(_is_handle(tensor) for tensor in messages(attribute, *path))


def _is_handle(tensor: memoryview) -> bool:
    """Whether a constant forges a handle, or an object that TensorFlow would decode."""
    return any(
        number in _HANDLE_VALUES or (number == _DTYPE and value in _HANDLES)
        for number, value in fields(tensor)
    )


def _savers(meta_graph: memoryview, nodes: Mapping[str, _Piece], functions: Mapping[str, _Piece]) -> set[str]:
    """The functions that only the graph's saver calls."""
    named = [name for number in (2, 3) for name in texts(meta_graph, _SAVER, number)]
    starts = {name.lstrip("^").partition(":")[0] for name in named}
    saving = _reached(functions, {f for name in starts if name in nodes for f in _called(nodes[name])})
    others = {f for name, piece in nodes.items() if name not in starts for f in _called(piece)}
    others |= {f for name, piece in functions.items() if name not in saving for f in _called(piece)}
    others |= {name for name, piece in functions.items() if "api_implements" in piece.attributes}
    others |= set(_named(meta_graph))
    return saving - _reached(functions, others)


def _called(piece: _Piece) -> set[str]:
    return piece.ops | piece.calls


def _reached(functions: Mapping[str, _Piece], roots: Iterable[str]) -> set[str]:
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in functions and name not in seen:
            seen.add(name)
            waiting += _called(functions[name])
    return seen


def _named(meta_graph: memoryview) -> Iterator[str]:
    """Functions that the loaded object has, or that gradients call."""
    for objects in messages(meta_graph, _OBJECTS):
        yield from texts(objects, 2, 1)  # SavedObjectGraph.concrete_functions
        for found in messages(objects, 1):
            # SavedObject.function with concrete_functions, .bare_concrete_function, .captured_tensor
            yield from texts(found, 6, 1)
            yield from texts(found, 8, 1)
            yield from texts(found, 12, 2)
    for library in messages(meta_graph, _GRAPH, _LIBRARY):
        for path in ((2, 1), (2, 2), (3, 1)):  # FunctionDefLibrary.gradient, .registered_gradients
            yield from texts(library, *path)
