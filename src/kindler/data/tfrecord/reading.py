"""Reading files after a plan: what was asked for is checked first, and a plan travels to Spark's tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from kindler.data.tfrecord.decode import Sample, decode
from kindler.data.tfrecord.files import Compression, Paths, check_reading, find, opened
from kindler.data.tfrecord.framing import blocks
from kindler.data.tfrecord.schema import SchemaLike, as_schema, features
from kindler.errors import ConfigError, DataError

SAMPLE_ROWS = 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """What to read.

    Attributes:
        files: The files, in order.
        schema: The columns that are wanted.
        known: The names that records may have; None for any.
        compression: How the files are compressed.
        verify: Whether to check the data's checksums.
    """

    files: tuple[str, ...]
    schema: pa.Schema
    known: tuple[str, ...] | None
    compression: Compression
    verify: bool


def plan(
    path: Paths,
    schema: SchemaLike | None,
    columns: Sequence[str] | None,
    compression: Compression,
    verify: bool,
    binary: Collection[str],
    sample_rows: int | None,
) -> Plan:
    """See `kindler.tfrecord.read` for the arguments.

    Raises:
        ConfigError: No such file or column, or a schema that cannot be.
        DataError: The sample is damaged, or there is none.
    """
    if isinstance(columns, str) or isinstance(binary, str):
        raise ConfigError("columns and binary must be lists of names.\nHint: columns=['x'].")
    check_reading(compression)
    files = tuple(find(path))
    known = None
    if schema is not None:
        wanted = as_schema(schema)
    else:
        sample = sampled(list(files), compression, verify, binary, sample_rows)
        if not sample.names:
            raise DataError(
                f"no record in {_named(files)} has a feature, so the columns are unknown.\n"
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
    """The rows of one of the plan's files."""
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
    """The schema that the first records suggest."""
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


def _named(found: Sequence[str]) -> str:
    return found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} other files"
