"""Requests and tables as frames of bytes, between the server and the processes that read bodies for it.

A frame is a JSON header and buffers, whose sizes the header has. Nothing in it can be code.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import orjson
import pyarrow as pa

from kindler.data import received
from kindler.models.signature import Array, Signature, TensorSpec
from kindler.serve.requests import InferRequest

Frame: TypeAlias = tuple[dict[str, Any], list[bytes]]
_LENGTH = struct.Struct("<I")
_MOST_HEADER = 64 << 20
_PLAIN = frozenset((str, int, float, bool, type(None)))
_BYTES = frozenset((bytes, type(None)))
_SINGLE = _PLAIN | _BYTES
OBJECTS = ("json", "floats", "bytes", "arrow")


def write_frame(file: BinaryIO, header: Mapping[str, Any], buffers: Sequence[Any] = ()) -> None:
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    head = orjson.dumps({**header, "sizes": sizes}, option=orjson.OPT_NON_STR_KEYS)
    file.write(_LENGTH.pack(len(head)))
    file.write(head)
    for buffer in buffers:
        file.write(buffer)
    file.flush()


def read_frame(file: BinaryIO, most: int | None = None) -> Frame:
    """Read a frame, of so many bytes at most.

    Raises:
        EOFError: There is no other, or not all of it.
        ValueError: It is none, or larger.
    """
    (length,) = _LENGTH.unpack(_exactly(file, _LENGTH.size))
    if most is not None and length > min(most, _MOST_HEADER):
        raise ValueError(f"a header of {length} bytes")
    header: dict[str, Any] = orjson.loads(_exactly(file, length))
    sizes = header.pop("sizes")
    if most is not None and not (all(type(n) is int and n >= 0 for n in sizes) and sum(sizes) <= most):
        raise ValueError(f"buffers of more than {most} bytes")
    return header, [_exactly(file, size) for size in sizes]


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


def unpacked_request(header: dict[str, Any], buffers: Sequence[bytes], most_values: int) -> InferRequest:
    """The request that was packed, with no more than so many values.

    Raises:
        ValueError, KeyError, TypeError: Whoever says so did not pack it.
    """
    arrays = header.pop("arrays")
    inputs = {
        str(description["name"]): _unpacked(description["form"], buffer, description["shape"], most_values)
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


def packed_objects(items: list[Any], *, arrow: bool = True) -> tuple[str, bytes]:
    """Objects as bytes, and in which form.

    Args:
        items: The objects.
        arrow: Whether Arrow's form may be used; without it, dates and times become text as in JSON.

    Raises:
        TypeError: Some cannot be sent.
    """
    kinds = set(map(type, items))
    if kinds <= _PLAIN:
        if float in kinds and not all(math.isfinite(item) for item in items if type(item) is float):
            return "floats", json.dumps(items).encode()  # orjson would make None of them
        return "json", orjson.dumps(items)
    if kinds <= _BYTES:
        sizes = np.array([len(items), *(-1 if item is None else len(item) for item in items)], "<i8")
        return "bytes", b"".join([sizes.tobytes(), *(item for item in items if item is not None)])
    try:
        batch = pa.record_batch([pa.array(items)], names=["x"]) if arrow else None  # dates and times
    except pa.ArrowException:
        batch = None
    if batch is None:
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        return "json", orjson.dumps(items, option=options, default=_plain)  # lists and dicts of unlike things
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return "arrow", sink.getvalue().to_pybytes()


def unpacked_objects(
    form: str, content: bytes, *, trusted: bool = True, most_values: int | None = None
) -> list[Any]:
    """The objects again.

    Args:
        form: The form they are in.
        content: The bytes.
        trusted: Whether they were packed by Kindler. Arrow's bytes of others are not read.
        most_values: How many values they may be together; None for any number.

    Raises:
        ValueError: They are not of that form.
    """
    if most_values is not None and form in ("json", "floats"):
        received.check_json(content, most_values)
    if form == "json":
        items = orjson.loads(content)
    elif form == "floats":
        items = json.loads(content)
    elif form == "bytes":
        items = _sliced(content)
    elif form == "arrow" and trusted:
        items = received.arrow_table(content)[0].to_pylist()
    else:
        raise ValueError(f"no form of objects: {form[:80]!r}")
    if not isinstance(items, list):
        raise ValueError("no list of objects")
    return items


def array_of(items: list[Any]) -> Array:
    """An array of objects, of which none is taken apart."""
    array: Array = np.empty(len(items), dtype=object)
    # Assigned as one, numpy would look into the items if they were sequences.
    if set(map(type, items)) <= _SINGLE:
        array[:] = items
        return array
    for i, item in enumerate(items):
        array[i] = item
    return array


def _sliced(content: bytes) -> list[bytes | None]:
    """Sizes, of which the first says where they end, and then the bytes."""
    count = int(np.frombuffer(content, "<i8", 1)[0])
    if count < 0:
        raise ValueError("fewer than no sizes")
    sizes = np.minimum(np.frombuffer(content, "<i8", count, 8), len(content))
    ends = np.cumsum(np.maximum(sizes, 0)) + 8 * (count + 1)
    if (ends[-1] if count else 8) != len(content):
        raise ValueError("sizes that do not fit")
    parts = zip(sizes.tolist(), ends.tolist(), strict=True)
    return [None if size < 0 else content[end - size : end] for size, end in parts]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return value.decode()
    raise TypeError(f"a {type(value).__qualname__} cannot be sent to another process")


def _packed(array: Array) -> tuple[str, Any]:
    if array.dtype.kind != "O":
        return array.dtype.str, np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed_objects(array.ravel().tolist())


def _unpacked(form: Any, buffer: bytes, shape: Any, most_values: int) -> Array:
    if form not in OBJECTS:
        return received.array(buffer, form, shape)
    items = unpacked_objects(form, buffer, most_values=most_values)
    return array_of(items).reshape(received.shape(shape))
