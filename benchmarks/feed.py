"""How many rows a second does a program read that Spark feeds?

Rows of 784 ints of a Parquet file, into the numpy batches of a program on one node, with two slots. The limit
is what Spark needs to hand the same frame to Python at all: a `mapInArrow` that only counts. The other side
is what TensorFlowOnSpark does: one row at a time through the queue of a multiprocessing manager, read by
another process.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.managers import BaseManager
from pathlib import Path
from queue import Queue
from typing import Any

from _bench import Report, arguments, rounds, spark_session, workplace

from kindler import cluster

WIDTH = 784
BATCH = 100
_queue: Queue[Any] = Queue()


def main() -> None:
    given = arguments(__doc__, repeats=3)
    count = 20_000 if given.quick else 200_000
    report = Report(
        "feed", f"rows/s of {WIDTH} ints from a DataFrame into a program's batches", quick=given.quick
    )
    spark = spark_session(2)
    running = cluster.run(read, count, 1, spark=spark, input_mode="spark", framework=None)
    with running, workplace() as folder:
        frame = spark.read.parquet(written(folder / "rows.parquet", count))
        measured = rounds(
            {
                "fed by Kindler": lambda: count / seconds_of(lambda: running.train(frame)),
                "mapInArrow that counts": lambda: count / seconds_of(lambda: counted(frame)),
                "a row at a time through a manager": lambda: through_manager(min(count, 4_000)),
            },
            repeats=given.repeats,
        )
    for name, values in measured.items():
        report.figure(name, values, "rows/s")
    fed = measured["fed by Kindler"]
    report.ratio("fed / manager", fed, measured["a row at a time through a manager"], at_least=8.0)
    report.ratio("fed / mapInArrow", fed, measured["mapInArrow that counts"], at_least=0.8)
    report.finish(rows=count, width=WIDTH, batch_size=BATCH)


def written(path: Path, count: int) -> str:
    """Rows of random bytes as ints, in row groups that two tasks can share."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    schema = pa.schema([("pixels", pa.list_(pa.int32()))])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, count, 5_000):
            rows = min(5_000, count - start)
            pixels = random.integers(0, 256, rows * WIDTH, dtype=np.int32)
            offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(WIDTH)
            column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(pixels))
            writer.write_table(pa.table([column], schema=schema))
    return str(path)


def read(count: int, ctx: Any) -> int:
    """The program: batches as numpy arrays."""
    feed = ctx.data_feed(input_mapping={"pixels": "x"})
    rows = 0
    while not feed.should_stop():
        rows += feed.next_batch(BATCH)["x"].shape[0]
    return rows


def counted(frame: Any) -> None:
    import pyarrow as pa

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = sum(batch.num_rows for batch in batches)
        yield pa.RecordBatch.from_arrays([pa.array([rows])], ["rows"])

    frame.mapInArrow(count, "rows long").collect()


class Manager(BaseManager):
    """Has the queue, in a process of its own."""


Manager.register("queue", callable=lambda: _queue)


def through_manager(count: int) -> float:
    """Rows a second, one by one."""
    context = multiprocessing.get_context("fork")
    with Manager(ctx=context) as manager:
        reader = context.Process(target=take, args=(manager.address, manager._authkey, count))
        reader.start()
        queue = manager.queue()
        row = list(range(WIDTH))
        began = time.perf_counter()
        for _ in range(count):
            queue.put(row)
        reader.join()
        return count / (time.perf_counter() - began)


def take(address: Any, key: bytes, count: int) -> None:
    manager = Manager(address, authkey=key)
    manager.connect()
    queue = manager.queue()
    for _ in range(count):
        queue.get()


def seconds_of(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
