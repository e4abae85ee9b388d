"""Every source that workers read by themselves keeps the promises of a source."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kindler import XShards
from kindler.data.column_options import ColumnOptions
from kindler.data.parquet import inspect
from kindler.data.sources import Source, arrow_source, parquet_source
from kindler.testing.sources import MakeSource, SourceSuite
from kindler.xshards import as_input


def parquet(table: pa.Table, columns: ColumnOptions, folder: Path) -> Source:
    half = (table.num_rows + 1) // 2
    for i, part in enumerate((table.slice(0, half), table.slice(half))):
        pq.write_table(part, folder / f"{i}.parquet", row_group_size=2)
    return parquet_source(inspect(folder), columns)


class TestParquet(SourceSuite):
    @pytest.fixture
    def make_source(self, tmp_path: Path) -> MakeSource:
        folder = tmp_path / "files"
        folder.mkdir()
        return lambda table, columns: parquet(table, columns, folder)


class TestVastParquet(TestParquet):
    @pytest.fixture(autouse=True)
    def _everything_is_vast(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kindler.data.sources._VAST_BYTES", 0)


class TestMemory(SourceSuite):
    @pytest.fixture
    def make_source(self, tmp_path: Path) -> MakeSource:
        return lambda table, columns: arrow_source(table, columns, scratch=tmp_path)


class TestShards(SourceSuite):
    @pytest.fixture
    def make_source(self) -> MakeSource:
        def make(table: pa.Table, columns: ColumnOptions) -> Source:
            shards = XShards.partition(table.to_pandas(), min(2, table.num_rows), engine="local")
            source, feed = as_input.prepare(shards, name="data", options=columns, spark=None, here=True)
            assert feed is None
            return source

        return make
