"""Shared memory between two processes, and how arrays lie in it.

An area is made and sized by the parent alone, and sealed: whoever has its descriptor can neither cut it short
under the other's feet nor make it grow. The header of a message describes the arrays (name, dtype, shape, and
where each lies); the parent checks it, as a child may write anything. Nothing can be code.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import orjson
import pyarrow as pa

from kindler.data import received

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Parts: TypeAlias = Mapping[str, Sequence[Any]]  # by name: arrays to be concatenated, or one `bytes`
Entry: TypeAlias = list[Any]  # name, form, shape, offset, bytes

_ALIGNED = 64
_MAX_ARRAYS = 100_000
_SEALS = 0x0001 | 0x0002 | 0x0004  # no other seals, no shrinking, no growing
_NO_SHRINKING = 0x0002
_ADD_SEALS = 1033
_RAW, _OBJECTS = "raw", ("json", "floats", "bytes", "arrow")
_PLAIN = frozenset((str, int, float, bool, type(None)))
_BYTES = frozenset((bytes, type(None)))


class Area:
    """A piece of shared memory; whoever has `fd` has the same bytes in `memory`."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.memory = mmap.mmap(fd, size)

    @classmethod
    def create(cls, size: int, *, sealed: bool = True) -> Area:
        """A new one, of zeros that take no memory before they are written. Without `sealed` it can be
        emptied: for what its maker writes, and never reads."""
        if not hasattr(os, "memfd_create"):
            with tempfile.TemporaryFile(prefix="kindler-area-") as file:
                file.truncate(size)
                return cls(os.dup(file.fileno()), size)
        fd = os.memfd_create("kindler", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, _ADD_SEALS, _SEALS if sealed else _SEALS & ~_NO_SHRINKING)
            return cls(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @property
    def used_bytes(self) -> int:
        """What it takes of the machine's memory, whoever wrote there."""
        return os.fstat(self.fd).st_blocks * 512 if self.fd >= 0 else 0

    def clear(self, start: int) -> None:
        """Give the memory from `start` on back; it is all zeros again."""
        with suppress(OSError, ValueError, AttributeError):  # a system that cannot, or it is closed
            self.memory.madvise(mmap.MADV_REMOVE, start)

    def close(self, *, empty: bool = False) -> None:
        """Arrays that lie in it keep the memory as long as they live; `empty` takes it away from whoever
        else has the area, too."""
        if self.fd >= 0:
            if empty:
                os.ftruncate(self.fd, 0)
            os.close(self.fd)
            self.fd = -1
        with suppress(BufferError):  # it goes with the last array
            self.memory.close()

    def write(self, header: bytes, at: int = 0) -> tuple[int, int]:
        """Write the header of a message; returns where it lies, and its length."""
        self.memory[at : at + len(header)] = header
        return at, len(header)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where arrays will lie: `entries` describe them in a header, `size` is the end of the last."""

    entries: list[Entry]
    size: int
    _sources: list[Sequence[Array] | bytes]

    def write(self, memory: mmap.mmap) -> None:
        for (_, form, shape, offset, size), source in zip(self.entries, self._sources, strict=True):
            if isinstance(source, bytes):  # copied by numpy, so that others can compute meanwhile
                np.frombuffer(memory, np.uint8, size, offset)[...] = np.frombuffer(source, np.uint8)
                continue
            target = np.frombuffer(memory, form, math.prod(shape), offset).reshape(shape)
            if len(source) == 1:
                target[...] = source[0]
            else:
                np.concatenate(source, out=target)


def layout(parts: Parts, *, arrow: bool = True, at: int = 0) -> Layout:
    """Plan where arrays will lie, from `at` on; `arrow` is whether objects may be in Arrow's form.

    Raises:
        TypeError: One holds objects that cannot be sent.
    """
    entries: list[Entry] = []
    sources: list[Sequence[Array] | bytes] = []
    for name, arrays in parts.items():
        at = -(-at // _ALIGNED) * _ALIGNED
        first = arrays[0]
        source: Sequence[Array] | bytes
        if isinstance(first, bytes):
            form, shape, source, size = _RAW, (), first, len(first)
        else:
            several = len(arrays) > 1
            shape = (sum(map(len, arrays)), *first.shape[1:]) if several else first.shape
            if first.dtype.kind == "O":
                items = [item for array in arrays for item in array.ravel().tolist()]
                form, source = packed_objects(items, arrow=arrow)
                size = len(source)
            else:
                if first.dtype.kind == "V":  # numbers that numpy itself does not know, such as bfloat16
                    arrays = [array.astype(np.float32) for array in arrays]
                    first = arrays[0]
                form, source, size = first.dtype.str, arrays, math.prod(shape) * first.dtype.itemsize
        entries.append([name, form, list(shape), at, size])
        sources.append(source)
        at += size
    return Layout(entries, at, sources)


def read_arrays(
    memory: mmap.mmap,
    entries: Any,
    *,
    trusted: bool,
    arrow: bool = False,
    most_values: int = received.MOST_VALUES,
) -> dict[str, Any]:
    """The arrays, and the bytes, that lie in an area.

    What the parent sent is `trusted`: nothing is checked, and arrays stay where they are. Objects of a child
    may be in Arrow's form, which is validated, if `arrow`, and of `most_values` values together.

    Raises:
        ValueError: The entries do not describe arrays in this memory.
    """
    if not isinstance(entries, list) or len(entries) > _MAX_ARRAYS:
        raise ValueError("no list of arrays")
    if not trusted:
        _check(entries, len(memory))
    arrays: dict[str, Any] = {}
    for name, form, shape, offset, size in entries:
        if form == _RAW:
            arrays[name] = memory[offset : offset + size]
        elif form in _OBJECTS:
            if form == "arrow" and not (trusted or arrow):
                raise ValueError("no form of objects: Arrow's bytes of a stranger")
            content = memory[offset : offset + size]
            items = unpacked_objects(form, content, most_values=None if trusted else most_values)
            if len(items) != math.prod(shape):
                raise ValueError(f"an array of {len(items)} objects and shape {shape}")
            arrays[name] = _object_array(items).reshape(shape)
        elif trusted:
            arrays[name] = np.frombuffer(memory, form, math.prod(shape), offset).reshape(shape)
        else:
            with memoryview(memory) as bytes_, bytes_[offset : offset + size] as part:
                arrays[name] = received.array(part, form, shape)
    return arrays


def _check(entries: list[Any], room: int) -> None:
    """Check what a child says of its arrays before anything of it is copied."""
    taken = 0
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 5:
            raise ValueError("no array")
        name, form, shape, offset, size = entry
        received.shape(shape)
        whole = all(type(n) is int and 0 <= n <= room for n in (offset, size))
        if type(name) is not str or type(form) is not str or not whole or offset + size > room:
            raise ValueError(f"no array: {str(entry)[:200]}")
        taken += size
    if taken > room:
        raise ValueError("arrays that lie on one another")


def packed_objects(items: list[Any], *, arrow: bool = True) -> tuple[str, bytes]:
    """Objects as bytes, and in which form; without `arrow`, dates and times become text as in JSON."""
    kinds = set(map(type, items))
    if kinds <= _PLAIN:
        if float in kinds and not all(math.isfinite(item) for item in items if type(item) is float):
            return "floats", json.dumps(items).encode()  # orjson would make None of them
        return "json", orjson.dumps(items)
    if kinds <= _BYTES:
        sizes = np.array([len(items), *(-1 if item is None else len(item) for item in items)], "<i8")
        return "bytes", b"".join([sizes.tobytes(), *(item for item in items if item is not None)])
    if arrow:
        with suppress(pa.ArrowException):  # dates and times
            batch = pa.record_batch([pa.array(items)], names=["x"])
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            return "arrow", sink.getvalue().to_pybytes()
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return "json", orjson.dumps(items, option=options, default=_plain)  # lists and dicts of unlike things


def unpacked_objects(form: str, content: bytes, *, most_values: int | None = None) -> list[Any]:
    """The objects again; `most_values` limits how many values they may be together.

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
    else:
        items = received.arrow_table(content)[0].to_pylist()
    if not isinstance(items, list):
        raise ValueError("no list of objects")
    return items


def _object_array(items: list[Any]) -> Array:
    array: Array = np.empty(len(items), dtype=object)
    # Assigned as one, numpy would look into the items if they were sequences.
    if set(map(type, items)) <= _PLAIN | _BYTES:
        array[:] = items
    else:
        for i, item in enumerate(items):
            array[i] = item
    return array


def _sliced(content: bytes) -> list[bytes | None]:
    """Sizes, of which the first says how many there are, and then the bytes."""
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
