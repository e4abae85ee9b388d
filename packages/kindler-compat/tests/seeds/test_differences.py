"""What differs on purpose from the old systems has a test; here are those that no other suite has."""

from __future__ import annotations

import ast
import gzip
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
from kindler.errors import ConfigError, DataError, NotFoundError
from tests.checkout import ROOT
from tests.seeds.differences import DIFFERENCES, GUIDES, rows_of


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
    data = XShards.partition({"x": x, "y": x.sum(axis=1, keepdims=True)}, 1, engine="local")
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


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("zoo.orca.data.tf", "fit takes XShards as they are"),
        ("zoo.orca.data.tf.data", "fit takes XShards as they are"),
        ("bigdl.orca.data.tf.data", "fit takes XShards as they are"),
        ("zoo.util.tf", "TFNet.from_session"),
        ("zoo.pipeline.api.keras.layers", "from_keras or from_torch"),
        ("zoo.pipeline.api.keras2.layers", "from_keras or from_torch"),
        ("bigdl.dllib.keras.models", "from_keras or from_torch"),
        ("zoo.pipeline.nnframes.nn_image_reader", "NNEstimator, NNModel, NNClassifier"),
        ("bigdl.dataset.news20", "bigdl.dataset.mnist is here"),
    ],
)
def test_modules_that_are_not_there_are_refused_by_their_name_with_what_there_is(
    name: str, hint: str
) -> None:
    module, _, last = f"kindler.compat.{name}".rpartition(".")
    for line in (f"import {module}.{last}", f"from {module} import {last}"):
        with pytest.raises(ImportError, match=rf"(?s)is not among the modules .*Hint: .*{hint}"):
            exec(line)


def test_a_module_that_never_was_is_not_found_as_any_other() -> None:
    with pytest.raises(ModuleNotFoundError, match="never_was"):
        importlib.import_module("kindler.compat.zoo.never_was")


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_is_read_from_its_files_and_nothing_is_downloaded(tmp_path: Path, packed: bool) -> None:
    from kindler.compat.bigdl.dataset import mnist
    from kindler.compat.bigdl.dataset.transformer import normalizer

    images, labels = np.arange(3 * 28 * 28).astype(np.uint8).reshape(3, 28, 28), np.array([5, 0, 9], np.uint8)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
        data = head + array.tobytes()
        path = tmp_path / f"t10k-{name}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(data) if packed else data)

    found, its_labels = mnist.read_data_sets(str(tmp_path), "test")
    assert found.shape == (3, 28, 28, 1)
    np.testing.assert_array_equal(found[..., 0], images)
    np.testing.assert_array_equal(its_labels, labels)
    scaled = normalizer(found, mnist.TEST_MEAN, mnist.TEST_STD)
    np.testing.assert_allclose(scaled[0, 0, 1, 0], (1 - mnist.TEST_MEAN) / mnist.TEST_STD)
    with pytest.raises(ConfigError, match=r"(?s)neither train-images-idx3-ubyte nor .*nothing is downloaded"):
        mnist.load_data(str(tmp_path))
    path.write_bytes(gzip.compress(data[:-1]) if packed else data[:-1])
    with pytest.raises(DataError, match="is not one of MNIST's files"):
        mnist.read_data_sets(str(tmp_path), "test")


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
