"""Spark frames and shards are scored by OpenVINO where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler import Estimator, XShards

ov = pytest.importorskip("openvino")
models = pytest.importorskip("tests.openvino.models")

IMAGES = np.random.default_rng(0).random((23, 3, 4, 4)).astype("float32")


def test_frames_and_shards_of_any_partitions_get_what_openvino_computes(spark: Any, tmp_path: Path) -> None:
    path = models.classifier(tmp_path / "net.xml", [4, 3, 4, 4])
    free = models.classifier(tmp_path / "free.xml", [-1, 3, 4, 4])
    expected = models.direct(free, IMAGES)[0]
    est = Estimator.from_openvino(model_path=path)
    rows = [(i, image.tolist()) for i, image in enumerate(IMAGES)]
    frame = spark.createDataFrame(rows, "id int, image array<array<array<float>>>").repartition(3)

    scored = est.predict(frame, batch_size=4, feature_cols="image").toPandas().sort_values("id")
    np.testing.assert_allclose(np.stack(scored["prediction"]), expected, rtol=1e-5, atol=1e-6)
    assert list(scored["id"]) == list(range(23))

    shards = XShards.partition({"x": IMAGES}, 4, engine="spark")
    found = est.predict(shards, batch_size=4).collect()
    np.testing.assert_allclose(
        np.concatenate([shard["prediction"] for shard in found]), expected, rtol=1e-5, atol=1e-6
    )


def test_a_column_for_each_output_and_input(spark: Any, tmp_path: Path) -> None:
    est = Estimator.from_openvino(model_path=models.two_inputs(tmp_path / "two.xml"), threads=1)
    rows = [([float(i), 1.0, 2.0], float(i)) for i in range(5)]
    frame = spark.createDataFrame(rows, "a array<double>, b double")

    scored = est.predict(frame, feature_cols=["a", "b"]).toPandas()
    a, b = np.stack(scored["a"]), scored["b"].to_numpy()[:, None]
    np.testing.assert_allclose(np.stack(scored["prediction_0"]), a + b)
    np.testing.assert_allclose(np.stack(scored["prediction_1"]), a - b)
