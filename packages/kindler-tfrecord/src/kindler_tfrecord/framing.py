"""Records in a TFRecord file, and gzip around it.

    8 bytes   length of the data, little-endian
    4 bytes   masked CRC32C of the length
    n bytes   the data
    4 bytes   masked CRC32C of the data

`blocks` reads whole records in blocks, so that later stages work on many at once.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from google_crc32c import value as crc32c

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Compression: TypeAlias = Literal["auto", "gzip"] | None

HEAD = 12  # length and its checksum
AROUND = HEAD + 4  # and the data's checksum behind it
# Longer blocks fall out of the processor's cache between two passes over them.
_BLOCK_BYTES = 2 << 20
_PADDING = bytes(16)  # words are read at any byte of a record
_STREAK = 8  # so many records of one length are taken as a sign of more
_COPIED_BYTES = 4096  # below, a copy of a record costs less than a view of it
_LENGTH = struct.Struct("<Q")
_BAD_LENGTH = "the length does not match its checksum; the file is damaged, or not a TFRecord file."
_GZIP_MAGIC = b"\x1f\x8b\x08"


class TFRecordError(ValueError):
    """A damaged file, or a record or a value that does not fit.

    Attributes:
        column: The column's name, or None.
        row: The number of the record in its file, or of the row that is written; None for a whole column.
    """

    def __init__(self, text: str, *, column: str | None = None, row: int | str | None = None) -> None:
        super().__init__(text)
        self.column, self.row = column, row


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Block:
    """`data` ends with zeros; `places` are the records' places in the file, whose record `first` is."""

    file: str
    data: bytes
    starts: Array
    sizes: Array
    places: Array
    first: int

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def array(self) -> Array:
        return np.frombuffer(self.data, np.uint8)

    def words(self, kind: str = "<u8") -> Any:
        """Overlapping numbers, one read at each byte."""
        count = len(self.data) - np.dtype(kind).itemsize + 1
        return np.ndarray((count,), kind, self.data, 0, (1,))

    def records(self) -> list[bytes]:
        pairs = zip(self.starts.tolist(), self.sizes.tolist(), strict=True)
        return [self.data[start : start + size] for start, size in pairs]

    def head(self, count: int) -> Block:
        if count >= len(self):
            return self
        return replace(self, starts=self.starts[:count], sizes=self.sizes[:count], places=self.places[:count])

    def rewritten(self, records: Sequence[bytes]) -> Block:
        around = bytes(AROUND)
        sizes = np.array([len(record) for record in records], np.int64)
        starts = np.cumsum(sizes + AROUND) - sizes
        return replace(self, data=around + around.join(records) + around, starts=starts, sizes=sizes)

    def error(self, index: int, problem: str, *, column: str | None = None) -> TFRecordError:
        error = _error(self.file, self.first + int(index), int(self.places[index]), problem)
        return (
            error
            if column is None
            else TFRecordError(f"column {column!r}: {error}", column=column, row=error.row)
        )


def _error(file: str, number: int, place: int, problem: str) -> TFRecordError:
    return TFRecordError(f"record {number} of {file} (at byte {place}): {problem}", row=number)


def blocks(
    stream: Readable, name: str, *, verify: bool = True, block_bytes: int = _BLOCK_BYTES
) -> Iterator[Block]:
    """Blocks of whole records, at least one each; raises TFRecordError for damage."""
    rest, number, place, wanted = b"", 0, 0, block_bytes
    while True:
        try:
            fresh = stream.read(wanted)
        except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
            raise _error(name, number, place, f"the compressed data is damaged or truncated: {exc}") from exc
        data = b"".join((rest, fresh, _PADDING))
        stop = len(data) - len(_PADDING)
        starts, sizes, end = _walk(data, stop)
        block = Block(name, data, starts, sizes, starts + (place - HEAD), number)
        _check(block, block.starts - 4, length_checksums(sizes), _BAD_LENGTH)
        rest, number, place = data[end:stop], number + len(block), place + end
        if len(block):
            if verify:
                problem = "the data does not match its checksum; the file is damaged."
                _check(block, starts + sizes, data_checksums(data, starts, sizes), problem)
            yield block
        missing = HEAD - len(rest)
        if missing <= 0:
            if not _is_head(rest):
                raise _error(name, number, place, _BAD_LENGTH)
            missing = _LENGTH.unpack_from(rest)[0] + AROUND - len(rest)
        if not fresh:
            if rest:
                problem = f"the file ends {missing} bytes before the record does; it is truncated."
                raise _error(name, number, place, problem)
            return
        # As much again as is there: a length that is wrong in spite of its checksum does not fill the memory.
        wanted = min(max(missing, block_bytes), max(len(rest), block_bytes))


