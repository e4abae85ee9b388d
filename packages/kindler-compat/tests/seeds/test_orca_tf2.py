"""Orca's program for TensorFlow 2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from tests.seeds.digits import TRAIN_ROWS, digits
from tests.seeds.programs import Program
from tests.whole import WHOLE

pytestmark = [pytest.mark.spark, pytest.mark.timeout(3600 if WHOLE else 600)]


def test_a_model_creator_learns_digits_that_a_data_creator_reads(spark: Any, folder: Path) -> None:
    from tensorflow import keras

    from tests.seeds import given_tf2 as given

    x, y = digits("test")
    x = x.reshape(-1, 28, 28, 1).astype("float32") / 255
    rows = [(image.tolist(), int(label)) for image, label in zip(x, y, strict=True)]
    df = spark.createDataFrame(rows, "image array<array<array<float>>>, label int")
    program = Program(
        folder, keras=keras, create_keras_lenet_model=given.create_keras_lenet_model, tfds=given.tfds,
        preprocess=given.preprocess, max_epoch=given.EPOCHS, total_size=TRAIN_ROWS, batch_size=32, df=df,
    )  # fmt: skip

    names = program.run("orca/tf2-from-keras", "orca/tf2-fit")

    assert names["stats"]["steps"] == TRAIN_ROWS // 32
    assert len(names["stats"]["loss"]) == given.EPOCHS
    scored = names["predictions"].collect()
    scores = np.array([row.prediction for row in scored])
    pictures = np.array([row.image for row in scored], np.float32)
    plain = names["est"].get_model().predict(pictures, verbose=0)
    np.testing.assert_allclose(scores, plain, rtol=1e-4, atol=1e-5)
    assert np.mean(scores.argmax(1) == [row.label for row in scored]) >= given.ENOUGH
