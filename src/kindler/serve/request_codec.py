"""Requests and tables as frames of bytes, between the server and the processes that read bodies for it.

A frame is a JSON header and buffers, whose sizes the header has. Nothing in it can be code.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import orjson
import pyarrow as pa

from kindler.models.signature import Array, Signature, TensorSpec
from kindler.serve.requests import InferRequest

__all__ = ["Frame", "packed_request", "read_frame", "signature_from", "unpacked_request", "write_frame"]

Frame: TypeAlias = tuple[dict[str, Any], list[bytes]]
_LENGTH = struct.Struct("<I")
_PLAIN = frozenset((str, int, float, bool, type(None)))


def write_frame(file: BinaryIO, header: Mapping[str, Any], buffers: Sequence[Any] = ()) -> None:
    """Write a frame."""
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    head = orjson.dumps({**header, "sizes": sizes}, option=orjson.OPT_NON_STR_KEYS)
    file.write(_LENGTH.pack(len(head)))
    file.write(head)
    for buffer in buffers:
        file.write(buffer)
    file.flush()


def read_frame(file: BinaryIO) -> Frame:
    """Read a frame.

    Raises:
        EOFError: There is no other, or not all of it.
    """
    (length,) = _LENGTH.unpack(_exactly(file, _LENGTH.size))
    header: dict[str, Any] = orjson.loads(_exactly(file, length))
    return header, [_exactly(file, size) for size in header.pop("sizes")]


def _exactly(file: BinaryIO, size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise EOFError
    return content


def packed_request(request: InferRequest) -> tuple[dict[str, Any], list[Any]]:
    """A request as the header and the buffers of a frame."""
    arrays = []
    buffers: list[Any] = []
    for name, array in request.inputs.items():
        form, buffer = _packed(array)
        arrays.append({"name": name, "form": form, "shape": array.shape})
        buffers.append(buffer)
    header = {
        "arrays": arrays,
        "columns": request.columns,
        "method": request.method,
        "signature": request.signature,
        "params": dict(request.params),
        "outputs": None if request.outputs is None else {k: dict(v) for k, v in request.outputs.items()},
        "id": request.id,
        "timeout_s": request.timeout_s,
        "batch": request.batch,
    }
    return header, buffers


def unpacked_request(header: dict[str, Any], buffers: Sequence[bytes]) -> InferRequest:
    """The request that was packed."""
    arrays = header.pop("arrays")
    inputs = {
        description["name"]: _unpacked(description["form"], buffer).reshape(description["shape"])
        for description, buffer in zip(arrays, buffers, strict=True)
    }
    return InferRequest(inputs=inputs, **header)


def signature_from(fields: Mapping[str, Any]) -> Signature:
    """The signature whose `asdict` this is."""

    def specs(side: str) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(**{**spec, "shape": spec["shape"] if spec["shape"] is None else tuple(spec["shape"])})
            for spec in fields[side]
        )

    columns = fields["columns"]
    return Signature(specs("inputs"), specs("outputs"), None if columns is None else tuple(columns))


def signature_told(signature: Signature) -> dict[str, Any]:
    """A signature for a header."""
    return asdict(signature)


def _packed(array: Array) -> tuple[str, Any]:
    if array.dtype.kind != "O":
        return array.dtype.str, np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    items = array.ravel().tolist()
    if set(map(type, items)) <= _PLAIN:
        return "json", orjson.dumps(items)
    batch = pa.record_batch([pa.array(items)], names=["x"])  # bytes, dates and times
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return "arrow", sink.getvalue()


def _unpacked(form: str, buffer: bytes) -> Array:
    if form not in ("json", "arrow"):
        return np.frombuffer(buffer, np.dtype(form))
    items = orjson.loads(buffer) if form == "json" else pa.ipc.open_stream(buffer).read_all()[0].to_pylist()
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array
