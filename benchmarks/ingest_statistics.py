"""What do the statistics of training data cost while the workers read it?

Parquet files, read by two workers of a local gang with and without statistics in turn, in the same processes.
The time is that of the slower worker, from the first look at the files to the end of the exchange.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from _bench import Report, arguments, workplace

WORKERS = 2


def main() -> None:
    given = arguments(__doc__, repeats=15)
    report = Report("ingest_statistics", "reading Parquet with and without statistics", quick=given.quick)
    shapes = {"2,000,000 rows of 20 columns": (2_000_000, 20, 1), "60,000 rows of 784": (60_000, 1, 784)}
    if given.quick:
        shapes = {"20,000 rows of 20 columns": (20_000, 20, 1)}
    with workplace() as folder:
        for name, (rows, columns, width) in shapes.items():
            with_, without = opened(written(folder, rows, columns, width), given.repeats)
            report.figure(f"{name}, without", without, "s")
            report.figure(f"{name}, with", with_, "s")
            report.ratio(f"{name}, with / without", with_, without, at_most=1.03)
    report.finish()


def written(folder: Path, rows: int, columns: int, width: int) -> Path:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = np.random.default_rng(0)
    path = folder / f"{rows}-{columns}-{width}.parquet"
    drawn = [pa.array(draw.standard_normal(rows * width, np.float32)) for _ in range(columns)]
    if width > 1:
        drawn = [pa.FixedSizeListArray.from_arrays(one, width) for one in drawn]
    pq.write_table(pa.table({f"c{i}": one for i, one in enumerate(drawn)}), path)
    return path


def opened(path: Path, repeats: int) -> tuple[list[float], list[float]]:
    import cloudpickle
    import pyarrow.parquet as pq

    from kindler.data import parquet
    from kindler.data.column_options import ColumnOptions
    from kindler.data.sources import parquet_source
    from kindler.engine import local
    from kindler.engine.job import Job, equal_ranks

    names = pq.read_schema(path).names
    source = parquet_source(
        parquet.inspect(path), ColumnOptions(feature_cols=names, label_cols=[], need_labels=False)
    )
    buffers = (cloudpickle.dumps(source), json.dumps(repeats).encode())
    job = Job(ranks=equal_ranks("ingest_statistics:work", WORKERS), buffers=buffers, threads=1)
    outcomes = local.run(job, listener=lambda event: None)
    told = [json.loads(outcome.buffers[0]) for outcome in outcomes]
    with_, without = ([max(both) for both in zip(*(t[key] for t in told), strict=True)] for key in "10")
    return with_, without


def work(worker: Any, source_bytes: bytes, repeats: bytes) -> list[bytes]:
    import cloudpickle

    from kindler.data.row_order import RowAssignment
    from kindler.train.rows import statistics_of

    source = cloudpickle.loads(source_bytes)
    seconds: dict[str, list[float]] = {"0": [], "1": []}
    for turn in range(2 * json.loads(repeats) + 2):
        worker.barrier()
        began = time.perf_counter()
        spool = source.open(worker, RowAssignment.between(worker.size, seed=0))
        if turn % 2:
            statistics_of(worker, spool, 0)
        worker.barrier()
        if turn > 1:
            seconds[str(turn % 2)].append(time.perf_counter() - began)
    return [json.dumps(seconds).encode()]


if __name__ == "__main__":
    main()
