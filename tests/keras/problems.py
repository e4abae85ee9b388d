"""Small problems, models of either Keras, and the single process that several workers must equal."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WIDTH = 6


def problem(rows: int) -> dict[str, np.ndarray]:
    """Features, a yes-or-no label that depends on them, and a weight per row."""
    random = np.random.default_rng(7)
    x = random.normal(size=(rows, WIDTH)).astype(np.float32)
    y = (x[:, 0] - x[:, 1] + random.normal(scale=0.5, size=rows) > 0).astype(np.int64)
    return {"x": x, "y": y, "w": random.uniform(0.2, 2.0, size=rows).astype(np.float32)}


def library(config: Mapping[str, Any]) -> Any:
    return importlib.import_module("tf_keras" if config["flavour"] == "tf_keras" else "keras")


def optimizer(keras: Any, name: str) -> Any:
    if name == "still":
        return keras.optimizers.SGD(0.0)
    return keras.optimizers.Adam(0.01) if name == "adam" else keras.optimizers.SGD(0.05, momentum=0.9)


def classifier(config: Mapping[str, Any]) -> Any:
    """Two dense layers; `config` chooses the optimizer, what is between them, and a metric slow to trace."""
    keras = library(config)
    between = {
        "plain": [],
        "dropout": [keras.layers.Dropout(0.3)],
        "batchnorm": [keras.layers.BatchNormalization(momentum=0.8)],
        "both": [keras.layers.BatchNormalization(momentum=0.8), keras.layers.Dropout(0.3)],
    }[config.get("between", "plain")]
    inputs = keras.Input((WIDTH,), name="x")
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    for layer in between:
        hidden = layer(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(
        optimizer=optimizer(keras, config.get("optimizer", "adam")),
        loss="binary_crossentropy",
        metrics=["accuracy", *([keras.metrics.AUC(name="auc")] if config.get("auc") else [])],
        weighted_metrics=[] if not config.get("weighted") else ["mse"],
    )
    return model


def note_weights(keras: Any, folder: Path) -> Any:
    """A callback that files each rank's weights at the end of training."""

    class NoteWeights(keras.callbacks.Callback):
        def __init__(self, folder: str) -> None:
            super().__init__()
            self.folder = folder

        def on_train_end(self, logs: Any = None) -> None:
            name = f"rank-{self.params['rank']}-of-{self.params['size']}.npz"
            np.savez(Path(self.folder, name), *self.model.get_weights())

    return NoteWeights(str(folder))


def noted_weights(folder: Path) -> list[list[np.ndarray]]:
    return [list(np.load(file).values()) for file in sorted(folder.glob("rank-*.npz"))]


def fit_alone(
    keras: Any, model: Any, epochs: Sequence[Sequence[tuple[Any, Any]]], **options: Any
) -> dict[str, list[float]]:
    """Plain `model.fit` over those batches, epoch by epoch; the history."""
    told: dict[str, list[float]] = {}
    for number, batches in enumerate(epochs):
        x = [features[0] if len(features) == 1 else list(features) for features, _ in batches]
        y = [labels[0] for _, labels in batches]
        w = [labels[1] for _, labels in batches] if len(batches[0][1]) > 1 else None
        row = model.fit(
            _plain_dataset(keras, x, y, w),
            initial_epoch=number,
            epochs=number + 1,
            verbose=0,
            shuffle=False,
            **options,
        ).history
        for name, values in row.items():
            told.setdefault(name, []).extend(float(value) for value in values)
    return told


def _plain_dataset(keras: Any, x: list[Any], y: list[Any], w: list[Any] | None) -> Any:
    base = keras.utils.Sequence if keras.__name__ == "tf_keras" else keras.utils.PyDataset

    class Given(base):  # type: ignore[misc]
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, number: int) -> Any:
            return (x[number], y[number]) if w is None else (x[number], y[number], w[number])

    return Given()


def largest_difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    assert len(ours) == len(theirs)
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True) if a.size)


def batches_of_all(model: Any, x: Any, y: Any, *, steps: int) -> None:
    """So many steps of one process, each over all rows."""
    for _ in range(steps):
        model.train_on_batch(x, y)


def seeded(model_creator: Any, config: Mapping[str, Any], seed: int = 0) -> Any:
    """The model that every worker starts from."""
    library(config).utils.set_random_seed(seed)
    return model_creator(config)
