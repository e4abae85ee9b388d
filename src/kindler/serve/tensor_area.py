"""Shared memory between the server and a process that runs a model, and how arrays lie in it.

An area is made and sized by the server alone, and sealed: whoever has its descriptor can neither cut it short
under the other's feet nor make it grow. What an array is (its name, dtype, shape, and where it lies) is told
beside the area, and checked by whoever reads it: a model may write anything.
"""

from __future__ import annotations

import fcntl
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

from kindler.data import received
from kindler.models.signature import Array, Arrays
from kindler.serve.request_codec import OBJECTS, array_of, packed_objects, unpacked_objects

Parts: TypeAlias = Mapping[str, Sequence[Array]]  # for each name, arrays to be put one after the other
Entry: TypeAlias = list[Any]  # name, form, shape, offset, bytes

_ALIGNED = 64
_MOST_ARRAYS = 100_000
_SEALS = 0x0001 | 0x0002 | 0x0004  # no other seals, no shrinking, no growing
_NO_SHRINKING = 0x0002
_ADD_SEALS = 1033


class Area:
    """A piece of shared memory.

    Attributes:
        fd: Its descriptor, to be handed to another process.
        size: Its bytes.
        memory: The bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.memory = mmap.mmap(fd, size)

    @classmethod
    def create(cls, size: int, *, sealed: bool = True) -> Area:
        """A new one, of zeros that take no memory before they are written.

        Without `sealed` it can be emptied: for what the server writes, and never reads.
        """
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

    def clear(self) -> None:
        """Give the memory back; it is all zeros again."""
        with suppress(OSError, ValueError, AttributeError):  # a system that cannot, or it is closed
            self.memory.madvise(mmap.MADV_REMOVE)

    def close(self, *, empty: bool = False) -> None:
        """Let go of it. Arrays that lie in it keep the memory as long as they live; `empty` takes it away
        from whoever else has the area, too."""
        if self.fd >= 0:
            if empty:
                os.ftruncate(self.fd, 0)
            os.close(self.fd)
            self.fd = -1
        try:
            self.memory.close()
        except BufferError:
            pass  # goes with the last array


@dataclass(frozen=True, slots=True)
class Layout:
    """Where arrays will lie.

    Attributes:
        entries: What is told of each.
        size: Bytes up to the end of the last.
    """

    entries: list[Entry]
    size: int
    _sources: list[Sequence[Array] | bytes]

    def moved(self, by: int) -> Layout:
        """The same, so many bytes later, or a few more."""
        by = -(-by // _ALIGNED) * _ALIGNED
        entries = [[name, form, shape, at + by, size] for name, form, shape, at, size in self.entries]
        return Layout(entries, self.size + by, self._sources)

    def write(self, memory: mmap.mmap) -> None:
        """Copy them there."""
        for (_, form, shape, offset, size), source in zip(self.entries, self._sources, strict=True):
            if isinstance(source, bytes):
                memory[offset : offset + size] = source
                continue
            target = np.frombuffer(memory, form, math.prod(shape), offset).reshape(shape)
            if len(source) == 1:
                target[...] = source[0]
                continue
            start = 0
            for part in source:
                target[start : start + len(part)] = part
                start += len(part)


def layout(parts: Parts, at: int = 0, *, arrow: bool = True) -> Layout:
    """Plan where arrays will lie, from an offset on; `arrow` is whether objects may be in Arrow's form.

    Raises:
        TypeError: One holds objects that cannot be sent.
    """
    entries: list[Entry] = []
    sources: list[Sequence[Array] | bytes] = []
    for name, arrays in parts.items():
        first = arrays[0]
        rows = sum(map(len, arrays)) if len(arrays) > 1 else 0
        shape = (rows, *first.shape[1:]) if len(arrays) > 1 else first.shape
        at = -(-at // _ALIGNED) * _ALIGNED
        if first.dtype.kind == "O":
            form, content = packed_objects(
                [item for array in arrays for item in array.ravel().tolist()], arrow=arrow
            )
            source: Sequence[Array] | bytes = content
            size = len(content)
        else:
            if first.dtype.kind == "V":  # numbers that numpy itself does not know, such as bfloat16
                arrays = [array.astype(np.float32) for array in arrays]
                first = arrays[0]
            form, source, size = first.dtype.str, arrays, math.prod(shape) * first.dtype.itemsize
        entries.append([name, form, list(shape), at, size])
        sources.append(source)
        at += size
    return Layout(entries, at, sources)


def read_arrays(memory: mmap.mmap, entries: Any, *, copy: bool, trusted: bool) -> Arrays:
    """The arrays that lie in an area.

    Args:
        memory: Its bytes.
        entries: What was told of them.
        copy: Whether they are copied, or stay where they are; those of strangers always are.
        trusted: Whether the other side is ours.

    Raises:
        ValueError: What was told cannot be.
    """
    if not isinstance(entries, list) or len(entries) > _MOST_ARRAYS:
        raise ValueError("no list of arrays")
    if not trusted:
        _check(entries, len(memory))
    found: Arrays = {}
    for name, form, shape, offset, size in entries:
        if form in OBJECTS:
            content, most = memory[offset : offset + size], None if trusted else received.MOST_VALUES
            items = unpacked_objects(form, content, trusted=trusted, most_values=most)
            if len(items) != math.prod(shape):
                raise ValueError(f"an array of {len(items)} objects and shape {shape}")
            found[name] = array_of(items).reshape(shape)
        elif trusted:
            array = np.frombuffer(memory, form, math.prod(shape), offset).reshape(shape)
            found[name] = array.copy() if copy else array
        else:
            with memoryview(memory) as bytes_, bytes_[offset : offset + size] as part:
                found[name] = received.array(part, form, shape)
    return found


def _check(entries: list[Any], room: int) -> None:
    """That what was told of arrays can be, before anything of it is copied."""
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


def write_header(memory: mmap.mmap, value: Any, at: int = 0) -> int:
    """Write what is told of arrays, as JSON; returns its bytes.

    Raises:
        ValueError: There is not so much room.
    """
    text = orjson.dumps(value)
    if at + len(text) > len(memory):
        raise ValueError("the header is too large")
    memory[at : at + len(text)] = text
    return len(text)
