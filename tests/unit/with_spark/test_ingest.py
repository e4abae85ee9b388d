"""Rows that Spark sends are counted while they are computed and received, and nothing is left of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F
from torch import nn, optim

from kindler import Columns, Estimator, limits
from kindler.engine.job import Job
from kindler.estimator import run as running
from kindler.spark import ingest
from kindler.train import progress

pytestmark = pytest.mark.spark

ROWS = 20_000


class Slow:
    """A function that takes its time with each batch, so that its stage can be watched."""

    def __call__(self, batches: Any) -> Any:
        import time

        for batch in batches:
            time.sleep(0.3)
            yield batch


def shuffled(spark: Any) -> set[Path]:
    """The shuffle files of this Spark."""
    return set(Path(spark.conf.get("spark.local.dir")).glob("blockmgr-*/*/shuffle_*.data"))


def test_rows_are_reported_while_they_are_computed_and_received_and_no_file_stays(
    spark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports: list[dict[str, Any]] = []
    runs: list[str] = []
    shown = progress._IngestLine.report

    def heard(line: Any, fields: Any) -> None:
        reports.append(dict(fields))
        shown(line, fields)

    def made(**fields: Any) -> Job:
        job = Job(**fields)
        runs.append(job.run_id)
        return job

    monkeypatch.setattr(running, "Job", made)
    monkeypatch.setattr(progress._IngestLine, "report", heard)
    monkeypatch.setattr(ingest, "_POLL_S", 0.1)
    monkeypatch.setattr(limits, "INGEST_PRINTED_S", 0.0)
    frame = (
        spark.range(0, ROWS, 1, 6)
        .mapInArrow(Slow(), "id long")
        .select(F.col("id").cast("double").alias("x"), F.rand(0).alias("y"))
    )
    est = Estimator.from_torch(
        model=lambda: nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 1)),
        optimizer=lambda model: optim.SGD(model.parameters(), lr=1e-9),
        loss=nn.MSELoss(),
        workers=2,
    )
    before = shuffled(spark)
    est.fit(frame, epochs=1, batch_size=ROWS, columns=Columns(shapes={"y": (1,)}))

    computed = [report for report in reports if report["stage"] == "computed"]
    received = [report for report in reports if report["stage"] == "received"]
    assert computed
    assert max(report["tasks"] for report in computed) >= 6
    assert sum(report["rows"] for report in received if report["done"]) == ROWS
    assert {report["worker"] for report in received if report["done"]} == {0, 1}
    assert f"rows from Spark: {ROWS:,} received (" in capsys.readouterr().err
    assert len(runs) == 1
    assert max(report["rows"] for report in computed) <= ROWS
    for folder in (tempfile.gettempdir(), spark.conf.get("spark.local.dir")):
        for pattern in ("", "blockmgr-*/", "spark-*/pyspark-*/"):
            assert not list(Path(folder).glob(f"{pattern}kindler-{runs[0]}-*"))
    assert shuffled(spark) <= before  # on one machine, rows do not go through a shuffle
