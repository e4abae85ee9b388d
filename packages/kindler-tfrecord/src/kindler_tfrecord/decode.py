"""Decodes blocks of records to RecordBatches, and infers a schema from a sample of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import types

from kindler_tfrecord.examples import (
    Entries,
    MalformedError,
    UnusualError,
    Values,
    WrongKindError,
    canonical,
    entries,
    even,
    ragged,
)
from kindler_tfrecord.framing import Array, Block, Readable, blocks
from kindler_tfrecord.schema import (
    BYTES,
    FLOAT,
    INT64,
    KIND_NAMES,
    LENGTH,
    Feature,
    SchemaLike,
    as_schema,
    features,
)

_LEAVES = {BYTES: pa.binary(), FLOAT: pa.float32(), INT64: pa.int64()}
_DTYPES: dict[int, type[np.generic]] = {BYTES: np.uint8, FLOAT: np.float32, INT64: np.int64}
_HINT = "\nHint: pass schema={...}, or let more records say what it is with sample_rows=None (all of them)."


def read_batches(
    stream: Readable,
    schema: SchemaLike,
    *,
    name: str = "the stream",
    known: Collection[str] | None = None,
    verify: bool = True,
) -> Iterator[pa.RecordBatch]:
    """Batches of some megabytes; features that the schema does not name are left out.

    Args:
        stream: The content of a file, not compressed.
        schema: As for `as_schema`.
        name: What errors call the stream.
        known: The names that features may have; another one is an error. None allows any.
        verify: Whether to check the checksums of the data; those of the lengths are always checked.

    Raises:
        TFRecordError: The file is damaged, or a record does not fit the schema.
    """
    schema = as_schema(schema)
    wanted = features(schema)
    keys = None if known is None else frozenset(key.encode() for key in known)
    for block in blocks(stream, name, verify=verify):
        yield _decode(block, wanted, schema, keys)


def _decode(
    block: Block, wanted: list[Feature], schema: pa.Schema, known: Collection[bytes] | None
) -> pa.RecordBatch:
    try:
        columns = _columns(block, wanted, known)
        arrays = [_arrow(block, feature, columns.get(feature.key)) for feature in wanted]
    except UnusualError as unusual:
        return _decode(_usual(block, unusual.records), wanted, schema, known)
    if not wanted:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * len(block), pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _columns(block: Block, wanted: list[Feature], known: Collection[bytes] | None) -> dict[bytes, Values]:
    evenly = even(block, {feature.key: feature.kind for feature in wanted})
    if evenly is not None:
        first = block.head(1)
        _refuse_unknown(first, entries(first), known)
        return evenly
    listed = entries(block)
    _refuse_unknown(block, listed, known)
    columns: dict[bytes, Values] = {}
    for feature in wanted:
        try:
            column = ragged(block, listed, feature.key, feature.kind)
        except WrongKindError as wrong:
            raise block.error(
                wrong.record,
                f"its values are a {KIND_NAMES[wrong.kind]}, where {feature.field.type} needs a"
                f" {KIND_NAMES[feature.kind]}.{_HINT}",
                column=feature.name,
            ) from None
        if column is not None:
            columns[feature.key] = column[1]
    return columns


def _refuse_unknown(block: Block, listed: Entries, known: Collection[bytes] | None) -> None:
    """A feature that the sample lacked would be dropped silently."""
    if known is None:
        return
    unknown = np.ones(len(listed.record), bool)
    for key in known:
        unknown[listed.named(block, key)] = False
    if unknown.any():
        at = int(np.argmax(unknown))
        name = listed.names(block)[at].decode(errors="replace")
        raise block.error(
            int(listed.record[at]), f"has a feature {name!r}, which no record of the sample has.{_HINT}"
        )


def _usual(block: Block, unusual: Array) -> Block:
    records = block.records()
    for index in unusual.tolist():
        try:
            records[index] = canonical(records[index])
        except MalformedError as exc:
            raise block.error(index, f"is not a tf.train.Example: {exc}.") from exc
    return block.rewritten(records)


def _arrow(block: Block, feature: Feature, stored: Values | None) -> pa.Array:
    rows = len(block)
    values = stored or _nothing(feature.kind, rows)
    counts = np.broadcast_to(np.asarray(values.counts), (rows,))
    if feature.width not in (-1, 0):
        valid = counts > 0
    else:  # an empty list is a list
        valid = np.ones(rows, bool) if values.present is None else values.present
    if feature.width != -1 and (wrong := valid & (counts != feature.per_row)).any():
        at = int(np.argmax(wrong))
        allowed = "one value" if feature.width is None else f"{feature.width} values"
        raise block.error(
            at,
            f"has {counts[at]} values, where {feature.field.type} allows {allowed}.{_HINT}",
            column=feature.name,
        )
    if not feature.field.nullable and not valid.all():
        raise block.error(
            int(np.argmin(valid)),
            f"it is missing, and the schema does not allow that.{_HINT}",
            column=feature.name,
        )
    flat = _cast(block, feature, _leaves(feature, values, valid), counts)
    return _wrapped(feature, flat, counts, valid)


def _nothing(kind: int, rows: int) -> Values:
    sizes = np.empty(0, np.int64) if kind == BYTES else None
    return Values(np.zeros(rows, bool), 0, np.empty(0, _DTYPES[kind]), sizes)


def _leaves(feature: Feature, values: Values, valid: Array) -> pa.Array:
    """All values flat, with places for those of rows without any, unless such a row is a list of none."""
    flat, sizes, nulls = values.flat, values.sizes, None
    if feature.per_row > 0 and not valid.all():
        nulls = np.repeat(valid, feature.per_row)
        if sizes is None:
            flat = _with_gaps(flat, nulls)
        else:
            sizes = _with_gaps(sizes, nulls)
    data = pa.py_buffer(np.ascontiguousarray(flat))
    if sizes is None:
        return pa.Array.from_buffers(_LEAVES[feature.kind], len(flat), [_bits(nulls), data])
    return pa.Array.from_buffers(pa.binary(), len(sizes), [_bits(nulls), pa.py_buffer(_offsets(sizes)), data])


def _with_gaps(values: Array, filled: Array) -> Array:
    spread = np.zeros(len(filled), values.dtype)
    spread[filled] = values
    return spread


def _offsets(sizes: Array) -> Array:
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _bits(valid: Array | None) -> pa.Buffer | None:
    if valid is None or valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def _cast(block: Block, feature: Feature, flat: pa.Array, counts: Array) -> pa.Array:
    if flat.type == feature.leaf:
        return flat
    try:
        if types.is_float16(feature.leaf):
            nulls = flat.is_null().to_numpy(zero_copy_only=False)
            return pa.array(flat.to_numpy(zero_copy_only=False).astype(np.float16), mask=nulls)
        return flat.cast(feature.leaf)
    except pa.ArrowInvalid as exc:
        if types.is_string(feature.leaf) or types.is_large_string(feature.leaf):
            problem = "its bytes are not valid UTF-8."
            hint = f"\nHint: binary=[{feature.name!r}], or a schema that says binary."
        else:
            problem, hint = f"a value does not fit: {exc}.", "\nHint: a wider type in the schema."
        at = _first_that_fails(flat, feature.leaf)
        row = (
            at // feature.per_row if feature.per_row > 0 else np.searchsorted(np.cumsum(counts), at, "right")
        )
        raise block.error(int(row), problem + hint, column=feature.name) from exc


def _first_that_fails(flat: pa.Array, leaf: pa.DataType) -> int:
    low, high = 0, len(flat)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            flat.slice(low, middle - low).cast(leaf)
        except pa.ArrowInvalid:
            high = middle
        else:
            low = middle
    return low


def _wrapped(feature: Feature, flat: pa.Array, counts: Array, valid: Array) -> pa.Array:
    kind, rows = feature.field.type, len(counts)
    if feature.width is None:
        return flat
    storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    buffers = [_bits(valid)]
    if not types.is_fixed_size_list(storage):
        offsets = _offsets(counts)
        buffers.append(pa.py_buffer(offsets.astype(np.int64) if types.is_large_list(storage) else offsets))
    array = pa.Array.from_buffers(storage, rows, buffers, children=[flat])
    return pa.ExtensionArray.from_storage(kind, array) if storage is not kind else array


@dataclass(slots=True)
class _Seen:
    kind: int | None = None
    records: int = 0
    fewest: int = 1 << 62
    most: int = 0
    text: bool = True


class Sample:
    """Blocks whose schema is asked for; `binary` names columns that are bytes even if they look like text."""

    def __init__(self, binary: Collection[str] = ()) -> None:
        self._binary = frozenset(binary)
        self._seen: dict[str, _Seen] = {}
        self.records = 0

    def add(self, block: Block) -> None:
        try:
            listed = entries(block)
            columns = {key: self._column(block, listed, key) for key in set(listed.names(block))}
        except UnusualError as unusual:
            return self.add(_usual(block, unusual.records))
        for name, kind, values in columns.values():
            self._note(name, kind, values, len(block))
        self.records += len(block)
        return None

    def schema(self) -> pa.Schema:
        """Columns sorted by name; if all lists of one have the same length, it is in its metadata."""
        return pa.schema([self._field(name, seen) for name, seen in sorted(self._seen.items())])

    def _column(self, block: Block, listed: Entries, key: bytes) -> tuple[str, int, Values]:
        try:
            name = key.decode()
        except UnicodeDecodeError as exc:
            raise block.error(0, f"the name of a feature is not UTF-8: {exc}.") from exc
        before = self._seen.get(name)
        try:
            column = ragged(block, listed, key, before.kind if before else None)
        except WrongKindError as wrong:
            raise block.error(
                wrong.record,
                f"its values are a {KIND_NAMES[wrong.kind]}, where earlier records have another kind.",
                column=name,
            ) from None
        assert column is not None, "the name is one of the block's"
        return name, *column

    def _note(self, name: str, kind: int, values: Values, rows: int) -> None:
        seen = self._seen.setdefault(name, _Seen())
        counts = np.broadcast_to(np.asarray(values.counts), (rows,))
        filled = counts > 0
        if not filled.any():
            return
        seen.kind = kind
        seen.records += int(filled.sum())
        seen.most = max(seen.most, int(counts.max()))
        seen.fewest = min(seen.fewest, int(counts[filled].min()))
        if values.sizes is not None and seen.text and name not in self._binary:
            buffers = [None, pa.py_buffer(_offsets(values.sizes)), pa.py_buffer(values.flat)]
            try:
                pa.Array.from_buffers(pa.binary(), len(values.sizes), buffers).cast(pa.string())
            except pa.ArrowInvalid:
                seen.text = False

    def _field(self, name: str, seen: _Seen) -> pa.Field:
        if seen.kind is None:  # always empty: of all kinds bytes lose nothing
            return pa.field(name, pa.list_(pa.binary()))
        leaf = _LEAVES[seen.kind]
        if seen.kind == BYTES and seen.text and name not in self._binary:
            leaf = pa.string()
        nullable = seen.records < self.records
        if seen.fewest == seen.most == 1:
            return pa.field(name, leaf, nullable=nullable)
        metadata = {LENGTH: str(seen.most)} if seen.fewest == seen.most else None
        return pa.field(name, pa.list_(leaf), nullable=nullable, metadata=metadata)
