"""The programs of omega|ml's documentation, with a small MobileNetV2: the same predictions everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flavour
import numpy as np
import pytest
from stored_functions import IMAGES, SHAPE, classify, flowers

import kindler.compat.omegaml as om
from kindler.engine import nursery

pytestmark = pytest.mark.skipif(flavour.FLAVOUR != "tensorflow", reason="programs of TensorFlow's")
WAIT_S = 240


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, keras: Any) -> Iterator[Any]:
    """What the model says of the images; it is in the store as "tfkeras-flower"."""
    om.setup(str(tmp_path_factory.mktemp("store")), broker="local://?workers=1", trusted=True)
    mobile_net = keras.applications.MobileNetV2(
        input_shape=SHAPE, include_top=False, weights=None, alpha=0.35
    )
    mobile_net.trainable = False
    model = keras.Sequential([mobile_net, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(5)])
    model.compile(optimizer="adam", loss=keras.losses.sparse_categorical_crossentropy, metrics=["accuracy"])
    om.models.put(model, "tfkeras-flower")
    yield model.predict(IMAGES, verbose=0)
    om.setup()
    nursery.close()


def same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_model_predicts_the_same_here_and_on_the_runtime(expected: Any) -> None:
    model_ = om.models.get("tfkeras-flower")
    same(model_.predict(IMAGES, verbose=0), expected)

    result = om.runtime.model("tfkeras-flower").predict(IMAGES)
    same(result.get(WAIT_S), expected)


def test_a_virtual_dataset_of_tf_data_feeds_models_and_model_functions(expected: Any) -> None:
    om.datasets.put(flowers, "flowers")
    om.models.put(classify, "classifier")

    same(om.models.get("tfkeras-flower").predict(om.datasets.get("flowers"), verbose=0), expected)
    same(om.runtime.model("tfkeras-flower").predict("flowers").get(WAIT_S), expected)
    same(om.runtime.model("classifier").predict("flowers").get(WAIT_S), expected)


def test_examples_make_the_round_trip_to_a_prediction(expected: Any) -> None:
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
    same(om.models.get("tfkeras-flower").predict(dataset, verbose=0), expected)


def test_fit_on_the_runtime_publishes_a_trained_version(expected: Any, keras: Any) -> None:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    om.models.put(model, "small")
    x, y = np.random.default_rng(0).random((20, 4), np.float32), np.arange(20) % 2

    version = om.runtime.model("small").fit(x, y, epochs=2, batch_size=10).get(WAIT_S)

    assert (version.name, version.number) == ("small", 2)
    assert [row["epoch"] for row in version.attributes["history"]] == [1, 2]
    before, after = om.models.get("small", version=-2), om.models.get("small", version=-1)
    assert not np.array_equal(before.get_weights()[0], after.get_weights()[0])
    same(om.runtime.model("small").predict(x).get(WAIT_S), after.predict(x, verbose=0))
