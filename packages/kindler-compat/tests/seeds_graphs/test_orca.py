"""Orca's programs for TensorFlow 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.seeds.programs import Program
from tests.seeds_graphs import given
from tests.whole import WHOLE

pytestmark = [pytest.mark.spark, pytest.mark.timeout(3600 if WHOLE else 600)]
EPOCHS, ENOUGH = (3, 0.95) if WHOLE else (6, 0.5)  # batches of 320 rows, as on the page


def test_a_graph_and_a_keras_model_learn_digits(spark: Any, folder: Path) -> None:
    x, y = given.images("test")
    rows = [(image.tolist(), int(label)) for image, label in zip(x, y, strict=True)]
    df = spark.createDataFrame(rows, "image array<array<array<float>>>, label int")

    for create in ("orca/tf1-from-graph", "orca/tf1-from-keras"):
        program = Program(
            folder, lenet=given.lenet, accuracy=given.accuracy, tfds=given.tfds, preprocess=given.preprocess,
            create_keras_lenet_model=given.create_keras_lenet_model, max_epoch=EPOCHS, df=df,
            mnist_train=given.tfds.load("mnist", "train").map(given.preprocess),
        )  # fmt: skip
        names = program.run(create, "orca/tf1-fit")

        scored = names["predictions"].collect()
        scores = np.array([row.prediction for row in scored])
        pictures = np.array([row.image for row in scored], np.float32)
        if "graph" in create:
            plain = names["est"].sess.run(names["logits"], {names["images"]: pictures})
        else:
            plain = names["model"].predict(pictures)
        np.testing.assert_allclose(scores, plain, rtol=1e-4, atol=1e-4)
        assert np.mean(scores.argmax(1) == [row.label for row in scored]) >= ENOUGH
