"""Decodes blocks of records to RecordBatches, and infers a schema from a sample."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from kindler.data.columns import Array
from kindler.data.tfrecord.examples import (
    Entries,
    Malformed,
    Unusual,
    Values,
    WrongKind,
    canonical,
    entries,
    even,
    ragged,
)
from kindler.data.tfrecord.framing import (
    AROUND,
    HEAD,
    Block,
    Compression,
    Paths,
    blocks,
    check_compression,
    find,
    opened,
)
from kindler.data.tfrecord.schema import (
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
from kindler.errors import ConfigError, DataError

_DTYPES: dict[int, Any] = {BYTES: np.uint8, FLOAT: np.float32, INT64: np.int64}
_LEAVES = {BYTES: pa.binary(), FLOAT: pa.float32(), INT64: pa.int64()}
_HINT = "\nHint: pass schema={...}, or let more records say what it is with sample_rows=None (all of them)."


def decode(
    block: Block, wanted: list[Feature], schema: pa.Schema, known: Collection[bytes] | None
) -> pa.RecordBatch:
    """`known` lists the feature names that records may have; None allows any."""
    try:
        columns = _columns(block, wanted, known)
        arrays = [_arrow(block, feature, columns.get(feature.key)) for feature in wanted]
    except Unusual as unusual:
        return decode(_usual(block, unusual.records), wanted, schema, known)
    if not wanted:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * len(block), pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _columns(block: Block, wanted: list[Feature], known: Collection[bytes] | None) -> dict[bytes, Values]:
    kinds = {feature.key: feature.kind for feature in wanted}
    try:
        evenly = even(block, kinds)
    except WrongKind:
        evenly = None  # the other way says which column it is
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
        except WrongKind as wrong:
            raise block.error(
                wrong.record,
                f"its values are a {KIND_NAMES[wrong.found]}, where {feature.field.type} needs a"
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
    strange = np.ones(len(listed.record), bool)
    for name in known:
        strange[listed.named(block, name)] = False
    if strange.any():
        at = int(np.argmax(strange))
        start = int(listed.key[at])
        stranger = block.data[start : start + int(listed.key_size[at])].decode(errors="replace")
        raise block.error(
            int(listed.record[at]), f"has a feature {stranger!r}, which no record of the sample has.{_HINT}"
        )


def _usual(block: Block, records: Array) -> Block:
    pieces: list[bytes] = []
    again = set(records.tolist())
    for index in range(len(block)):
        record = block.record(index)
        if index in again:
            try:
                record = canonical(record)
            except Malformed as exc:
                raise block.error(index, f"is not a tf.train.Example: {exc}.") from exc
        pieces.append(record)
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    offsets = block.offset + block.starts - HEAD if block.offsets is None else block.offsets
    around = bytes(AROUND)
    starts = np.cumsum(sizes + AROUND) - sizes
    data = around + around.join(pieces) + around
    return replace(block, data=data, starts=starts, sizes=sizes, offsets=offsets)


def _arrow(block: Block, feature: Feature, stored: Values | None) -> pa.Array:
    rows = len(block)
    values = stored or Values(np.zeros(rows, bool), 0, np.empty(0, _DTYPES[feature.kind]), 0)
    counts = np.broadcast_to(np.asarray(values.counts), (rows,))
    if feature.width not in (-1, 0):
        valid = counts > 0
    else:  # an empty list is a list
        valid = np.ones(rows, bool) if values.present is None else values.present
    _check_counts(block, feature, counts, valid)
    if not feature.field.nullable and not valid.all():
        raise block.error(
            int(np.argmin(valid)),
            f"it is missing, and the schema does not allow that.{_HINT}",
            column=feature.name,
        )
    flat = _cast(block, feature, _leaves(feature, values, counts, valid), counts, valid)
    return _wrapped(feature, flat, counts, valid)


def _check_counts(block: Block, feature: Feature, counts: Array, valid: Array) -> None:
    if feature.width == -1:
        return
    width = 1 if feature.width is None else feature.width
    wrong = valid & (counts != width)
    if wrong.any():
        at = int(np.argmax(wrong))
        allowed = "one value" if feature.width is None else f"{width} values"
        raise block.error(
            at,
            f"has {counts[at]} values, where {feature.field.type} allows {allowed}.{_HINT}",
            column=feature.name,
        )


def _leaves(feature: Feature, values: Values, counts: Array, valid: Array) -> pa.Array:
    width = 1 if feature.width is None else feature.width
    roomy = width > 0 and not valid.all()
    if feature.kind == BYTES:
        total = int(counts.sum())
        sizes = np.broadcast_to(np.asarray(values.sizes, np.int64), (total,))
        if roomy:
            spread = np.zeros((len(valid), width), np.int64)
            spread[valid] = sizes.reshape(-1, width)
            sizes = spread.reshape(-1)
        nulls = np.repeat(valid, width) if roomy else None
        return _binary(sizes, values.flat, nulls)
    flat = values.flat
    if not roomy:
        return _numbers(flat)
    full = np.zeros((len(valid), width), flat.dtype)
    full[valid] = flat.reshape(-1, width)
    return _numbers(full.reshape(-1), np.repeat(valid, width))


def _numbers(flat: Array, valid: Array | None = None) -> pa.Array:
    kind = pa.int64() if flat.dtype.kind == "i" else pa.float32()
    return pa.Array.from_buffers(kind, len(flat), [_bits(valid), pa.py_buffer(np.ascontiguousarray(flat))])


def _binary(sizes: Array, flat: Array, valid: Array | None) -> pa.Array:
    buffers = [_bits(valid), pa.py_buffer(_offsets(sizes)), pa.py_buffer(np.ascontiguousarray(flat))]
    return pa.Array.from_buffers(pa.binary(), len(sizes), buffers)


def _offsets(sizes: Array) -> Array:
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _bits(valid: Array | None) -> pa.Buffer | None:
    if valid is None or valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def _cast(block: Block, feature: Feature, flat: pa.Array, counts: Array, valid: Array) -> pa.Array:
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
        row = _first_that_fails(feature, flat, counts, valid)
        raise block.error(row, problem + hint, column=feature.name) from exc


def _first_that_fails(feature: Feature, flat: pa.Array, counts: Array, valid: Array) -> int:
    low, high = 0, len(flat)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            flat.slice(low, middle - low).cast(feature.leaf)
        except pa.ArrowInvalid:
            high = middle
        else:
            low = middle
    if feature.width is None or feature.width > 0:
        return low // (feature.width or 1)
    return int(np.searchsorted(np.cumsum(counts), low, side="right"))


def _wrapped(feature: Feature, flat: pa.Array, counts: Array, valid: Array) -> pa.Array:
    kind, rows = feature.field.type, len(counts)
    if feature.width is None:
        return flat
    storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if types.is_fixed_size_list(storage):
        array = pa.Array.from_buffers(storage, rows, [_bits(valid)], children=[flat])
    else:
        offsets = _offsets(counts)
        wide = offsets.astype(np.int64) if types.is_large_list(storage) else offsets
        array = pa.Array.from_buffers(storage, rows, [_bits(valid), pa.py_buffer(wide)], children=[flat])
    return pa.ExtensionArray.from_storage(kind, array) if storage is not kind else array


@dataclass(slots=True)
class _Seen:
    kind: int | None = None
    records: int = 0
    fewest: int = 1 << 62
    most: int = 0
    text: bool = True


class Sample:
    def __init__(self, binary: Collection[str] = ()) -> None:
        self._binary = frozenset(binary)
        self._seen: dict[str, _Seen] = {}
        self.records = 0

    def add(self, block: Block) -> None:
        try:
            listed = entries(block)
            names = self._names(block, zip(listed.key.tolist(), listed.key_size.tolist(), strict=True))
            columns = {name: self._column(block, listed, name, key) for key, name in names.items()}
        except Unusual as unusual:
            return self.add(_usual(block, unusual.records))
        for name, (kind, values) in columns.items():
            self._note(name, kind, values, len(block))
        self.records += len(block)
        return None

    def schema(self) -> pa.Schema:
        fields = [self._field(name, seen) for name, seen in sorted(self._seen.items())]
        return pa.schema(fields)

    def _names(self, block: Block, spans: Iterable[tuple[int, int]]) -> Mapping[bytes, str]:
        keys = {block.data[start : start + size] for start, size in spans}
        try:
            return {key: key.decode() for key in keys}
        except UnicodeDecodeError as exc:
            raise block.error(0, f"the name of a feature is not UTF-8: {exc}.") from exc

    def _column(self, block: Block, listed: Entries, name: str, key: bytes) -> tuple[int, Values]:
        before = self._seen.get(name)
        kind = before.kind if before else None
        try:
            column = ragged(block, listed, key, kind)
        except WrongKind as wrong:
            raise block.error(
                wrong.record,
                f"its values are a {KIND_NAMES[wrong.found]}, where earlier records have another kind.",
                column=name,
            ) from None
        assert column is not None, "the name is one of the block's"
        return column

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
        if kind == BYTES and seen.text and name not in self._binary:
            seen.text = _is_text(_binary(np.asarray(values.sizes), values.flat, None))

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


def _is_text(values: pa.Array) -> bool:
    try:
        pc.cast(values, pa.string())
    except pa.ArrowInvalid:
        return False
    return True


SAMPLE_ROWS = 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """What to read; `known` lists the feature names that records may have, None allows any."""

    files: tuple[str, ...]
    schema: pa.Schema
    known: tuple[str, ...] | None
    compression: Compression
    verify: bool


class ReadOptions(TypedDict, total=False):
    """Arguments of `kindler.tfrecord.read`, except the schema."""

    columns: Sequence[str] | None
    compression: Compression
    verify: bool
    binary: Collection[str]
    sample_rows: int | None


def plan(
    path: Paths,
    schema: SchemaLike | None = None,
    *,
    columns: Sequence[str] | None = None,
    compression: Compression = "auto",
    verify: bool = True,
    binary: Collection[str] = (),
    sample_rows: int | None = SAMPLE_ROWS,
) -> Plan:
    if isinstance(columns, str) or isinstance(binary, str):
        raise ConfigError("columns and binary must be lists of names.\nHint: columns=['x'].")
    check_compression(compression)
    files = tuple(find(path))
    known = None
    if schema is not None:
        wanted = as_schema(schema)
    else:
        sample = sampled(list(files), compression, verify, binary, sample_rows)
        if not sample.names:
            others = f" and {len(files) - 1} other files" if len(files) > 1 else ""
            raise DataError(
                f"no record in {files[0]}{others} has a feature, so the columns are unknown.\n"
                "Hint: pass schema={...}."
            )
        known = tuple(sample.names)
        wanted = pa.schema([field.with_nullable(True) for field in sample])
    if columns is not None:
        missing = [name for name in columns if name not in wanted.names]
        if missing:
            raise ConfigError(f"columns={list(columns)}: {missing} are not among {wanted.names}.")
        wanted = pa.schema([wanted.field(name) for name in columns])
    return Plan(files, wanted, known, compression, verify)


def batches(planned: Plan, file: str) -> Iterator[pa.RecordBatch]:
    wanted = features(planned.schema)
    known = None if planned.known is None else frozenset(name.encode() for name in planned.known)
    with opened(file, planned.compression) as stream:
        for block in blocks(stream, file, verify=planned.verify):
            yield decode(block, wanted, planned.schema, known)


def sampled(
    files: Sequence[str],
    compression: Compression,
    verify: bool,
    binary: Collection[str],
    sample_rows: int | None,
) -> pa.Schema:
    if sample_rows is not None and sample_rows < 1:
        raise ConfigError(f"sample_rows={sample_rows}: must be at least 1, or None for all.")
    sample = Sample(binary)
    for file in files:
        with opened(file, compression) as stream:
            for block in blocks(stream, file, verify=verify):
                sample.add(block if sample_rows is None else block.head(sample_rows - sample.records))
                if sample_rows is not None and sample.records >= sample_rows:
                    return sample.schema()
    return sample.schema()
