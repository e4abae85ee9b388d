"""Where the time of a Keras run goes; PyTorch's tests have the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flavour import FLAVOUR, KERAS

from kindler import Epochs, Estimator

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

X = np.linspace(0, 1, 48, dtype=np.float32).reshape(16, 3)
STEPS = 4


def line(config: Any) -> Any:
    model = KERAS.Sequential([KERAS.layers.Input((3,)), KERAS.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def slow_batches(config: dict[str, Any], batch_size: int) -> Iterator[Any]:
    """Writes down how long each took."""
    for _ in range(2 * STEPS):
        began = time.perf_counter()
        time.sleep(0.02)
        with Path(config["folder"], "took").open("a") as file:
            file.write(f"{time.perf_counter() - began}\n")
        yield X, X.sum(1)


def test_waiting_for_slow_batches_is_ingest_and_the_parts_add_up(tmp_path: Path) -> None:
    config = {"folder": str(tmp_path)}
    est = Estimator.from_keras(model=line, config=config, workers=1, engine="local")

    began = time.perf_counter()
    goodput = est.fit(slow_batches, epochs=Epochs(2, steps_per_epoch=STEPS), batch_size=16, verbose=0).goodput
    around = time.perf_counter() - began

    assert goodput is not None
    seconds, took = goodput.seconds, sum(map(float, (tmp_path / "took").read_text().split()))
    assert sum(seconds.values()) <= around
    assert min(seconds.values()) >= 0.0
    assert seconds["steps"] > 0.0
    # TensorFlow reads a batch while the step before computes: that is no waiting.
    at_once = FLAVOUR not in ("tensorflow", "tf_keras")
    assert seconds["ingest"] + (0.0 if at_once else seconds["steps"] + seconds["other"]) >= took
