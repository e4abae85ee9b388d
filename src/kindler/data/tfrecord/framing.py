"""TFRecord files: discovery, compression and framing of records.

    8 bytes   length of the data, little-endian
    4 bytes   masked CRC32C of the length
    n bytes   the data
    4 bytes   masked CRC32C of the data

`blocks` reads whole records in blocks, so that later stages work on many at once.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import posixpath
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from pyarrow import fs

from kindler.data.columns import Array
from kindler.data.paths import every_file, expand, file_system
from kindler.errors import ConfigError, DataError, MissingExtraError

HEAD = 12  # length and its checksum
AROUND = HEAD + 4  # and the data's checksum behind it
# Longer blocks fall out of the processor's cache between two passes over them.
_BLOCK_BYTES = 2 << 20
_PADDING = bytes(16)  # words are read at any byte of a record
_STREAK = 8  # so many records of one length are taken as a sign of more
_COPIED_BYTES = 4096  # below, a copy of a record costs less than a view of it
_LENGTH = struct.Struct("<Q")
_BAD_LENGTH = "the length does not match its checksum; the file is damaged, or not a TFRecord file."


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Block:
    """`data` ends with zeros; `offsets` has the records' places in the file if `data` was rewritten."""

    file: str
    data: bytes
    starts: Array
    sizes: Array
    first: int
    offset: int
    offsets: Array | None = None

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def array(self) -> Array:
        return np.frombuffer(self.data, np.uint8)

    def words(self, kind: str = "<u8") -> Any:
        """Overlapping numbers, one read at each byte."""
        count = len(self.data) - np.dtype(kind).itemsize + 1
        return np.ndarray((count,), kind, self.data, 0, (1,))

    def record(self, index: int) -> bytes:
        start = int(self.starts[index])
        return self.data[start : start + int(self.sizes[index])]

    def head(self, count: int) -> Block:
        if count >= len(self):
            return self
        offsets = None if self.offsets is None else self.offsets[:count]
        return replace(self, starts=self.starts[:count], sizes=self.sizes[:count], offsets=offsets)

    def error(self, index: int, problem: str, *, column: str | None = None) -> DataError:
        at = self.offset + int(self.starts[index]) - HEAD if self.offsets is None else self.offsets[index]
        return complaint(self.file, self.first + int(index), int(at), problem, column=column)


def complaint(file: str, number: int, offset: int, problem: str, *, column: str | None = None) -> DataError:
    error = DataError(f"record {number} of {file} (at byte {offset}): {problem}", column=column)
    error.row = number
    return error


def blocks(
    stream: Readable, file: str, *, verify: bool = True, block_bytes: int = _BLOCK_BYTES
) -> Iterator[Block]:
    """A longer record is a block of its own. Raises DataError for a wrong checksum or a truncated file."""
    held, number, offset, wanted = b"", 0, 0, block_bytes
    while True:
        fresh = _read(stream, wanted, file, number, offset)
        data = b"".join((held, fresh, _PADDING))
        stop = len(data) - len(_PADDING)
        starts, sizes, end = _walk(data, stop)
        block = Block(file, data, starts, sizes, number, offset)
        _check_lengths(block)
        held, number, offset = data[end:stop], number + len(block), offset + end
        if len(block):
            if verify:
                _check_data(block)
            yield block
        missing = _missing(held, file, number, offset)
        if not fresh:
            if held:
                problem = f"the file ends {missing} bytes before the record does; it is truncated."
                raise complaint(file, number, offset, problem)
            return
        # As much again as is held: a length that is wrong in spite of its checksum does not fill the memory.
        wanted = min(max(missing, block_bytes), max(len(held), block_bytes))


@cache
def checksum() -> Callable[[Any], int]:
    try:
        from google_crc32c import value
    except ModuleNotFoundError as exc:
        raise MissingExtraError(what="TFRecord files", package="google-crc32c", extra="tfrecord") from exc
    function: Callable[[Any], int] = value
    return function


def masked(checksums: Array) -> Array:
    """TFRecord's masking: rotate, and add a constant."""
    crc = checksums.astype(np.uint32, copy=False)
    turned: Array = (crc >> np.uint32(15)) | (crc << np.uint32(17))
    moved: Array = turned + np.uint32(0xA282EAD8)
    return moved


def length_checksums(sizes: Array) -> Array:
    crc = checksum()
    if len(sizes) and sizes[0] == sizes[-1] and (sizes == sizes[0]).all():
        only = np.array([crc(_LENGTH.pack(int(sizes[0])))], np.uint32)
        return np.broadcast_to(masked(only), sizes.shape)
    different, which = np.unique(sizes, return_inverse=True)
    sums = np.array([crc(_LENGTH.pack(size)) for size in different.tolist()], np.uint32)
    return masked(sums)[which]


def is_head(start: bytes) -> bool:
    if len(start) < HEAD:
        return False
    crc = masked(np.array([checksum()(start[:8])], np.uint32))[0]
    return int(crc) == int.from_bytes(start[8:HEAD], "little")


def _read(stream: Readable, wanted: int, file: str, number: int, offset: int) -> bytes:
    try:
        return stream.read(wanted)
    except (EOFError, zlib.error) as exc:
        raise complaint(file, number, offset, f"the compressed data is damaged or truncated: {exc}") from exc
    except OSError as exc:
        if type(exc).__name__ != "BadGzipFile":
            raise
        raise complaint(file, number, offset, f"the compressed data is damaged: {exc}") from exc


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
    stride = size + AROUND
    count = (stop - position) // stride
    lengths: Any = np.ndarray((count,), "<u8", data, position, (stride,))
    other = lengths != size
    first = int(np.argmax(other))
    return first if other[first] else count


