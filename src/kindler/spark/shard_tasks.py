"""What Spark's Python workers do with pieces of shards; see the table in `kindler.spark.shards`."""

from __future__ import annotations

import json
import pickle
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias

import pyarrow as pa

from kindler.data.arrow import stream
from kindler.data.shards import frames
from kindler.data.shards.backend import Cut, Work
from kindler.data.shards.codec import Info, Packed, from_chunks, from_table, joined, pack, to_chunks, unpack
from kindler.data.shards.source import columns_of
from kindler.engine.worker import describe
from kindler.spark.shard_frames import place, place_column
from kindler.spark.tasks import forget_zip_folders

SCHEMA = "shard long, source long, part int, kind string, about binary, payload binary"
ARROW = pa.schema(
    {
        "shard": pa.int64(),
        "source": pa.int64(),
        "part": pa.int32(),
        "kind": pa.string(),
        "about": pa.binary(),
        "payload": pa.binary(),
    }
)
_CHUNK_BYTES = 16 << 20
_TABLES = ("frame", "series", "arrays")


def not_null(kind: pa.DataType) -> pa.DataType:
    """Columns of nulls only become strings: Parquet and others take no null type."""
    return pa.string() if pa.types.is_null(kind) else kind


def without_nulls(table: pa.Table) -> pa.Table:
    return table.cast(pa.schema([pa.field(f.name, not_null(f.type)) for f in table.schema]))


def pieces_of(shard: int, packed: Packed, source: int = 0) -> Iterator[pa.RecordBatch]:
    for part, chunk in enumerate(to_chunks(packed)):
        about = pickle.dumps(packed.info) if part == 0 else None
        yield _piece(shard, source, part, packed.info.kind, about, chunk)


def tables(batches: Iterable[pa.RecordBatch], most: int | None) -> Iterator[pa.Table]:
    """Joins batches to tables of some more than `most` bytes, or to one."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            waiting.append(batch)
            size += batch.nbytes
        if most is not None and size > most:
            yield pa.Table.from_batches(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _piece(
    shard: int, source: int, part: int, kind: str, about: bytes | None, chunk: bytes
) -> pa.RecordBatch:
    values = (shard, source, part, kind, about, chunk)
    arrays = [pa.array([value], field.type) for value, field in zip(values, ARROW, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW)


def shards_in(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, int, Packed]]:
    forget_zip_folders()
    cells = (cell for batch in batches for cell in _cells(batch))
    for (shard, source), parts in groupby(cells, key=lambda cell: cell[0]):
        abouts: list[bytes] = []
        chunks = []
        for _, about, chunk in parts:
            abouts += [about] if about is not None else []
            chunks.append(chunk)
        yield shard, source, from_chunks(pickle.loads(abouts[0]), chunks)


def _parts_in(batches: Iterable[pa.RecordBatch]) -> Iterator[Packed]:
    """Yields tables part by part, so that no whole shard is held."""
    for batch in batches:
        payloads = batch.column("payload")
        for i, kind in enumerate(batch.column("kind").to_pylist()):
            if kind in _TABLES:
                yield from_table(pa.ipc.open_stream(payloads[i].as_buffer()).read_all(), kind)


def _cells(batch: pa.RecordBatch) -> Iterator[tuple[tuple[int, int], bytes | None, Any]]:
    shards, sources = batch.column("shard").to_pylist(), batch.column("source").to_pylist()
    abouts, payloads = batch.column("about").to_pylist(), batch.column("payload")
    for i, about in enumerate(abouts):
        yield (shards[i], sources[i]), about, payloads[i].as_buffer()


def _attempted(function: Callable[..., Packed], *arguments: Any) -> Packed:
    try:
        return function(*arguments)
    except Exception as exc:  # noqa: BLE001 - the edge of the task: raised again on the driver
        return _failed(exc)


def _failed(exc: BaseException) -> Packed:
    said = {**describe(exc), "host": socket.gethostname()}
    return Packed(Info("error", 0, name=json.dumps(said, default=str)), data=b"")


def same(number: int, packed: Packed) -> Packed:
    """For mapping that only renumbers shards."""
    return packed


Numbers: TypeAlias = dict[int, int]  # number of a shard in the frame -> its own


def map_shards(work: Work, numbers: Numbers, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """User errors are returned as values, so that Spark has no stack to print."""
    for shard, _, packed in shards_in(batches):
        yield from pieces_of(numbers[shard], _attempted(work, numbers[shard], packed))


def cut_shards(cut: Cut, numbers: Numbers, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for shard, _, packed in shards_in(batches):
        number = numbers[shard]
        try:
            for target, piece in cut(number, packed):
                yield from pieces_of(target, piece, number)
        except Exception as exc:  # noqa: BLE001 - the edge of the task: raised again on the driver
            yield from pieces_of(0, _failed(exc), number)


def combine(pairs: bool, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for shard, group in groupby(shards_in(batches), key=itemgetter(0)):
        pieces = [packed for _, _, packed in group]
        failed = next((piece for piece in pieces if piece.info.kind == "error"), None)
        join = _paired if pairs else joined
        yield from pieces_of(shard, failed or _attempted(join, pieces))


def _paired(pieces: Sequence[Packed]) -> Packed:
    return pack(tuple(map(unpack, pieces)))


def numbered_rows(
    schema: pa.Schema, numbers: Numbers, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    row = place_column(schema.names)
    for shard, _, packed in shards_in(batches):
        table = without_nulls(frames.conform(frames.plain(packed), schema))
        yield from table.append_column(row, place(numbers[shard], table.num_rows)).to_batches()


def frame_rows(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for part in _parts_in(batches):
        if part.info.rows:
            table = frames.conform(frames.plain(part, schema.names), schema)
            yield from without_nulls(table).to_batches()


def packed_rows(names: Sequence[str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for part in _parts_in(batches):
        if part.info.rows:
            stored = {column.name: column.stored for column in columns_of(part.info)}
            columns = {name: part.table.column(stored[name]).cast(pa.binary()) for name in names}
            yield from pa.table(columns).to_batches()


def encode(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    context = TaskContext.get()
    shard = context.partitionId() if context is not None else 0
    count, part, chunk = 0, 0, b""
    for whole in tables(batches, _CHUNK_BYTES // 2):
        table = whole.combine_chunks().rename_columns(schema.names).cast(schema)
        if part:
            yield _piece(shard, 0, part - 1, "frame", None, chunk)
        chunk = stream(table)
        count, part = count + table.num_rows, part + 1
    if part:
        about = pickle.dumps(Info("frame", count, name="DataFrame", schema=schema))
        yield _piece(shard, 0, part - 1, "frame", about, chunk)


def rows_of_element(pair: tuple[Any, int]) -> Iterator[tuple[Any, ...]]:
    thing, number = pair
    packed = pack(thing)
    for part, chunk in enumerate(to_chunks(packed)):
        about = bytearray(pickle.dumps(packed.info)) if part == 0 else None
        yield number, 0, part, packed.info.kind, about, bytearray(chunk)
