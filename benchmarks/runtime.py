"""What does a round trip to a model that stays in a worker's memory cost, against loading it for each call?

A Keras network of MNIST's shape (784-256-10) is in a store on SQLite. One side sends 32 rows to the
runtime's worker and waits for the result. The other reads the model from the store and predicts the same
rows in this process, which is spared the way to another one. A model in this process's own memory is shown
beside. All sides predict by `predict_on_batch`, which is Keras' fastest for one batch.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from _bench import CLASSES, WIDTH, Report, arguments, rounds, workplace

ROWS = 32
CALLS = 200
LOADS = 10

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def main() -> None:
    given = arguments(__doc__, repeats=5)
    calls, loads = (10, 2) if given.quick else (CALLS, LOADS)
    report = Report(
        "runtime", "milliseconds from data to prediction: resident, or loaded per call", quick=given.quick
    )
    import keras
    import numpy as np

    from kindler import Store

    with workplace() as folder:
        om = Store(folder / "store", broker="local://?workers=1")
        layers = keras.layers
        model = keras.Sequential(
            [layers.Input((WIDTH,)), layers.Dense(256, activation="relu"), layers.Dense(CLASSES)]
        )
        om.models.put(model, "net")
        x = np.random.default_rng(0).random((ROWS, WIDTH), np.float32)
        remote = om.runtime.model("net")
        work: dict[str, Callable[[], float]] = {
            "resident, in a worker": lambda: _median(lambda: remote.predict(x).get(300), calls),
            "loaded per call, here": lambda: _median(lambda: om.models.get("net").predict_on_batch(x), loads),
            "in memory, here": lambda: _median(lambda: model.predict_on_batch(x), calls),
        }
        found = rounds(work, repeats=given.repeats, warm_up=True)
        om.close()
    for name, values in found.items():
        report.figure(name, [1000 * value for value in values], "ms")
    report.ratio(
        "loaded per call / resident",
        found["loaded per call, here"],
        found["resident, in a worker"],
        at_least=2,
    )
    report.finish(rows=ROWS, calls=calls)


def _median(call: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
