"""Keras over a Spark DataFrame: `python keras_frame.py FLAVOUR WORK_FOLDER` prints what came out, as JSON.

The same weights are judged by Kindler's workers and by plain Keras in this process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

FLAVOUR, WORK = sys.argv[1], sys.argv[2]
BACKEND = "tensorflow" if FLAVOUR == "tf_keras" else FLAVOUR
os.environ["KERAS_BACKEND"] = BACKEND
if FLAVOUR == "tf_keras":
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
keras: Any = importlib.import_module("tf_keras" if FLAVOUR == "tf_keras" else "keras")

import kindler  # noqa: E402
from kindler import Columns, Estimator  # noqa: E402

SIZES = (3, 70, 0, 24)  # four uneven partitions, one of them empty
SCHEMA = "id long, name string, x array<float>, y long"
COLUMNS = {"feature_cols": "x", "label_cols": "y"}


def model_creator(config: dict[str, Any]) -> Any:
    library: Any = importlib.import_module(config["library"])
    model = library.Sequential(
        [
            library.layers.Input((4,)),
            library.layers.Dense(8, activation="tanh"),
            library.layers.Dense(1, activation="sigmoid"),
        ]
    )
    metrics = ["accuracy", library.metrics.AUC(name="auc")]
    model.compile(optimizer=library.optimizers.Adam(0.01), loss="binary_crossentropy", metrics=metrics)
    return model


class Files(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_end(self, logs: Any = None) -> None:
        np.savez(Path(WORK, f"rank-{self.params['rank']}.npz"), *self.model.get_weights())


def main() -> None:
    spark = kindler.init("local[2]")
    random = np.random.default_rng(7)
    x = random.normal(size=(sum(SIZES), 4)).astype(np.float32)
    y = (x.sum(1) + random.normal(scale=0.5, size=len(x)) > 0).astype(int)
    rows = [(i, f"row {i}", x[i].tolist(), int(y[i])) for i in range(len(x))]
    ends = np.cumsum(SIZES)
    parts = [rows[end - size : end] for end, size in zip(ends, SIZES, strict=True)]
    numbers = spark.sparkContext.parallelize(range(len(parts)), len(parts))
    frame = spark.createDataFrame(numbers.flatMap(lambda i: parts[i]), SCHEMA)

    est = Estimator.from_keras(
        model=model_creator, config={"library": keras.__name__}, workers=2, keras_backend=BACKEND
    )
    history = est.fit(
        frame,
        epochs=3,
        batch_size=20,
        callbacks=[Files()],
        columns=Columns(ingest="inline"),
        verbose=0,
        **COLUMNS,
    )
    figures = est.evaluate(frame, verbose=0)
    scored = est.predict(frame, batch_size=16)
    est.save(Path(WORK, "model.keras"))

    plain = keras.saving.load_model(str(Path(WORK, "model.keras")))
    judged = plain.evaluate(x, y, verbose=0, return_dict=True)
    alone = np.asarray(plain.predict(x, verbose=0))
    after = scored.collect()
    frame.write.parquet(str(Path(WORK, "frame")))
    of_files = est.fit(
        spark.read.parquet(str(Path(WORK, "frame"))), columns=Columns(ingest="direct"), verbose=0
    )
    first, second = (list(np.load(Path(WORK, f"rank-{rank}.npz")).values()) for rank in (0, 1))
    told = {
        "samples": [*history["num_samples"], *of_files["num_samples"]],
        "ranks agree": all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)),
        "saved what was trained": all(
            np.array_equal(a, b) for a, b in zip(first, plain.get_weights(), strict=True)
        ),
        "figures": figures,
        "judged": {name: float(value) for name, value in judged.items()},
        "columns": scored.columns,
        "rows kept": [tuple(row)[:2] for row in after] == [row[:2] for row in rows],
        "off by": float(np.abs(np.array([row.prediction for row in after]) - alone).max()),
    }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
