"""How fast does Keras train in workers, against plain `model.fit` on the same backend?

A small convolutional network on 28 x 28 images (a step of 256 rows takes well over 20 ms on one thread),
and the MLP 784-64-10 whose steps are so short that what surrounds them shows. Adam, one thread a process.
Rows per second of each epoch but the first two, the median of them. Plain `fit` holds its rows in memory as
numpy arrays.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from _bench import CLASSES, WIDTH, Report, arguments, rounds

BATCH = 256
BACKENDS = ("tensorflow", "jax", "torch")
SKIPPED = 2  # epochs that trace and compile
# Epochs of a second or two: convolutions are not equally fast everywhere.
ROWS = {
    ("conv", "tensorflow"): 5_120,
    ("conv", "jax"): 2_560,
    ("conv", "torch"): 2_560,
    **{("mlp", backend): 30_720 for backend in BACKENDS},
}


def main() -> None:
    given = arguments(__doc__, repeats=3, mlp="also the MLP, whose steps take a few milliseconds")
    epochs = 3 if given.quick else 10
    report = Report("keras_train", f"rows/s of training, batch {BATCH}, 1 thread each", quick=given.quick)
    for kind in ("conv", *(("mlp",) if given.mlp else ())):
        for backend in BACKENDS:
            count = 1_024 if given.quick else ROWS[kind, backend]
            _measure(report, kind, backend, count, epochs, given)
    report.finish(epochs=epochs, batch_size=BATCH)


def _measure(report: Report, kind: str, backend: str, count: int, epochs: int, given: Any) -> None:
    measured = rounds(
        {
            "model.fit": lambda: plain(kind, backend, count, epochs),
            "1 worker": lambda: kindler(kind, backend, count, epochs, workers=1),
            "2 workers": lambda: kindler(kind, backend, count, epochs, workers=2),
        },
        repeats=given.repeats,
        warm_up=False,
    )
    name = f"{kind}, {backend}"
    for way, values in measured.items():
        report.figure(f"{name}: {way}", values, "rows/s")
    one, two = measured["1 worker"], measured["2 workers"]
    wanted = {"at_least": 0.95} if kind == "conv" else {}
    report.ratio(f"{name}: 1 worker / model.fit", one, measured["model.fit"], **wanted)
    report.ratio(f"{name}: 2 workers / 1 worker", two, one, **({"at_least": 1.6} if kind == "conv" else {}))


def kindler(kind: str, backend: str, count: int, epochs: int, *, workers: int) -> float:
    """Steady rows/s of an Estimator on the local engine."""
    from kindler import Estimator, RunSettings

    x, y = data(count)
    estimator = Estimator.from_keras(
        model=model,
        config={"kind": kind},
        workers=workers,
        engine="local",
        keras_backend=backend,
        settings=RunSettings(threads=1),
    )
    history = estimator.fit({"x": x, "y": y}, epochs=epochs, batch_size=BATCH, verbose=0)
    return median(history["rows_per_s"][SKIPPED:])


def plain(kind: str, backend: str, count: int, epochs: int) -> float:
    """The same of `model.fit` in a fresh process."""
    spawn = multiprocessing.get_context("spawn")
    found = spawn.Queue()
    child = spawn.Process(target=_plain, args=(kind, backend, count, epochs, found))
    child.start()
    seconds = found.get(timeout=900)
    child.join(60)
    return count / median(seconds[SKIPPED:])


def _plain(kind: str, backend: str, count: int, epochs: int, found: Any) -> None:
    os.environ.update(KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="2", OMP_NUM_THREADS="1", NPROC="1")
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    import keras

    if backend == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
    times: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            times.append(time.perf_counter() - self.began)

    x, y = data(count)
    model({"kind": kind}).fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[Clock()])
    found.put(times)


def model(config: Mapping[str, Any]) -> Any:
    """A compiled Keras model."""
    import keras
    from keras import layers

    inside = {
        "mlp": [layers.Dense(64, activation="relu")],
        "conv": [
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(32, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
        ],
    }[config["kind"]]
    made = keras.Sequential([layers.Input((WIDTH,)), *inside, layers.Dense(CLASSES, activation="softmax")])
    made.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return made


def data(count: int) -> Any:
    """Random images and labels."""
    import numpy as np

    random = np.random.default_rng(0)
    return random.random((count, WIDTH), dtype=np.float32), random.integers(0, CLASSES, count)


if __name__ == "__main__":
    main()
