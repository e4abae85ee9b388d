"""What a SavedModel would do besides computing: it is a program, and some of its operations touch the world.

Every SavedModel has functions that save and restore its variables; they write and read files. They are fine
where nothing but TensorFlow's own saver calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kindler.errors import ConfigError
from kindler.shelves.scan.wire import Malformed, fields, messages, texts

__all__ = ["dangers"]

# SavedModel.meta_graphs, MetaGraphDef.graph_def, .object_graph_def; GraphDef.node, .library
_META, _GRAPH, _OBJECTS = 2, 2, 7
_NODE, _LIBRARY = 1, 2

_SAVING = frozenset(
    {
        "Save",
        "SaveV2",
        "SaveSlices",
        "Restore",
        "RestoreV2",
        "RestoreSlice",
        "MergeV2Checkpoints",
        "ShardedFilename",
        "ShardedFilespec",
    }
)
_FORBIDDEN = frozenset(
    {
        "ReadFile",
        "WriteFile",
        "MatchingFiles",
        "PyFunc",
        "PyFuncStateless",
        "EagerPyFunc",
        "PrintV2",
        "DebugIdentity",
        "DebugIdentityV2",
        "DebugNumericSummary",
        "DumpIR",
        "RpcCall",
        "RpcClient",
        "RpcServer",
        "RpcServerStart",
        "SqlDataset",
        "WholeFileReader",
        "WholeFileReaderV2",
        "TextLineReader",
        "TextLineReaderV2",
        "TFRecordReader",
        "TFRecordReaderV2",
        "FixedLengthRecordReader",
        "FixedLengthRecordReaderV2",
        "LMDBReader",
        "TextLineDataset",
        "TFRecordDataset",
        "TFRecordDatasetV2",
        "FixedLengthRecordDataset",
        "FixedLengthRecordDatasetV2",
        "LMDBDataset",
        "CSVDataset",
        "CSVDatasetV2",
        "SSTableReader",
        "CacheDataset",
        "CacheDatasetV2",
        "SaveDataset",
        "SaveDatasetV2",
        "LoadDataset",
        "SnapshotDataset",
        "SnapshotDatasetV2",
        "DatasetToTFRecord",
        "GenerateVocabRemapping",
        "LoadAndRemapMatrix",
        "InitializeTableFromDataset",
        "CompileAndRun",
        "XlaLaunch",
    }
)
_FORBIDDEN_STARTS = (
    "WriteSummary",
    "CreateSummary",
    "SummaryWriter",
    "ImportEvent",
    "WriteScalar",
    "WriteHist",
    "WriteImage",
    "WriteAudio",
    "WriteGraph",
    "WriteRawProto",
)


@dataclass
class _Piece:
    """What a node of the graph, or a function, does: its operations, what they call, what they take."""

    ops: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)


def dangers(folder: Path) -> list[str]:
    """The operations in the folder's SavedModel that touch the world, in words; empty if there are none.

    Raises:
        ConfigError: It is no SavedModel.
    """
    other = [name for name in ("saved_model.pbtxt", "saved_model.cpb") if (folder / name).exists()]
    if other:
        return [f"{other[0]}, a form that is not looked through"]
    try:
        data = (folder / "saved_model.pb").read_bytes()
        graphs = list(messages(data, _META))
        if not graphs:
            raise Malformed("no graph in it")
        return sorted({problem for graph in graphs for problem in _problems(graph)})
    except (OSError, Malformed) as exc:
        raise ConfigError(f"{folder} is no SavedModel: {exc}.") from exc


def _problems(meta_graph: memoryview) -> Iterator[str]:
    nodes: dict[str, _Piece] = {}
    functions: dict[str, _Piece] = {}
    for graph in messages(meta_graph, _GRAPH):
        for node in messages(graph, _NODE):
            for name in texts(node, 1):
                _add(nodes.setdefault(name, _Piece()), node)
        for definition in messages(graph, _LIBRARY, 1):
            for name in texts(definition, 1, 1):
                for node in messages(definition, 3):
                    _add(functions.setdefault(name, _Piece()), node)
    # What runs when it is loaded or asked: nobody but TensorFlow's saver may get to the saving operations.
    run = [nodes[name] for name in _reached(nodes, _entries(meta_graph), lambda piece: piece.inputs)]
    called = {name for piece in run for name in piece.calls} | set(_concrete(meta_graph))
    run += [functions[name] for name in _reached(functions, called, lambda piece: piece.calls)]
    saving = {op for piece in run for op in piece.ops} & _SAVING
    everywhere = {op for piece in (*nodes.values(), *functions.values()) for op in piece.ops}
    for op in sorted(saving | {op for op in everywhere if _is_forbidden(op)}):
        yield f"the operation {op}"


def _add(piece: _Piece, node: memoryview) -> None:
    piece.ops.update(texts(node, 2))
    piece.calls.update(texts(node, 2))  # a function may be called by naming it as an operation
    piece.inputs.update(name.lstrip("^").partition(":")[0] for name in texts(node, 3))
    for attribute in messages(node, 5, 2):  # AttrValue: func = 10, list = 1 with func = 9
        piece.calls.update(texts(attribute, 10, 1))
        piece.calls.update(texts(attribute, 1, 9, 1))


def _reached(
    pieces: Mapping[str, _Piece], roots: Iterable[str], onwards: Callable[[_Piece], set[str]]
) -> set[str]:
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in pieces and name not in seen:
            seen.add(name)
            waiting += onwards(pieces[name])
    return seen


def _entries(meta_graph: memoryview) -> Iterator[str]:
    """The nodes that signatures (MetaGraphDef.signature_def) and collections (.collection_def) name."""
    found = [name for number in (1, 2) for name in texts(meta_graph, 5, 2, number, 2, 1)]
    found += texts(meta_graph, 4, 2, 1, 1)
    return (name.lstrip("^").partition(":")[0] for name in found)


def _concrete(meta_graph: memoryview) -> Iterator[str]:
    """The functions that the loaded object has: SavedObjectGraph.concrete_functions, and names in it."""
    for objects in messages(meta_graph, _OBJECTS):
        yield from texts(objects, 2, 1)
        for number, value in fields(objects):
            if number == 1 and isinstance(value, memoryview):
                # SavedObject.function with concrete_functions, and .bare_concrete_function with a name.
                yield from texts(value, 6, 1)
                yield from texts(value, 8, 1)


def _is_forbidden(op: str) -> bool:
    return op in _FORBIDDEN or op.startswith(_FORBIDDEN_STARTS)
