"""Keras models on rows that are augmented, padded and read as text in the workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flavour import FLAVOUR, KERAS, tensorflow_only, tensorflow_unless_whole

from kindler import Estimator
from kindler.errors import DataError
from tests.whole import whole_only

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

ROWS = 60
RANDOM = np.random.default_rng(1)
X = RANDOM.normal(size=(ROWS, 3)).astype(np.float32)
DATA = {"x": X, "y": (X.sum(1) > 0).astype(np.int64)}
LENGTHS = RANDOM.integers(1, 9, ROWS)
TOKENS = {
    "tokens": [RANDOM.integers(1, 12, n).tolist() for n in LENGTHS],
    "y": (LENGTHS > 4).astype(np.int64),
}
COMPILE = {"optimizer": "sgd", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}


def dense(config: Any) -> Any:
    KERAS.utils.set_random_seed(0)
    model = KERAS.Sequential([KERAS.layers.Input((3,)), KERAS.layers.Dense(2, activation="softmax")])
    model.compile(**COMPILE)
    return model


def reader(config: Any) -> Any:
    """Its outputs depend on the width that rows are padded to."""
    KERAS.utils.set_random_seed(0)
    layers = KERAS.layers
    model = KERAS.Sequential(
        [
            layers.Input((None,), dtype="int64"),
            layers.Embedding(12, 4),
            layers.GlobalAveragePooling1D(),
            layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile(**COMPILE)
    return model


def noisy(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": row["x"] + rng.normal(scale=0.3, size=3)}


def trained(creator: Any, data: Any, workers: int, **options: Any) -> Estimator:
    est = Estimator.from_keras(model_creator=creator, workers=workers, engine="local", **options)
    features = "x" if "x" in data else "tokens"
    est.fit(data, 2, 12, feature_cols=features, label_cols="y", validation_data=data, verbose=0)
    return est


@tensorflow_unless_whole
@pytest.mark.parametrize(
    ("creator", "data", "options"),
    [
        pytest.param(dense, DATA, {"transform": noisy, "eval_transform": dict}, marks=whole_only),
        (reader, TOKENS, {"pad": "batch", "masks": False, "length_col": "tokens"}),
    ],
)
def test_one_worker_and_two_train_alike_on_prepared_rows(creator: Any, data: Any, options: Any) -> None:
    one, two = (trained(creator, data, workers, **options) for workers in (1, 2))

    for ours, theirs in zip(two.get_model().get_weights(), one.get_model().get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert two.history["num_samples"] == [ROWS, ROWS]
    assert two.history["val_loss"] == pytest.approx(one.history["val_loss"], abs=1e-5)
    scored = two.predict({name: values for name, values in data.items() if name != "y"}, 16, verbose=0)
    judged = two.evaluate(data, batch_size=16, verbose=0)
    assert judged["accuracy"] == pytest.approx((scored["prediction"].argmax(1) == data["y"]).mean())


SENTENCES = [f"{'good' if i % 2 else 'bad'} film number {i % 7}" for i in range(ROWS)]


def text_model(config: Any) -> Any:
    import tensorflow as tf

    KERAS.utils.set_random_seed(0)
    words = KERAS.layers.TextVectorization(output_mode="multi_hot", max_tokens=16)
    words.adapt(tf.constant(SENTENCES))
    model = KERAS.Sequential(
        [KERAS.layers.Input((), dtype="string"), words, KERAS.layers.Dense(2, activation="softmax")]
    )
    model.compile(**{**COMPILE, "optimizer": KERAS.optimizers.Adam(0.1)})
    return model


@tensorflow_only
def test_a_model_of_text_takes_a_column_of_text() -> None:
    data = {"text": SENTENCES, "y": np.arange(ROWS) % 2}
    est = Estimator.from_keras(model_creator=text_model, workers=2, engine="local")

    history = est.fit(data, 4, 12, feature_cols="text", label_cols="y", verbose=0)

    assert history["accuracy"][-1] > 0.95
    scored = est.predict({"text": SENTENCES}, 16, verbose=0)["prediction"]
    assert (scored.argmax(1) == data["y"]).all()


@pytest.mark.skipif(FLAVOUR != "torch", reason="on TensorFlow models take text")
def test_text_is_refused_where_models_take_none() -> None:
    est = Estimator.from_keras(model_creator=dense, workers=1, engine="local")

    with pytest.raises(DataError, match="column 'x'.* cannot feed a model"):
        est.fit({"x": ["a", "b"], "y": [0, 1]}, feature_cols="x", label_cols="y", verbose=0)
