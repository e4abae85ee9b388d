"""Rows that Spark deals and brings to the workers keep the promises of a source."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from kindler.data.column_options import ColumnOptions
from kindler.data.row_order import RowAssignment
from kindler.data.sources import DeliveredSource, Source
from kindler.data.spool import Spool
from kindler.spark.engine import _spool
from kindler.spark.frames import Feed, arrow_types, feed_frame
from kindler.testing import thread_workers
from kindler.testing.sources import MakeSource, OpenSource, SourceSuite

pytestmark = pytest.mark.spark


class TestDelivered(SourceSuite):
    @pytest.fixture
    def feeds(self) -> dict[Source, Feed]:
        return {}

    @pytest.fixture
    def make_source(self, spark: Any, feeds: dict[Source, Feed]) -> MakeSource:
        def make(table: pa.Table, columns: ColumnOptions) -> Source:
            frame = spark.createDataFrame(table).coalesce(1)
            source = DeliveredSource(columns.plan(arrow_types(frame)), "data")
            feeds[source] = Feed(name="data", frame=frame, columns=source.columns)
            return source

        return make

    @pytest.fixture
    def open_source(self, tmp_path: Path, feeds: dict[Source, Feed]) -> OpenSource:
        """What the engine does: Spark deals the rows, and each task writes those of its worker."""

        def open_(
            source: Source, size: int, dealing: RowAssignment, *, in_order: bool = False
        ) -> list[Spool]:
            from pyspark.sql import functions as F

            frame = feed_frame([feeds[source]], size, dealing).withColumn("rank", F.spark_partition_id())
            table = frame.toArrow()
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            for rank in range(size):
                part = table.filter(pa.compute.field("rank") == rank).drop_columns("rank")
                scratch: Any = SimpleNamespace(
                    scratch=folder / f"rank-{rank}", check=lambda: None, report=lambda name, **fields: None
                )
                columns = [("data", source.columns)]
                _spool(scratch, columns, iter(part.to_batches()), rank=rank, size=size)
            return thread_workers.opened(source, size, folder, assignment=dealing, in_order=in_order)

        return open_
