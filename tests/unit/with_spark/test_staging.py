"""Rows for workers of one machine pass through files that are removed as they are read."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from kindler.data.column_options import ColumnOptions
from kindler.data.row_order import RowAssignment
from kindler.errors import DiskFullError
from kindler.spark import ingest
from kindler.spark.frames import LANE, ROW, Feed, arrow_types, dealt_rows, feed_frame
from kindler.spark.ingest import Staging, staged_batches
from kindler.spark.versions import to_arrow

pytestmark = pytest.mark.spark

WORKERS = 3
BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


@pytest.fixture
def feed(spark: Any) -> Feed:
    """Four partitions: the first is empty, the others differ."""
    numbers = [(F.col("id") * 10 + i).cast("float").alias(f"x{i}") for i in range(4)]
    frame = spark.range(0, 2000, 1, 4).filter("id > 700").select(*numbers, F.lit(1.0).alias("y"))
    options = ColumnOptions(feature_cols=[f"x{i}" for i in range(4)], label_cols=["y"])
    return Feed(name="data", frame=frame, columns=options.plan(arrow_types(frame)))


@pytest.fixture
def small_batches(spark: Any) -> Iterator[None]:
    before = spark.conf.get(BATCH_ROWS)
    spark.conf.set(BATCH_ROWS, "100")
    yield
    spark.conf.set(BATCH_ROWS, before)


def files(folder: Path, rank: int | str = "*") -> int:
    return len(list(folder.glob(f"*/{rank}-*.arrow")))


def test_each_worker_gets_the_rows_of_the_shuffle_in_order_and_reads_every_file_once(
    spark: Any, feed: Feed, small_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "_FILE_BYTES", 2000)
    dealing = RowAssignment.between(WORKERS, seed=3)
    table = to_arrow(feed_frame([feed], WORKERS, dealing).withColumn("rank", F.spark_partition_id()))
    with Staging(spark, "some-run", WORKERS) as staged:
        places = staged.write(dealt_rows([feed], dealing))
        (folder,) = {Path(place).parent for place in places}
        assert staged.written()[0] == 1299
        assert not list(folder.glob("*/*.part"))
        for rank in range(WORKERS):
            left = files(folder, rank)
            assert left > 4
            got = []
            for batch in staged_batches(places, rank):
                left -= 1
                assert files(folder, rank) == left
                got.append(batch)
            mine = pa.Table.from_batches(got)
            expected = table.filter(pa.compute.field("rank") == rank).drop_columns("rank").sort_by(ROW)
            assert mine.equals(expected.select(mine.schema.names).cast(mine.schema))
        assert files(folder) == 0
    assert not folder.parent.exists()


def test_a_disk_that_is_full_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(partitionId=lambda: 0, taskAttemptId=lambda: 7)
    monkeypatch.setattr(ingest, "TaskContext", SimpleNamespace(get=lambda: context))
    batch = pa.record_batch({"x": np.zeros(100_000), LANE: np.zeros(100_000, np.int16)})
    read: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(3):
            read.append(number)
            yield batch

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        (answer,) = ingest._write_rows(str(tmp_path), 2, 1 << 20, batches())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read == [0, 1, 2]
    assert not list(tmp_path.iterdir())

    class Frame:
        def mapInArrow(self, task: Any, schema: str) -> Frame:
            return self

        def toArrow(self) -> pa.Table:
            return pa.Table.from_batches([answer])

    staged = object.__new__(Staging)
    staged._place, staged._workers = tmp_path, 2
    with pytest.raises(DiskFullError, match=r"arrow\.part"):
        staged.write(Frame())  # type: ignore[arg-type]
