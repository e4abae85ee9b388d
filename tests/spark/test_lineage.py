"""What made a model from a DataFrame, and making it again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kindler import Estimator, Store


def trained(frame: Any) -> Estimator:
    estimator = Estimator.from_torch(
        lambda: torch.nn.Linear(2, 1),
        optimizer=partial(torch.optim.Adam, lr=0.1),
        loss=torch.nn.MSELoss(),
        workers=2,
        seed=3,
    )
    estimator.fit(frame, batch_size=8, verbose=0)
    return estimator


def test_models_of_frames_are_reproduced_to_the_bit_on_spark(spark: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 2)).astype("float32")
    for place in range(2):
        part = x[place::2]
        pq.write_table(pa.table({"x": list(part), "y": part.sum(1)}), tmp_path / f"{place}.parquet")
    frame = spark.read.parquet(f"{tmp_path}/*.parquet")
    store = Store(tmp_path / "store")

    plain = trained(frame)
    (fit,) = plain.lineage
    assert (fit["engine"], fit["data"]["kind"], fit["data"]["direct"]) == ("spark", "frame", True)
    assert [Path(file["path"]).name for file in fit["data"]["files"]] == ["0.parquet", "1.parquet"]
    store.models.put(plain, "plain")
    assert store.models.reproduce("plain", trusted=True).equal

    filtered = trained(frame.filter("y > -1"))
    assert "Filter" in filtered.lineage[0]["data"]["plan"]
    assert filtered.lineage[0]["data"]["file_count"] == 2
    store.models.put(filtered, "filtered")
    again = spark.read.parquet(f"{tmp_path}/*.parquet").filter("y > -1")
    assert store.models.reproduce("filtered", trusted=True, data=again).equal
    other = store.models.reproduce("filtered", trusted=True, data=frame.filter("y > -2"))
    assert any(line.startswith("rows: ") for line in other.differences)

    newer = frame.filter("y > 0")
    made = store.models.retrain("filtered", holdout=frame, data=newer, trusted=True)
    assert made.version.number == 2
    assert made.version.meta["lineage"][0]["rows"] == newer.count()
    assert made.metrics["loss"][0] == pytest.approx(filtered.evaluate(frame, verbose=0)["loss"])
