"""Arrow tables as streams of bytes."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        write_rows(writer, table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def write_rows(writer: Any, table: pa.Table) -> None:
    table = table.unify_dictionaries()
    if table.num_rows:
        writer.write_table(table)
        return
    # Categories travel with rows, so a table without any is written as a batch without any.
    columns = [c.chunk(0) if c.num_chunks else pa.array([], c.type) for c in table.columns]
    writer.write_batch(pa.RecordBatch.from_arrays([c.slice(0, 0) for c in columns], schema=table.schema))
