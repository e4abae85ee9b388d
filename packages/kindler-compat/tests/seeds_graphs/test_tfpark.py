"""The programs of TFPark's page: Keras models, a model function, and LeNet of slim."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kindler.compat import tensorflow as tf
from kindler.compat.zoo.tfpark import TFDataset
from tests.checkout import ROOT
from tests.seeds.programs import Program
from tests.seeds_graphs import given
from tests.whole import WHOLE

pytestmark = [pytest.mark.spark, pytest.mark.timeout(7200 if WHOLE else 600)]
ENOUGH = 0.95 if WHOLE else 0.7
LENET = ROOT / "examples" / "tfpark" / "lenet.py"
IMAGE = {"features": (tf.float32, [28, 28, 1])}


@pytest.fixture
def program(spark: Any, tmp_path: Path) -> Program:
    return Program(
        tmp_path, file_list=given.file_list("train"), read_image_and_label=given.read_image_and_label,
        decode_to_ndarrays=given.decode_to_ndarrays, get_data_rdd=given.get_data_rdd, BATCH_SIZE=64,
        max_epoch=5,
    )  # fmt: skip


def check(scores: Any, plain: Any) -> None:
    """Rows in their order, with what the model itself computes, and mostly right."""
    np.testing.assert_allclose(scores, plain, rtol=1e-4, atol=1e-4)
    assert np.mean(np.argmax(scores, axis=1) == given.images("test")[1]) >= ENOUGH


def test_a_keras_model_learns_digits_and_its_weights_are_read_again(
    spark: Any, program: Program, tmp_path: Path
) -> None:
    names = program.run("tfpark/dataset", "tfpark/keras-model")
    names["training_dataset"] = names["dataset"]
    program.run("tfpark/keras-fit")
    assert (tmp_path / "model.h5").is_file()

    names["model"].set_weights([np.zeros_like(part) for part in names["model"].get_weights()])
    sc = spark.sparkContext
    names["eval_dataset"] = TFDataset.from_rdd(
        given.get_data_rdd("validation", sc), labels=(tf.int32, []), batch_per_thread=80, **IMAGE
    )
    names["pred_dataset"] = TFDataset.from_rdd(given.get_data_rdd("test", sc), batch_per_thread=80, **IMAGE)
    plain, names["model"] = names["model"], names["keras_model"]
    program.run("tfpark/keras-predict")

    scores = np.array(names["predictions"].collect())
    check(scores, plain.predict(given.images("test")[0]))
    right = np.mean(scores.argmax(1) == given.images("test")[1])
    assert names["evaluation_results"]["acc"] == pytest.approx(right)


def test_a_model_function_learns_digits_from_an_input_function(program: Program, tmp_path: Path) -> None:
    names = program.run("tfpark/model-fn", "tfpark/input-fn", "tfpark/estimator")

    scores = np.array(names["predictions"].collect())
    right = np.mean(scores.argmax(1) == given.images("test")[1])
    assert right >= ENOUGH
    assert names["evaluation_result"]["acc"] == pytest.approx(right)
    assert any((tmp_path / "estimator").iterdir())


def test_lenet_of_slim_learns_digits_and_its_checkpoint_is_read_again(
    program: Program, tmp_path: Path
) -> None:
    pytest.importorskip("tf_slim")
    names = program.names
    names["lenet"] = SimpleNamespace(**runpy.run_path(str(LENET)))
    (tmp_path / "lenet").mkdir()
    program.run("tfpark/train-data", "tfpark/train-lenet", "tfpark/optimize-loss", "tfpark/save-checkpoint")
    assert list((tmp_path / "az_lenet").rglob("*tfevents*"))

    names["file_list"] = given.file_list("test")
    with tf.Graph().as_default():
        program.run("tfpark/predict-data", "tfpark/predict-lenet", "tfpark/predictor")
        scores = np.array(names["predictions_rdd"].collect())
        plain = names["sess"].run(names["logits"], {names["images"]: given.images("test")[0]})
        check(scores, plain)


def test_a_keras_model_learns_digits_below_the_estimators(program: Program, tmp_path: Path) -> None:
    names = program.run(
        "tfpark/train-data", "tfpark/train-keras", "tfpark/optimize-keras", "tfpark/save-weights"
    )

    names["file_list"] = given.file_list("test")
    program.run("tfpark/predict-data", "tfpark/predict-keras", "tfpark/predictor-keras")
    check(np.array(names["predictions_rdd"].collect()), names["model"].predict(given.images("test")[0]))
