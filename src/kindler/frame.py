"""One message format for connections, files and cells: a JSON header and raw buffers, never pickle.

On a connection, buffers of more than `PART_BYTES` travel as several frames ("bulk", then "part" after "part",
then the frame itself), so that heartbeats pass between them, no allocation trusts the other end's claim, and
nothing is limited to 2 or 4 GB. In a file or a cell (`to_bytes`) a frame is always one.
"""

from __future__ import annotations

import io
import json
import secrets
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Piece: TypeAlias = bytes | memoryview

PART_BYTES = 4 << 20

_HEADER = struct.Struct("!4sI")
_MAGIC = b"KDL2"
_MAX_HEADER_BYTES = 16 << 20
_MAX_OPEN = 8


class ChannelClosed(ConnectionError):
    """The other end is gone, or does not speak this protocol."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message; `bulk` names the parts that came before, if its buffers did not fit into it."""

    kind: str
    fields: dict[str, Any]
    buffers: tuple[bytes, ...] = ()
    bulk: str = ""


def encode(kind: str, buffers: Sequence[Piece], fields: dict[str, Any]) -> Iterator[list[Piece]]:
    """The frames of this message, each as pieces to send without anything in between."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    if sum(view.nbytes for view in views) <= PART_BYTES:
        yield _frame(kind, fields, views)
        return
    bulk = secrets.token_hex(8)
    yield _frame("bulk", {"sizes": [view.nbytes for view in views]}, (), bulk)
    for view in views:
        for start in range(0, view.nbytes, PART_BYTES):
            yield _frame("part", {}, [view[start : start + PART_BYTES]], bulk)
    yield _frame(kind, fields, (), bulk)


def encode_again(frame: Frame) -> list[Piece]:
    return _frame(frame.kind, frame.fields, [memoryview(buffer) for buffer in frame.buffers], frame.bulk)


def to_bytes(kind: str, /, *buffers: Piece, **fields: Any) -> bytes:
    return b"".join(_frame(kind, fields, [memoryview(buffer).cast("B") for buffer in buffers]))


def from_bytes(data: Piece, check_header: Callable[[bytes], bytes] = bytes) -> Frame:
    """Inverse of `to_bytes`; the buffers are copies. Raises ValueError for anything else. `check_header` sees
    the header before it is parsed."""
    try:
        magic, length = _HEADER.unpack_from(data)
        start = _HEADER.size + length
        header = json.loads(check_header(bytes(data[_HEADER.size : start])))
        kind, fields, sizes = header["kind"], header["fields"], header["sizes"]
    except (struct.error, KeyError, TypeError, RecursionError) as exc:
        raise ValueError(f"no header of a frame: {exc}") from exc
    is_sized = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
    if magic != _MAGIC or not (isinstance(kind, str) and isinstance(fields, dict) and is_sized):
        raise ValueError("no header of a frame")
    if start + sum(sizes) != len(data):
        raise ValueError("the header does not match the buffers")
    buffers = []
    for size in sizes:
        buffers.append(bytes(data[start : start + size]))
        start += size
    return Frame(kind, fields, tuple(buffers))


def _frame(kind: str, fields: dict[str, Any], views: Sequence[memoryview], bulk: str = "") -> list[Piece]:
    header: dict[str, Any] = {"kind": kind, "fields": fields, "sizes": [view.nbytes for view in views]}
    if bulk:
        header["bulk"] = bulk
    text = json.dumps(header).encode()
    return [_HEADER.pack(_MAGIC, len(text)) + text, *(view for view in views if view.nbytes)]


def reading(max_header_bytes: int = _MAX_HEADER_BYTES) -> Generator[int, bytes, Frame]:
    """Read one frame: yields how many bytes it needs next, is sent exactly those, and returns the frame."""
    magic, length = _HEADER.unpack((yield _HEADER.size))
    if magic != _MAGIC or length > max_header_bytes:
        raise ChannelClosed("the other end sent something that is not a frame")
    try:
        header = json.loads((yield length))
        kind, fields, sizes = header["kind"], header["fields"], [int(size) for size in header["sizes"]]
        bulk = header.get("bulk", "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ChannelClosed("the other end sent a frame whose header cannot be read") from exc
    if not isinstance(fields, dict) or min(sizes, default=0) < 0 or sum(sizes) > PART_BYTES:
        raise ChannelClosed("the other end sent a frame with impossible sizes")
    buffers = []
    for size in sizes:
        buffers.append((yield size) if size else b"")
    return Frame(kind, fields, tuple(buffers), bulk)


class Joiner:
    """Joins the parts of messages, which may arrive interleaved."""

    def __init__(self) -> None:
        self._open: dict[str, _Bulk] = {}
        self.max_bytes: int | None = None  # of all parts together; None for any number

    def take(self, frame: Frame) -> Frame | None:
        """The message that this frame completes, or None if more of it is to come."""
        if not frame.bulk:
            return frame
        try:
            if frame.kind == "bulk":
                self._check(frame.fields["sizes"])
                self._open[frame.bulk] = _Bulk(frame.fields["sizes"])
                return None
            if frame.kind == "part":
                self._open[frame.bulk].add(frame.buffers[0])
                return None
            return replace(frame, buffers=self._open.pop(frame.bulk).buffers(), bulk="")
        except (KeyError, IndexError, ValueError, TypeError, MemoryError) as exc:
            raise ChannelClosed(f"the other end sent parts that do not fit together: {exc!r}") from exc

    def _check(self, sizes: Sequence[int]) -> None:
        """Memory is allocated as announced, so an untrusted end may not announce too much."""
        if self.max_bytes is None:
            return
        open_bytes = sum(sum(bulk.sizes) for bulk in self._open.values())
        total = open_bytes + sum(sizes)
        if len(self._open) > _MAX_OPEN or not 0 <= min(sizes, default=0) <= total <= self.max_bytes:
            raise ValueError(f"more than {self.max_bytes} bytes")


class _Bulk:
    """Buffers being filled one after the other. `BytesIO` gives its bytes away without a copy."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = [int(size) for size in sizes]
        self._files = [_reserved(size) for size in self.sizes]
        self._index = 0

    def add(self, data: bytes) -> None:
        while self._files[self._index].tell() == self.sizes[self._index]:
            self._index += 1
        if self._files[self._index].tell() + len(data) > self.sizes[self._index]:
            raise ValueError("more bytes than were announced")
        self._files[self._index].write(data)

    def buffers(self) -> tuple[bytes, ...]:
        if any(file.tell() != size for file, size in zip(self._files, self.sizes, strict=True)):
            raise ValueError("fewer bytes than were announced")
        return tuple(file.getvalue() for file in self._files)


def _reserved(size: int) -> io.BytesIO:
    file = io.BytesIO()
    if size:
        file.seek(size - 1)
        file.write(b"\0")
        file.seek(0)
    return file
