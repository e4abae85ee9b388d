"""Every kind of Spark column reaches the model with its values, whichever way it comes in."""

from __future__ import annotations

import datetime
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator
from kindler.callbacks import Callback

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]

DAY = datetime.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=datetime.timezone.utc)


class Echo(nn.Module):
    """Keeps what it was called with, and has a weight to train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[torch.Tensor, ...]] = []

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append(inputs)
        return self.weight * torch.ones(len(inputs[0]))


class Keep(Callback):
    """Writes what the model was called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_run_end(self, run: Any) -> None:
        columns = [torch.cat(column).numpy() for column in zip(*run.model.seen, strict=True)]
        np.savez(Path(self.folder, f"rank-{run.rank}.npz"), *columns)


def received(frame: Any, folder: Path, features: list[str], **options: Any) -> list[np.ndarray]:
    """What the model got for each feature column, rows in the order of the first."""
    model = Echo()
    sgd = torch.optim.SGD(model.parameters(), 0.0)
    est = Estimator.from_torch(model=model, optimizer=sgd, loss=nn.MSELoss(), workers=2)
    folder.mkdir()
    est.fit(
        frame,
        batch_size=3,
        feature_cols=["id", *features],
        label_cols="label",
        callbacks=[Keep(folder)],
        verbose=0,
        **options,
    )
    parts = [np.load(file) for file in sorted(folder.glob("*.npz"))]
    columns = [np.concatenate([part[name] for part in parts]) for name in parts[0].files]
    order = np.argsort(columns[0])
    return [column[order] for column in columns[1:]]


def both_ways(
    spark: Any, frame: Any, folder: Path, features: list[str], columns: Columns | None = None
) -> list[np.ndarray]:
    """Through Spark, and from the files of the same frame; both must agree."""
    frame.write.parquet(str(folder / "frame"))
    scan = spark.read.parquet(str(folder / "frame"))
    inline, direct = (
        received(data, folder / ingest, features, columns=replace(columns or Columns(), ingest=ingest))
        for data, ingest in ((frame, "inline"), (scan, "direct"))
    )
    for one, other in zip(inline, direct, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    return inline


def test_scalars_of_all_types(tmp_path: Path, spark: Any) -> None:
    rows = [
        (i, i - 3, 100 + i, 10**6 + i, 2**53 + i, i / 4, i / 8, Decimal(i) / 2, i % 2 == 0, DAY, 0.0)
        for i in range(7)
    ]
    schema = (
        "id long, a byte, b short, c int, d long, e float, f double, g decimal(10,2), h boolean, i timestamp,"
        " label float"
    )

    a, b, c, d, e, f, g, h, i = both_ways(
        spark, spark.createDataFrame(rows, schema), tmp_path, list("abcdefghi")
    )

    n = np.arange(7)
    for found, expected, dtype in [
        (a, n - 3, "int8"),
        (b, n + 100, "int16"),
        (c, n + 10**6, "int32"),
        (d, n + 2**53, "int64"),
        (e, n / 4, "float32"),
        (f, n / 8, "float32"),
        (g, n / 2, "float32"),
        (h, n % 2 == 0, "bool"),
    ]:
        assert found.dtype == dtype
        assert found.tolist() == expected.tolist()
    assert i.dtype == "int64"
    assert set(i.tolist()) == {int(DAY.timestamp()) * 10**6 + 678}


def test_arrays_nested_arrays_binary_and_vectors(tmp_path: Path, spark: Any) -> None:
    from pyspark.ml.linalg import SparseVector, Vectors, VectorUDT
    from pyspark.sql.types import StructType

    rows = [
        (
            i,
            [float(i), 1.0, 2.0, 3.0],
            [[i, 1], [2, 3]],
            bytes([i, 1, 2, 3]),
            Vectors.dense([i, 0.5]) if i % 2 else SparseVector(2, {1: 0.5}),
            0.0,
        )
        for i in range(5)
    ]
    schema = (
        StructType.fromDDL("id long, flat array<double>, nested array<array<int>>, raw binary")
        .add("vector", VectorUDT())
        .add("label", "float")
    )
    features = ["flat", "nested", "raw", "vector"]

    flat, nested, raw, vector = both_ways(
        spark,
        spark.createDataFrame(rows, schema),
        tmp_path,
        features,
        columns=Columns(shapes={"flat": (2, 2, 1), "raw": (2, 2)}, dtypes={"raw": "uint8"}),
    )

    assert (flat.shape, flat.dtype) == ((5, 2, 2, 1), np.float32)
    assert flat[4].ravel().tolist() == [4.0, 1.0, 2.0, 3.0]
    assert (nested.shape, nested.dtype, nested[3].tolist()) == ((5, 2, 2), np.int32, [[3, 1], [2, 3]])
    assert (raw.dtype, raw[2].tolist()) == (np.uint8, [[2, 1], [2, 3]])
    assert (vector.dtype, vector.tolist()) == (np.float32, [[0, 0.5], [1, 0.5], [0, 0.5], [3, 0.5], [0, 0.5]])


def test_stacked_features_are_one_dense_input(tmp_path: Path, spark: Any) -> None:
    rows = [(i, i * 2, [0.5, 0.25], i % 2 == 0, 0.0) for i in range(6)]
    frame = spark.createDataFrame(
        rows, "id long, _kindler_row int, _kindler_lane array<double>, c boolean, label float"
    )
    model = nn.Linear(5, 1)
    est = Estimator.from_torch(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=nn.MSELoss(), workers=2
    )
    features = ["id", "_kindler_row", "_kindler_lane", "c"]  # names of ours, too

    est.fit(frame, feature_cols=features, label_cols="label", columns=Columns(stack_features=True), verbose=0)

    matrix = torch.tensor([[i, 2 * i, 0.5, 0.25, float(i % 2 == 0)] for i in range(6)])
    with torch.no_grad():
        expected = est.get_model()(matrix)[:, 0].tolist()
    scored = est.predict(frame).orderBy("id").collect()
    assert [row.prediction[0] for row in scored] == pytest.approx(expected, abs=1e-5)
