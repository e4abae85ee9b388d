"""A program that uses Kindler with Keras finds its own randomness and settings as it left them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import problems
import pytest
from flavour import FLAVOUR, KERAS, keras2_unless_whole

from kindler import Estimator
from tests import caller

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

DATA = problems.problem(16)


def estimator(**options: object) -> Estimator:
    config = {"flavour": FLAVOUR, "between": "dropout"}
    return Estimator.from_keras(
        model=problems.classifier, config=config, workers=1, engine="local", **options
    )


def draws() -> list[float]:
    initial = KERAS.initializers.RandomNormal()(shape=(1,))
    return [random.random(), np.random.random(), float(np.asarray(initial)[0])]


@keras2_unless_whole
def test_no_call_changes_the_callers_randomness_or_settings(tmp_path: Path) -> None:
    KERAS.utils.set_random_seed(11)
    expected = [draws(), draws()]
    KERAS.utils.set_random_seed(11)
    first = draws()
    data = {"x": DATA["x"], "y": DATA["y"]}
    calls = caller.entries(estimator, data, {"x": DATA["x"]}, tmp_path, suffix=".keras")

    assert set(calls) | {"from_torch"} | caller.ELSEWHERE == caller.public_entries()
    if FLAVOUR == "jax":  # which has another process export; test_export.py looks at what that changes here
        del calls["to_openvino"]
    assert caller.changed_by(calls) == {}
    assert [first, draws()] == expected


class Draws(KERAS.callbacks.Callback):
    """Files what user code would draw after each step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        with Path(self.folder, f"{self.params['rank']}.txt").open("a") as file:
            file.write(json.dumps([random.random(), np.random.random()]) + "\n")


@keras2_unless_whole
def test_user_code_draws_other_numbers_on_each_worker_and_epoch_and_the_same_in_each_run(
    tmp_path: Path,
) -> None:
    def drawn(name: str, *fits: int) -> list[list[float]]:
        folder = tmp_path / name
        folder.mkdir()
        est = Estimator.from_keras(
            model=problems.classifier, config={"flavour": FLAVOUR}, workers=2, engine="local"
        )
        for epochs in fits:
            data = {"x": DATA["x"], "y": DATA["y"]}
            est.fit(data, epochs=epochs, batch_size=8, verbose=0, callbacks=[Draws(folder)])
        return [json.loads(line) for rank in range(2) for line in (folder / f"{rank}.txt").open()]

    once = drawn("once", 2)
    for numbers in zip(*once, strict=True):
        assert len(numbers) == len(set(numbers)) == 8
    assert drawn("in two runs", 1, 1) == once