def records(stream: Readable, name: str) -> Iterator[bytes]:
    for block in blocks(stream, name):
        yield from block.records()


def framed(record: bytes) -> bytes:
    length = _LENGTH.pack(len(record))
    sums = masked(np.array([crc32c(length), crc32c(record)], "<u4")).tobytes()
    return b"".join((length, sums[:4], record, sums[4:]))


def decompressed(file: Any, compression: Compression = "auto") -> Any:
    """The content of an open file; "auto" recognises gzip by its first bytes."""
    if compression == "auto":
        start = file.read(HEAD)
        file.seek(0)
        # A record of 559,903 bytes starts with the same three bytes; its checksum tells.
        compression = "gzip" if start.startswith(_GZIP_MAGIC) and not _is_head(start) else None
    return gzip.GzipFile(fileobj=file, mode="rb") if compression == "gzip" else file


def masked(checksums: Array) -> Array:
    """TFRecord's masking: rotate, and add a constant."""
    turned: Array = (checksums >> np.uint32(15)) | (checksums << np.uint32(17))
    moved: Array = turned + np.uint32(0xA282EAD8)
    return moved


def length_checksums(sizes: Array) -> Array:
    if len(sizes) and sizes[0] == sizes[-1] and (sizes == sizes[0]).all():
        only = np.array([crc32c(_LENGTH.pack(int(sizes[0])))], np.uint32)
        return np.broadcast_to(masked(only), sizes.shape)
    different, which = np.unique(sizes, return_inverse=True)
    sums = np.array([crc32c(_LENGTH.pack(size)) for size in different.tolist()], np.uint32)
    return masked(sums)[which]


def data_checksums(data: bytes, starts: Array, sizes: Array) -> Array:
    source: Any = data if len(data) // len(starts) < _COPIED_BYTES else np.frombuffer(data, np.uint8)
    pairs = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
    return masked(np.array([crc32c(source[start:stop]) for start, stop in pairs], np.uint32))


def _check(block: Block, at: Array, checksums: Array, problem: str) -> None:
    wrong = block.words("<u4")[at] != checksums
    if wrong.any():
        raise block.error(int(np.argmax(wrong)), problem)


def _is_head(start: bytes) -> bool:
    return len(start) >= HEAD and masked(np.array([crc32c(start[:8])], "<u4")).tobytes() == start[8:HEAD]


def _walk(data: bytes, stop: int) -> tuple[Array, Array, int]:
    """(starts, sizes, end) of the whole records before `stop`."""
    position, streak, last = 0, 0, -1
    pieces: list[Array] = []
    starts: list[int] = []
    read = _LENGTH.unpack_from
    while position + HEAD <= stop:
        size = read(data, position)[0]
        if size > stop - position - AROUND:
            break
        streak = streak + 1 if size == last else 0
        last = size
        if streak == _STREAK:
            run = _equal(data, position, stop, size)
            pieces += [
                np.array(starts, np.int64),
                position + np.arange(run, dtype=np.int64) * (size + AROUND),
            ]
            starts, streak = [], 0
            position += run * (size + AROUND)
        else:
            starts.append(position)
            position += size + AROUND
    heads = np.concatenate([*pieces, np.array(starts, np.int64)])
    return heads + HEAD, np.diff(heads, append=position) - AROUND, position


def _equal(data: bytes, position: int, stop: int, size: int) -> int:
    """How many records from here have this length."""
    stride = size + AROUND
    count = (stop - position) // stride
    lengths: Any = np.ndarray((count,), "<u8", data, position, (stride,))
    other = lengths != size
    first = int(np.argmax(other))
    return first if other[first] else count
