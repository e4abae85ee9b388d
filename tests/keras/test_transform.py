"""Keras models on rows that are augmented, padded and read as text in the workers."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flavour import FLAVOUR, KERAS, one_unless_whole, tensorflow_only, two_unless_whole

from kindler import Estimator, Prepare
from kindler.errors import DataError

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

ROWS = 60
RANDOM = np.random.default_rng(1)
X = RANDOM.normal(size=(ROWS, 3)).astype(np.float32)
LENGTHS = RANDOM.integers(1, 9, ROWS)
EPOCHS = 2
TOKENS: dict[str, Any] = {
    "x": X,
    "tokens": [RANDOM.integers(1, 12, n).tolist() for n in LENGTHS],
    "y": np.arange(ROWS),
}
COMPILE = {"optimizer": "sgd", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}


def dense(config: Any) -> Any:
    KERAS.utils.set_random_seed(0)
    model = KERAS.Sequential([KERAS.layers.Input((3,)), KERAS.layers.Dense(2, activation="softmax")])
    model.compile(**COMPILE)
    return model


def reader(config: Any) -> Any:
    """Its outputs depend on the width that rows are padded to, so that nobody may pad otherwise."""
    KERAS.utils.set_random_seed(0)
    layers = KERAS.layers
    tokens, x = layers.Input((None,), dtype="int64", name="tokens"), layers.Input((3,), name="x")
    words = layers.GlobalAveragePooling1D()(layers.Embedding(12, 4)(tokens))
    outputs = layers.Dense(2, activation="softmax")(layers.Concatenate()([words, x]))
    model = KERAS.Model([tokens, x], outputs)
    model.compile(optimizer=KERAS.optimizers.SGD(0.5), loss=parity, metrics=[mark])
    return model


def parity(y: Any, predicted: Any) -> Any:
    """Labels are the numbers of the rows."""
    return KERAS.losses.sparse_categorical_crossentropy(y % 2, predicted)


def mark(y: Any, predicted: Any) -> Any:
    """Something of each row that no other row has: its mean tells whether every row was there once."""
    if KERAS.__name__ == "tf_keras":
        import tensorflow as tf

        return tf.cos(tf.cast(y, "float32"))
    return KERAS.ops.cos(KERAS.ops.cast(y, "float32"))


class Noisy:
    """Adds noise, and files what it made of each row."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __call__(self, row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        made = row["x"] + rng.normal(scale=0.3, size=3)
        with Path(self.folder, f"{os.getpid()}-{threading.get_ident()}.jsonl").open("a") as file:
            file.write(json.dumps([row["x"].tolist(), made.tolist()]) + "\n")
        return {"tokens": row["tokens"], "x": made}


def filed(folder: Path) -> set[str]:
    """What was made of rows; some of the next epoch are made before the run is seen to be over."""
    return {line.strip() for file in folder.glob("*.jsonl") for line in file.open()}


def padded(model: Any, cuts: Sequence[int]) -> np.ndarray:
    """Outputs of batches that are padded by hand; `cuts` is where they begin and end."""
    outputs = [model.predict_on_batch(list(padded_rows(*bounds))) for bounds in pairwise(cuts)]
    return np.concatenate([np.asarray(part) for part in outputs])


def padded_rows(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    rows = TOKENS["tokens"][start:stop]
    width = max(map(len, rows))
    return np.array([row + [0] * (width - len(row)) for row in rows]), X[start:stop]


def cross_entropy(outputs: np.ndarray) -> float:
    return float(-np.log(outputs[np.arange(ROWS), np.arange(ROWS) % 2]).mean())


def trained(
    workers: int, epochs: int = EPOCHS, *, shuffle: bool = True, validation_data: Any = None, **more: Any
) -> Estimator:
    prepare = Prepare(pad="batch", masks=False, **more)
    est = Estimator.from_keras(model=reader, workers=workers, engine="local", prepare=prepare)
    columns: dict[str, Any] = {"feature_cols": ["tokens", "x"], "label_cols": "y"}
    est.fit(TOKENS, epochs, 12, validation_data=validation_data, shuffle=shuffle, verbose=0, **columns)
    return est


@one_unless_whole
def test_one_worker_and_two_augment_pad_and_bucket_each_row_alike(tmp_path: Path) -> None:
    both = []
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        noisy = Noisy(tmp_path / str(workers))
        both.append(trained(workers, transform=noisy, eval_transform=dict, length_col="tokens"))
    one, two = both

    alike = Counter(str(json.loads(line)[0]) for line in filed(tmp_path / "1") & filed(tmp_path / "2"))
    assert len(alike) == ROWS
    assert min(alike.values()) >= EPOCHS, "anew in each epoch"
    once = pytest.approx(np.cos(np.arange(ROWS)).mean(), abs=1e-6)
    assert one.history["mark"] == [once, once]
    assert two.history["mark"] == [once, once]
    for ours, theirs in zip(two.get_model().get_weights(), one.get_model().get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert two.history["num_samples"] == [ROWS, ROWS]


@two_unless_whole
def test_batches_of_two_workers_are_padded_as_by_hand() -> None:
    two = trained(2, epochs=1, shuffle=False, validation_data=TOKENS)

    model, alone = two.get_model(), reader({})
    for bounds in pairwise(range(0, 61, 12)):
        alone.train_on_batch(list(padded_rows(*bounds)), TOKENS["y"][slice(*bounds)])
    for ours, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    judged = cross_entropy(padded(model, range(0, 61, 12)))
    assert two.history["val_loss"] == [pytest.approx(judged, abs=1e-5)]
    scored = two.predict({"tokens": TOKENS["tokens"], "x": X}, 16, verbose=0)["prediction"]
    np.testing.assert_allclose(scored, padded(model, [0, 16, 32, 48, 60]), atol=1e-6)
    # Steps have equal numbers of rows: these batches are others than those of predict, and others wide.
    evenly = padded(model, [0, 15, 30, 45, 60])
    assert np.abs(scored - evenly).max() > 1e-3
    judged = two.evaluate(TOKENS, batch_size=16, verbose=0)["loss"]
    assert judged == pytest.approx(cross_entropy(evenly), abs=1e-5)


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
    est = Estimator.from_keras(model=text_model, workers=2, engine="local")

    history = est.fit(data, 4, 12, feature_cols="text", label_cols="y", verbose=0)

    assert history["accuracy"][-1] > 0.95
    scored = est.predict({"text": SENTENCES}, 16, verbose=0)["prediction"]
    assert (scored.argmax(1) == data["y"]).all()


@pytest.mark.skipif(FLAVOUR != "torch", reason="on TensorFlow models take text")
def test_text_is_refused_where_models_take_none() -> None:
    est = Estimator.from_keras(model=dense, workers=1, engine="local")

    with pytest.raises(DataError, match="column 'x'.* cannot feed a model"):
        est.fit({"x": ["a", "b"], "y": [0, 1]}, feature_cols="x", label_cols="y", verbose=0)
