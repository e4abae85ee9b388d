"""What differs on purpose from the old systems has a test; here are those that no other suite has."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kindler.compat.bigdl.nn.criterion import MSECriterion
from kindler.compat.bigdl.nn.layer import BatchNormalization, Linear, Model, Sequential
from kindler.compat.bigdl.optim.optimizer import SGD, EveryEpoch
from kindler.compat.zoo.orca.data import XShards
from kindler.compat.zoo.orca.learn.bigdl import Estimator
from kindler.errors import ConfigError, NotFoundError
from tests.seeds.differences import DIFFERENCES, GUIDES, rows_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("guide", [path.name for path in sorted(GUIDES.glob("moving-from-*.md"))])
def test_every_difference_that_a_guide_lists_has_a_test(guide: str) -> None:
    listed = [cells[0] for cells in rows_of(guide)]
    assert listed == list(DIFFERENCES[guide])
    for test in DIFFERENCES[guide].values():
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in found, test


def test_a_checkpoint_of_a_bigdl_model_has_the_optimizers_state(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    data = XShards.partition({"x": x, "y": x.sum(axis=1, keepdims=True)}, 1, home="local")
    first = [np.ones((1, 3), "float32"), np.zeros(1, "float32")]

    def estimator() -> Any:
        model = Sequential().add(Linear(3, 1, init_weight=first[0], init_bias=first[1]))
        return Estimator.from_bigdl(
            model=model, loss=MSECriterion(), optimizer=SGD(0.1, momentum=0.9, dampening=0.0),
            model_dir=str(tmp_path),
        )  # fmt: skip

    straight = estimator()
    straight.fit(data, 2, batch_size=16, checkpoint_trigger=EveryEpoch())
    resumed = estimator()
    resumed.load_orca_checkpoint(str(tmp_path), version=1)
    resumed.fit(data, 2, batch_size=16)

    for mine, its in zip(resumed.get_model().get_weights(), straight.get_model().get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-6)


def test_layers_of_bigdl_are_torch_modules_where_bigdl_had_names_of_its_own() -> None:
    np.testing.assert_array_equal(BatchNormalization(3).get_weights()[0], [1.0, 1.0, 1.0])
    with pytest.warns(UserWarning, match="init_grad_weight have no effect"):
        layer = Linear(2, 2, init_grad_weight=np.ones((2, 2)))
    assert layer.training is True
    assert layer.evaluate() is layer
    assert layer.training is False
    assert layer.train().training is True
    assert isinstance(layer, torch.nn.Module)


def test_a_file_that_bigdl_wrote_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "lenet.bigdl"
    path.write_bytes(b"\x08\x01\x12\x0acom.intel.analytics.bigdl.nn.Sequential" * 20)  # protobuf
    with pytest.raises(ConfigError, match="carry weights over with get_weights and set_weights"):
        Model.loadModel(str(path))


def test_a_model_that_is_not_there_is_an_error_and_not_none(tmp_path: Path) -> None:
    import kindler.compat.omegaml as om

    omega = om.Omega(tmp_path / "store")
    with pytest.raises(NotFoundError, match="nothing") as caught:
        omega.models.get("nothing")
    assert isinstance(caught.value, KeyError)
    omega.close()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("zoo.orca.learn.metrics", "ROC"),
        ("zoo.orca.learn.metrics", "PrecisionRecallCurve"),
        ("zoo.orca.learn.optimizers.schedule", "Plateau"),
        ("tensorflowonspark.TFSparkNode", "train"),
        ("tensorflowonspark.TFSparkNode", "inference"),
        ("tensorflowonspark.TFSparkNode", "shutdown"),
    ],
)
def test_names_that_are_not_there_are_import_errors(module: str, name: str) -> None:
    assert not hasattr(importlib.import_module(f"kindler.compat.{module}"), name)


def role(args: Any, ctx: Any) -> tuple[str, int, int]:
    rows = 0
    feed = None if ctx.job_name == "ps" else ctx.get_data_feed()
    while feed is not None and not feed.should_stop():
        rows += len(feed.next_batch(8))
    return ctx.job_name, rows, os.getpid()


@pytest.mark.spark
def test_arguments_of_tensorflowonspark_that_are_not_needed_are_accepted(spark: Any) -> None:
    from kindler.compat.tensorflowonspark import TFCluster

    sc = spark.sparkContext
    mode = TFCluster.InputMode.SPARK
    cluster = TFCluster.run(sc, role, {}, 2, num_ps=1, input_mode=mode, driver_ps_nodes=True)
    cluster.train(sc.parallelize(range(20), 2), num_epochs=1, feed_timeout=1)
    cluster.shutdown(grace_secs=600)

    returned = [value for value in cluster.cluster.return_values if value is not None]
    assert ("worker", 20) in [value[:2] for value in returned]
    assert os.getpid() not in [value[2] for value in returned]
    with pytest.raises(ConfigError, match=r"(?s)workers=3 but .* can run 2 tasks.*1 are parameter servers"):
        TFCluster.run(sc, role, {}, 3, num_ps=1, input_mode=mode, driver_ps_nodes=True)
