"""Callbacks of Keras do on several workers what they do in one process; what they write is written once."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
import watchers
from flavour import KERAS, one_is_enough, tensorflow_unless_whole

import kindler
from kindler import Epochs, Estimator, History
from kindler.errors import ConfigError

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

DATA = problems.problem(64)
CONTRARY = {**DATA, "y": 1 - DATA["y"]}  # the better the model, the worse its validation
COLUMNS = {"feature_cols": "x", "label_cols": "y"}
OPTIONS = {"batch_size": 16, "verbose": 0, **COLUMNS}


def estimator(flavour: str, workers: int = 2, **options: Any) -> Estimator:
    return Estimator.from_keras(
        model=problems.classifier,
        config={"flavour": flavour},
        workers=workers,
        engine="local",
        **options,
    )


@dataclass(frozen=True)
class Run:
    """A run of two workers with many callbacks."""

    history: History
    folder: Path
    weights: list[np.ndarray]


@pytest.fixture(scope="module")
def run(flavour: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("callbacks")
    est = estimator(flavour)
    callbacks = [
        KERAS.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
        KERAS.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5),
        KERAS.callbacks.ModelCheckpoint(str(folder / "best.keras"), save_best_only=True),
        KERAS.callbacks.ModelCheckpoint(str(folder / "epoch-{epoch}.weights.h5"), save_weights_only=True),
        KERAS.callbacks.CSVLogger(str(folder / "log.csv")),
        KERAS.callbacks.TensorBoard(str(folder / "board")),
        watchers.Files(folder),
    ]
    history = est.fit(DATA, epochs=9, validation_data=CONTRARY, callbacks=callbacks, **OPTIONS)
    return Run(history, folder, est.get_model().get_weights())


@tensorflow_unless_whole
def test_early_stopping_ends_all_workers_at_the_same_epoch(run: Run) -> None:
    first, second = watchers.lines(run.folder)

    assert run.history["epoch"] == [1, 2, 3, 4]
    assert [line["epoch"] for line in first] == [line["epoch"] for line in second] == [0, 1, 2, 3]


@tensorflow_unless_whole
def test_early_stopping_restores_the_weights_of_the_best_epoch(run: Run) -> None:
    best = watchers.weights_after(run.folder, epoch=0)
    last = watchers.weights_after(run.folder, epoch=3)

    assert problems.largest_difference(run.weights, best) == 0
    assert problems.largest_difference(run.weights, last) > 1e-3


@tensorflow_unless_whole
def test_callbacks_see_the_figures_of_all_workers(run: Run) -> None:
    first, second = watchers.lines(run.folder)

    assert [line["logs"] for line in first] == [line["logs"] for line in second]
    assert [line["logs"]["val_loss"] for line in first] == run.history["val_loss"]
    assert [line["logs"]["loss"] for line in first] == run.history["loss"]


@tensorflow_unless_whole
def test_a_plateau_lowers_the_rate_of_all_workers(run: Run) -> None:
    first, second = watchers.lines(run.folder)

    assert [line["rate"] for line in first] == [line["rate"] for line in second]
    assert [line["rate"] for line in first] == pytest.approx([0.01, 0.005, 0.0025, 0.00125])


@tensorflow_unless_whole
def test_a_model_checkpoint_is_written_by_one_worker_and_is_whole(run: Run) -> None:
    names = sorted(path.name for path in run.folder.iterdir() if "rank" not in path.name)
    assert names == ["best.keras", "board", *(f"epoch-{n}.weights.h5" for n in (1, 2, 3, 4)), "log.csv"]

    kept = KERAS.saving.load_model(str(run.folder / "best.keras"))
    assert problems.largest_difference(kept.get_weights(), watchers.weights_after(run.folder, epoch=0)) == 0


@tensorflow_unless_whole
def test_a_csv_log_has_one_line_an_epoch(run: Run) -> None:
    with (run.folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))

    assert [int(row["epoch"]) for row in rows] == [0, 1, 2, 3]
    assert [float(row["val_loss"]) for row in rows] == pytest.approx(run.history["val_loss"], rel=1e-5)


@tensorflow_unless_whole
def test_tensorboard_shows_each_epoch_once(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run.folder / "board" / "train"))
    board.Reload()

    events = board.Tensors("epoch_loss")
    assert [event.step for event in events] == [0, 1, 2, 3]
    told = [float(np.frombuffer(event.tensor_proto.tensor_content, np.float32)[0]) for event in events]
    assert told == pytest.approx(run.history["loss"], rel=1e-5)


@one_is_enough
def test_a_stop_that_one_rank_asks_for_ends_all_at_the_end_of_the_epoch(flavour: str, tmp_path: Path) -> None:
    rates = KERAS.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 / (epoch + 1))
    callbacks = [watchers.StopsOnRankOne(), rates, watchers.Files(tmp_path)]

    history = estimator(flavour).fit(DATA, epochs=5, callbacks=callbacks, **OPTIONS)

    first, second = watchers.lines(tmp_path)
    assert history["epoch"] == [1, 2]
    assert history["num_samples"] == [64, 64]
    assert [line["epoch"] for line in second] == [0, 1]
    assert (
        [line["rate"] for line in first] == [line["rate"] for line in second] == pytest.approx([0.01, 0.005])
    )
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        "rank-0-of-2.jsonl",
        "rank-1-of-2.jsonl",
    ]
    assert problems.largest_difference(*(watchers.weights_after(tmp_path, 1, rank) for rank in (0, 1))) == 0


@one_is_enough
def test_validation_comes_as_often_as_asked_for(flavour: str) -> None:
    est = estimator(flavour, workers=1)

    every_second = est.fit(DATA, epochs=Epochs(4, validation_freq=2), validation_data=DATA, **OPTIONS)
    chosen = est.fit(
        DATA, epochs=Epochs(7, initial_epoch=4, validation_freq=[5, 7]), validation_data=DATA, **OPTIONS
    )

    assert [row["epoch"] for row in every_second if "val_loss" in row] == [2, 4]
    assert chosen["epoch"] == [5, 6, 7]
    assert [row["epoch"] for row in chosen if "val_loss" in row] == [5, 7]


@one_is_enough
def test_epochs_of_fewer_steps_and_runs_of_so_many(flavour: str, tmp_path: Path) -> None:
    est = estimator(flavour)

    short = est.fit(DATA, epochs=Epochs(3, steps_per_epoch=3), **OPTIONS)
    cut = est.fit(DATA, epochs=9, max_steps=6, callbacks=[watchers.Files(tmp_path)], **OPTIONS)

    assert short["steps"] == [3, 3, 3]
    assert short["num_samples"] == [48, 48, 48]
    assert cut["steps"] == [4, 2]
    assert cut["num_samples"] == [64, 32]
    first, second = watchers.lines(tmp_path)
    assert len(first) == len(second) == 2


@one_is_enough
def test_a_run_of_one_worker_stops_where_its_callback_says(flavour: str) -> None:
    class Stops(KERAS.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 1

    assert estimator(flavour, workers=1).fit(DATA, epochs=3, callbacks=[Stops()], **OPTIONS)["steps"] == [2]


def test_callbacks_that_cannot_work_are_refused(flavour: str, tmp_path: Path) -> None:
    est = estimator(flavour)

    with pytest.raises(ConfigError, match=r"BackupAndRestore is what fit\(resume=True\) does"):
        est.fit(DATA, callbacks=[KERAS.callbacks.BackupAndRestore(str(tmp_path / "backup"))], **OPTIONS)
    with pytest.raises(ConfigError, match="must be keras.*Callback objects; received"):
        est.fit(DATA, callbacks=[kindler.callbacks.Callback()], **OPTIONS)
    with pytest.raises(ConfigError, match="EarlyStopping.*needs validation_data"):
        est.fit(DATA, callbacks=[KERAS.callbacks.EarlyStopping(monitor="val_loss")], **OPTIONS)
