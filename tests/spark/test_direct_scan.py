"""A frame is read from its files only where that gives the rows of the frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from torch import nn

from kindler import Columns, Estimator

pytestmark = pytest.mark.spark


def test_a_file_that_changes_before_its_rows_are_scored_is_an_error(tmp_path: Path, spark: Any) -> None:
    path = tmp_path / "t" / "0.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"x": [1.5, 2.5], "id": [0, 1]}), path)
    frame = spark.read.parquet(str(path.parent))
    scored = Estimator.from_torch(model=nn.Identity()).predict(
        frame, feature_cols="x", columns=Columns(ingest="direct")
    )
    assert [row.prediction for row in scored.collect()] == [1.5, 2.5]

    pq.write_table(pa.table({"x": [1, 2], "id": [0, 1]}), path)

    with pytest.raises(PySparkException, match=r"(?s)0\.parquet has changed: column 'x' is double"):
        scored.select("id", "prediction").collect()
