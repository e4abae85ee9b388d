"""Orca's estimator of OpenVINO's models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kindler import XShards
from kindler.compat.zoo.orca.learn.openvino import Estimator
from tests.openvino.models import classifier, direct, two_inputs


def test_shards_get_their_prediction(tmp_path: Path) -> None:
    path = two_inputs(tmp_path / "two.xml")
    a, b = np.ones((5, 3), "float32"), np.arange(5, dtype="float32")
    shards = XShards.from_shards(
        [{"x": (a[:2], b[:2]), "y": b[:2]}, {"x": (a[2:], b[2:]), "y": b[2:]}], engine="local"
    )
    two = Estimator.from_openvino(model_path=str(path)).predict(shards).collect()
    assert [sorted(shard) for shard in two] == [["prediction", "x", "y"]] * 2
    np.testing.assert_allclose(
        np.concatenate([shard["prediction"][1] for shard in two]), a - b[:, None], rtol=1e-5, atol=1e-6
    )

    pixels = np.random.default_rng(0).normal(size=(4, 3, 2, 2)).astype("float32")
    scorer = Estimator.from_openvino(model_path=str(classifier(tmp_path / "one.xml", [-1, 3, 2, 2])))
    (one,) = scorer.predict(XShards.from_shards([{"x": pixels}], engine="local")).collect()
    np.testing.assert_allclose(
        one["prediction"], direct(tmp_path / "one.xml", pixels)[0], rtol=1e-5, atol=1e-6
    )

    est = Estimator.from_openvino(model_path=str(path))
    for found in (
        est.predict([b, a], input_cols=["b", "a"]),
        est.predict(XShards.from_shards([{"x": (b, a)}], engine="local"), input_cols=["b", "a"]).first()[
            "prediction"
        ],
    ):
        np.testing.assert_allclose(found[1], a - b[:, None], rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="input_cols=.'b', 'c'.: the model has the inputs .'a', 'b'."):
        est.predict([b, a], input_cols=["b", "c"])
