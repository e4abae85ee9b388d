"""How fast do rows of Parquet become tensors in the workers: directly, through Spark, with pyarrow alone?

60,000 rows of 784 float32 in one file; two workers. A side is done when every value has been read once
from the torch tensors that hold it. Spark's two sides are timed from the driver's first look at the frame,
less what a gang without data takes. Against pyarrow it is the workers' own clock: two workers and two
threads of pyarrow on two cores, and one worker and one thread of pyarrow, each bound to one core.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from _bench import ROWS, WIDTH, Report, arguments, rounds, seconds, spark_session, workplace, write_rows

CORES = 2


def main() -> None:
    given = arguments(__doc__, repeats=7)
    count = 4_000 if given.quick else ROWS
    report = Report("ingest", f"{count:,} x {WIDTH} float32 of Parquet to worker tensors", quick=given.quick)
    with workplace() as folder:
        path = write_rows(folder / "rows.parquet", count)
        spark = spark_session(CORES)
        frame = spark.read.parquet(str(path))
        measured = rounds(
            {
                "empty": lambda: through_spark(spark, None, "auto")[0],
                "direct": lambda: through_spark(spark, frame, "direct")[0],
                "inline": lambda: through_spark(spark, frame, "inline")[0],
                "open on 2 cores": lambda: locally(path, CORES, pinned=False),
                "pyarrow on 2 cores": lambda: in_child(path, CORES, pinned=False),
                "open on 1 core": lambda: locally(path, 1, pinned=True),
                "pyarrow on 1 core": lambda: in_child(path, 1, pinned=True),
            },
            repeats=given.repeats,
            warm_up=not given.quick,
        )
    megabytes = count * WIDTH * 4 / 1e6
    empty = median(measured["empty"])
    direct, inline = ([max(s - empty, 1e-3) for s in measured[name]] for name in ("direct", "inline"))
    report.figure("gang without data", measured["empty"], "s")
    report.figure("direct, Spark gang", [megabytes / s for s in direct], "MB/s")
    report.figure("inline, Spark gang", [megabytes / s for s in inline], "MB/s")
    for name in ("open on 2 cores", "pyarrow on 2 cores", "open on 1 core", "pyarrow on 1 core"):
        report.figure(name, [megabytes / s for s in measured[name]], "MB/s")
    report.ratio("direct / inline", inline, direct, at_least=5.0)
    report.ratio("direct / inline, gang included", measured["inline"], measured["direct"])
    for cores in ("2 cores", "1 core"):
        name = f"direct / pyarrow, {cores}"
        report.ratio(name, measured[f"pyarrow on {cores}"], measured[f"open on {cores}"], at_least=0.6)
    report.finish(rows=count, megabytes=megabytes)


def through_spark(spark: Any, frame: Any, ingest: Any) -> tuple[float, float]:
    """Seconds until two workers of a Spark gang have their tensors, and of it those in the workers."""
    from kindler.data.column_options import ColumnOptions
    from kindler.data.row_order import RowAssignment
    from kindler.estimator.inputs.contract import SourceRequest
    from kindler.estimator.inputs.recognise import recognise
    from kindler.spark import engine

    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        source, feed = None, None
        if frame is not None:
            request = SourceRequest(
                name="data",
                columns=ColumnOptions(feature_cols="features", label_cols="label"),
                spark=spark,
                ingest=ingest,
                scratch=Path(folder),
            )
            source, feed = recognise(frame).source(request)
        feeds = [feed] if feed is not None else []
        outcomes = engine.run(
            _job(source, CORES),
            spark=spark,
            feeds=feeds,
            dealing=RowAssignment.between(CORES, seed=0),
            listener=lambda event: None,
        )
    told = [json.loads(outcome.buffers[0]) for outcome in outcomes]
    return max(t["ready"] for t in told) - started, max(t["seconds"] for t in told)


def locally(path: Path, workers: int, *, pinned: bool) -> float:
    """Seconds in the workers of a local gang, without the gang's start."""
    from kindler.data import parquet
    from kindler.data.sources import parquet_source
    from kindler.engine import local

    source = parquet_source(parquet.inspect(path))
    outcomes = local.run(_job(source, workers, pinned=pinned), listener=lambda event: None)
    return max(json.loads(outcome.buffers[0])["seconds"] for outcome in outcomes)


def in_child(path: Path, threads: int, *, pinned: bool) -> float:
    """Seconds of the plain read, in a process of its own as the workers are."""
    from kindler.engine import local

    outcomes = local.run(
        _job(None, 1, pinned=pinned, pyarrow=(str(path), threads)), listener=lambda event: None
    )
    return float(json.loads(outcomes[0].buffers[0])["seconds"])


def _job(source: Any, size: int, *, pinned: bool = False, pyarrow: tuple[str, int] | None = None) -> Any:
    import cloudpickle

    from kindler.engine.job import Job, equal_ranks

    return Job(
        ranks=equal_ranks("ingest:work", size),
        buffers=(cloudpickle.dumps(source), json.dumps({"pinned": pinned, "pyarrow": pyarrow}).encode()),
        preload=("torch",),
        threads=1,
    )


def work(worker: Any, source_bytes: bytes, options_bytes: bytes) -> list[bytes]:
    """In each worker: open the source (or read with pyarrow), read every value once."""
    import cloudpickle
    import pyarrow.parquet  # noqa: F401 (importing is not reading)
    import torch

    source, options = cloudpickle.loads(source_bytes), json.loads(options_bytes)
    cores = os.sched_getaffinity(0)
    if options["pinned"]:
        os.sched_setaffinity(0, {min(cores)})
    torch.set_num_threads(1)
    torch.zeros(8).sum()
    worker.barrier()
    if options["pyarrow"] is not None:
        path, threads = options["pyarrow"]
        torch.set_num_threads(threads)
        _import_for_plain_read()
        spent = seconds(partial(_read_plainly, path, threads))
    elif source is not None:
        spent = seconds(lambda: _read(_part(source, worker)))
    else:
        spent = 0.0
    return [json.dumps({"ready": time.time(), "seconds": spent}).encode()]


def _part(source: Any, worker: Any) -> list[Any]:
    """The arrays of this worker's spool; of one that has the rows of all workers, an even part."""
    from kindler.data.row_order import RowAssignment

    spool = source.open(worker, RowAssignment.between(worker.size, seed=0))
    parts = []
    for array in spool.arrays.values():
        whole = len(array) > spool.rows
        start, stop = (len(array) * (worker.rank + i) // worker.size for i in (0, 1))
        parts.append(array[start:stop] if whole else array)
    return parts


def _import_for_plain_read() -> None:
    """What pyarrow imports at its first read and first conversion (pandas), so that it is not timed."""
    import pyarrow as pa
    import pyarrow.dataset

    pa.array([1]).to_numpy()


def _read_plainly(path: str, threads: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(threads)
    table = pq.read_table(path, columns=["features", "label"], use_threads=threads > 1)
    for chunk in table.column("features").chunks:
        _read([chunk.flatten().to_numpy().reshape(len(chunk), WIDTH)])
    _read([chunk.to_numpy() for chunk in table.column("label").chunks])


def _read(arrays: Any) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mapped arrays are read-only, and so is what is done with them
        for array in arrays:
            torch.from_numpy(array).sum()


if __name__ == "__main__":
    main()