def _check_lengths(block: Block) -> None:
    stored = block.words("<u4")[block.starts - 4]
    wrong = stored != length_checksums(block.sizes)
    if wrong.any():
        raise block.error(int(np.argmax(wrong)), _BAD_LENGTH)


def _check_data(block: Block) -> None:
    crc, data = checksum(), block.data
    starts, sizes = block.starts.tolist(), block.sizes.tolist()
    if len(data) // len(starts) < _COPIED_BYTES:
        sums = [crc(data[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    else:
        array = block.array
        sums = [crc(array[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    stored = block.words("<u4")[block.starts + block.sizes]
    wrong = stored != masked(np.array(sums, np.uint32))
    if wrong.any():
        raise block.error(int(np.argmax(wrong)), "the data does not match its checksum; the file is damaged.")


def _missing(held: bytes, file: str, number: int, offset: int) -> int:
    if len(held) < HEAD:
        return HEAD - len(held)
    if not is_head(held):
        raise complaint(file, number, offset, _BAD_LENGTH)
    size: int = _LENGTH.unpack_from(held)[0]
    return size + AROUND - len(held)


Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
Compression: TypeAlias = Literal["auto", "gzip"] | None

_GZIP_MAGIC = b"\x1f\x8b\x08"
_GZIP_LEVEL = 6  # zlib's own, as TensorFlow has it


def find(paths: Paths) -> list[str]:
    """Sorted within each path; folders at any depth, skipping names that start with "_" or "."."""
    places = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = [file for path in places for file in expand(os.fspath(path), every_file)]
    if not files:
        raise ConfigError(f"no file in {[os.fspath(path) for path in places]}.")
    return files


@contextlib.contextmanager
def opened(file: str, compression: Compression = "auto") -> Iterator[Readable]:
    check_compression(compression)
    system, path = file_system(file)
    with contextlib.ExitStack() as stack:
        raw: Any
        try:
            if isinstance(system, fs.LocalFileSystem):
                raw = stack.enter_context(open(path, "rb", buffering=0))
            else:
                raw = stack.enter_context(system.open_input_file(path))
        except FileNotFoundError:
            raise ConfigError(f"{file!r} does not exist.") from None
        if compression == "gzip" or (compression == "auto" and _is_gzip(raw)):
            raw = stack.enter_context(gzip.GzipFile(fileobj=raw, mode="rb"))
        yield raw


@contextlib.contextmanager
def written(file: str, compression: Compression) -> Iterator[Any]:
    system, path = file_system(file)
    with contextlib.ExitStack() as stack:
        raw: Any
        if isinstance(system, fs.LocalFileSystem):
            raw = stack.enter_context(open(path, "wb"))
        else:
            raw = stack.enter_context(system.open_output_stream(path))
        if compression == "gzip":
            # Without a time in it, the same rows give the same file.
            raw = stack.enter_context(
                gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0)
            )
        yield raw


def part_name(number: int, compression: Compression) -> str:
    check_compression(compression, ("gzip", None))
    return f"part-{number:05d}.tfrecord{'.gz' if compression else ''}"


def free(path: str, *, overwrite: bool) -> None:
    system, place = file_system(path)
    if not overwrite and system.get_file_info(place).type != fs.FileType.NotFound:
        raise ConfigError(f"{path!r} already exists.\nHint: overwrite=True replaces it.")


class staged:
    """Writes under a temporary name; renamed on success, else removed. Without rename (S3) it is a copy."""

    def __init__(self, path: str, *, folder: bool, overwrite: bool) -> None:
        self.path, self.folder, self.overwrite = path.rstrip("/") or path, folder, overwrite
        parent, name = posixpath.split(self.path)
        self.beside = posixpath.join(parent, f".{name}.{uuid.uuid4().hex[:12]}.tmp")

    def __enter__(self) -> str:
        self.begin()
        return self.beside

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()

    def begin(self) -> None:
        free(self.path, overwrite=self.overwrite)
        system, place = file_system(self.beside)
        system.create_dir(place if self.folder else posixpath.dirname(place) or ".", recursive=True)

    def commit(self) -> None:
        free(self.path, overwrite=self.overwrite)
        system, place = file_system(self.path)
        _, beside = file_system(self.beside)
        old = system.get_file_info(place)
        if old.type == fs.FileType.NotFound or (old.type == fs.FileType.File and not self.folder):
            system.move(beside, place)
            return
        aside = f"{beside}.old"
        system.move(place, aside)
        try:
            system.move(beside, place)
        except BaseException:
            system.move(aside, place)
            raise
        _delete(system, aside)

    def discard(self) -> None:
        system, beside = file_system(self.beside)
        with contextlib.suppress(OSError):
            _delete(system, beside)


def _delete(system: fs.FileSystem, path: str) -> None:
    kind = system.get_file_info(path).type
    if kind == fs.FileType.Directory:
        system.delete_dir(path)
    elif kind == fs.FileType.File:
        system.delete_file(path)


def check_compression(compression: Any, allowed: tuple[str | None, ...] = ("auto", "gzip", None)) -> None:
    if compression not in allowed:
        raise ConfigError(f"compression={compression!r}: must be one of {list(allowed)}.")


def _is_gzip(raw: Any) -> bool:
    start = raw.read(HEAD)
    raw.seek(0)
    # A record of 559,903 bytes starts with the same three bytes; its checksum tells.
    return bool(start.startswith(_GZIP_MAGIC)) and not is_head(start)
