"""Orca's programs for PyTorch, MXNet, BigDL and OpenVINO."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler.compat.zoo.orca.data import XShards
from tests.mxnet.here import WHY_NOT
from tests.seeds import given_torch as given
from tests.seeds.digits import digits
from tests.seeds.programs import Program
from tests.whole import WHOLE

pytestmark = [pytest.mark.spark, pytest.mark.timeout(3600 if WHOLE else 600)]


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    x, y = given.images("test")
    rows = [(image.tolist(), int(label)) for image, label in zip(x, y, strict=True)]
    return spark.createDataFrame(rows, "image array<array<array<float>>>, label int").repartition(2).cache()


def accuracy(predictions: Any) -> float:
    rows = predictions.select("label", "prediction").collect()
    return float(np.mean([np.argmax(row.prediction) == row.label for row in rows]))


def test_torch_models_learn_digits_with_instances_and_with_creators(df: Any, folder: Path) -> None:
    torch.manual_seed(0)
    x, y = given.images("test")
    xshards = XShards.partition({"x": x, "y": y})
    program = Program(
        folder, LeNet=given.LeNet, nn=nn, torch=torch, args=SimpleNamespace(lr=1e-3, epochs=given.EPOCHS),
        train_loader=given.train_loader_func({}, 32), train_loader_func=given.train_loader_func,
        xshards=xshards, df=df,
    )  # fmt: skip

    names = program.run("orca/torch-from-torch", "orca/torch-fit")
    scores = np.concatenate([shard["prediction"] for shard in names["predictions"].collect()])
    with torch.no_grad():
        plain = names["est"].get_model().eval()(torch.tensor(x)).numpy()
    np.testing.assert_allclose(scores, plain, rtol=1e-4, atol=1e-5)
    assert np.mean(scores.argmax(1) == y) >= given.ENOUGH

    names["model"] = given.LeNet()  # the page passes a module beside the creator of its optimizer
    names = program.run("orca/torch-creators", "orca/torch-creators-fit")
    assert accuracy(names["predictions"]) >= given.ENOUGH


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")
def test_an_openvino_model_scores_arrays_and_shards(spark: Any, folder: Path) -> None:
    from tests.openvino.models import classifier, direct

    model = classifier(folder / "net.xml", [4, 3, 224, 224])
    names = Program(folder, {"model": str(model)}, np=np).run(
        "orca/openvino-from-openvino", "orca/openvino-predict"
    )
    batches = names["input_data"].astype("float32")
    expected = np.stack([direct(model, batch)[0] for batch in batches])
    assert names["result"].shape == (20, 4, 5)
    np.testing.assert_allclose(names["result"], expected, rtol=1e-5, atol=1e-6)
    shards = np.concatenate([shard["prediction"] for shard in names["result_shards"].collect()])
    np.testing.assert_allclose(shards, expected, rtol=1e-5, atol=1e-6)


def test_a_bigdl_model_is_trained_and_scores_a_parquet_file(spark: Any, folder: Path) -> None:
    pairs = [([2.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [2.0, 1.0])] * 8
    frame = spark.createDataFrame(pairs, "features array<double>, label array<double>")
    frame.write.mode("overwrite").parquet("data.parquet")

    program = Program(folder, spark=spark)
    before = program.run("orca/bigdl-from-bigdl")["linear_model"].get_weights()[0].copy()
    names = program.run("orca/bigdl-fit")

    weight, bias = names["est"].get_model().get_weights()
    assert not np.array_equal(weight, before)
    rows = names["result_df"].collect()
    assert len(rows) == len(pairs)
    features = np.array([row["features"] for row in rows])
    np.testing.assert_allclose([row["prediction"] for row in rows], features @ weight.T + bias, rtol=1e-4)


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_a_block_of_mxnet_learns_digits(spark: Any, folder: Path) -> None:
    from tests.seeds import given_mxnet

    images, labels = digits("train")
    program = Program(
        folder, LeNet=given_mxnet.LeNet,
        data_ndarray=images[:, None].astype("float32") / 255, label_ndarray=labels.astype("float32"),
    )  # fmt: skip
    names = program.run("orca/mxnet-from-mxnet")
    program.run("orca/mxnet-fit")

    images, labels = digits("test")
    shards = XShards.partition({"x": images[:, None].astype("float32") / 255})
    scores = np.concatenate([s["prediction"] for s in names["est"].predict(shards).collect()])
    assert np.mean(scores.argmax(1) == labels) >= given_mxnet.ENOUGH


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_mxnet_trains_judges_and_scores_a_frame_as_it_does_arrays(spark: Any) -> None:
    from kindler import Estimator
    from kindler.compat.frameworks.mxnet import create_config
    from tests.mxnet import networks

    x, y = networks.rows(50)
    schema = "x array<float>, y float"
    frame = spark.createDataFrame([(row.tolist(), float(c)) for row, c in zip(x, y, strict=True)], schema)
    columns = {"feature_cols": ["x"], "label_cols": ["y"]}

    def estimator(**options: Any) -> Any:
        config = create_config("sgd", {"learning_rate": 0.1}, seed=3)
        return Estimator.from_mxnet(
            config, networks.classifier, networks.softmax_loss, networks.accuracy, **options
        )

    here, there = estimator(), estimator(workers=2, engine="spark")
    wanted = here.fit({"x": x, "y": y}, epochs=2, batch_size=20, shuffle=False, verbose=0)
    found = there.fit(frame.coalesce(1), epochs=2, batch_size=20, shuffle=False, verbose=0, **columns)

    assert found["num_samples"] == [50, 50]
    assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    judged = there.evaluate(frame, verbose=0, **columns)
    scored = there.predict(frame, feature_cols=["x"]).collect()
    scores = np.array([row.prediction for row in scored])
    np.testing.assert_allclose(
        scores, here.predict(np.array([row.x for row in scored], "float32")), atol=1e-4
    )
    assert judged["accuracy"] == pytest.approx(np.mean(scores.argmax(1) == [row.y for row in scored]))
