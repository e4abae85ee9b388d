"""The programs of omega|ml's page on TensorFlow, with a small MobileNetV2: equal predictions everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flavour
import numpy as np
import pytest
import requests
from matplotlib import pyplot as plt
from stored_functions import IMAGES, SHAPE, classify, flowers

import kindler.compat.omegaml as om
from tests.seeds.programs import Program
from tests.serve.served import serving
from tests.warm import end_warm_processes
from tests.whole import WHOLE

pytestmark = pytest.mark.skipif(flavour.FLAVOUR != "tensorflow", reason="programs of TensorFlow's")
WAIT_S = 240
LABELS = ["daisy", "dandelion", "rose", "sunflower", "tulip"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """The program of the page, after "tfkeras-flower" was trained and stored."""
    import tensorflow as tf

    folder = tmp_path_factory.mktemp("programs")
    image = folder / "image.png"
    pixels = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)
    tf.io.write_file(str(image), tf.io.encode_png(pixels))
    rows = tf.data.Dataset.from_tensor_slices((IMAGES, np.arange(len(IMAGES)) % len(LABELS)))
    made = Program(
        folder, {"image": str(image), "alpha": "1.0" if WHOLE else "0.35"},
        tf=tf, np=np, plt=plt, requests=requests, label_names=LABELS, ds=rows.repeat().batch(2),
        store=str(folder / "store"),
    )  # fmt: skip
    om.setup(made.names["store"], broker="local://?workers=1", trusted=True)
    made.run("omegaml/train", "omegaml/put")
    yield made
    om.setup()
    end_warm_processes()


@pytest.fixture(scope="module")
def model(program: Program) -> Any:
    return program.names["model"]


def same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_an_image_gets_the_same_prediction_here_on_the_runtime_and_over_http(
    program: Program, model: Any
) -> None:
    """The fixture ran "omegaml/train" and "omegaml/put"."""
    names = program.run("omegaml/predict-here")
    expected = model.predict(np.array([names["img"]]), verbose=0)
    assert expected.shape == (1, len(LABELS))
    same(names["result"], expected)

    same(program.run("omegaml/predict-on-the-runtime")["result"].get(WAIT_S), expected)

    with serving(names["store"]) as served:
        names["predict_url"] = f"{served.url}/api/v1/model/tfkeras-flower/predict"
        same(program.run("omegaml/predict-over-rest")["prediction"], expected)


def test_a_virtual_dataset_of_tf_data_feeds_models_and_model_functions(model: Any) -> None:
    expected = model.predict(IMAGES, verbose=0)
    om.datasets.put(flowers, "flowers")
    om.models.put(classify, "classifier")

    same(model.predict(om.datasets.get("flowers"), verbose=0), expected)
    same(om.runtime.model("tfkeras-flower").predict("flowers").get(WAIT_S), expected)
    same(om.runtime.model("classifier").predict("flowers").get(WAIT_S), expected)


def test_examples_make_the_round_trip_to_a_prediction(model: Any) -> None:
    import tensorflow as tf

    def example(image: Any) -> Any:
        values = tf.train.FloatList(value=image.ravel())
        return tf.train.Example(
            features=tf.train.Features(feature={"image": tf.train.Feature(float_list=values)})
        )

    def parse(record: Any) -> Any:
        return tf.io.parse_single_example(record, {"image": tf.io.FixedLenFeature(SHAPE, tf.float32)})[
            "image"
        ]

    examples = [example(image) for image in IMAGES]
    om.datasets.put(examples, "examples")

    assert om.datasets.get("examples") == examples
    dataset = om.datasets.get("examples", as_="tf.data").map(parse).batch(2)
    same(model.predict(dataset, verbose=0), model.predict(IMAGES, verbose=0))


def test_a_keras_model_put_as_savedmodel_predicts_the_same_and_is_not_fitted(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(2)])
    omega = om.Omega(tmp_path_factory.mktemp("saved") / "store")
    assert omega.models.put(model, "dense", as_savedmodel=True).kind == "savedmodel"
    x = np.random.default_rng(0).random((4, 3), np.float32)
    saved = omega.models.get("dense")
    np.testing.assert_allclose(saved.predict(x), model.predict(x, verbose=0), rtol=1e-5)
    with pytest.raises(ValueError, match="cannot be fitted"):
        saved.fit(x, x)
    omega.close()
