"""When workers of a Keras run die, others take their places; the survivors go on from the last whole step."""

from __future__ import annotations

import importlib
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
from flavour import FLAVOUR, KERAS, one_is_enough, one_unless_whole, tensorflow_only

from kindler import Checkpoints, Estimator, History, RunSettings

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]
replaces = pytest.mark.skipif(FLAVOUR == "tf_keras", reason="it restarts")

DATA = problems.problem(60)
EPOCHS, STEPS, FALL = 3, 5, 8
LAST_OF_EPOCH = 2 * STEPS
DUE = {"place": ""}  # where code of the model ends its process


class Dies(KERAS.callbacks.Callback):
    """Each of these ranks dies once, in this hook and after this many steps; also files who makes which."""

    def __init__(self, folder: Path, *ranks: int, hook: str = "on_train_batch_end", step: int = FALL) -> None:
        super().__init__()
        self.folder, self.ranks, self.hook, self.step = str(folder), ranks, hook, step
        self.epoch = self.made = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._file("processes", os.getpid())
        self._now("on_train_begin")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch, self.made = epoch, epoch * STEPS
        self._now("on_epoch_begin")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.params["rank"] in self.ranks and self.epoch * STEPS + batch == self.step:
            DUE["place"] = self.hook

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.made = self.epoch * STEPS + batch + 1
        self._file("steps", self.made)
        self._now("on_train_batch_end")

    def on_test_begin(self, logs: Any = None) -> None:
        self._now("on_test_begin")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._now("on_epoch_end")

    def _file(self, name: str, value: int) -> None:
        with Path(self.folder, f"{name}-{self.params['rank']}").open("a") as file:
            file.write(f"{value}\n")

    def _now(self, hook: str) -> None:
        if hook == self.hook and self.params["rank"] in self.ranks and self.made == self.step:
            die_once(Path(self.folder, f"died-{self.params['rank']}"))


def die_once(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Deadly(KERAS.layers.Layer):
    """Its process may end in the forward pass."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def call(self, x: Any) -> Any:
        if DUE["place"] == "forward":
            die_once(Path(self.folder, "died"))
        return x


class Norm(KERAS.metrics.Mean):
    """Looks at the weights when it counts, which is when they have moved; its process may end then."""

    def __init__(self, model: Any, folder: str) -> None:
        super().__init__(name="norm")
        self._model, self.folder = [model], folder

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        total = KERAS.ops.sum(KERAS.ops.square(self._model[0].trainable_variables[0]))
        if FLAVOUR == "tensorflow":
            total = importlib.import_module("tensorflow").numpy_function(self._looked, [total], "float32")
            total.set_shape(())
        else:
            self._looked(total)
        super().update_state(total * KERAS.ops.ones_like(y_pred))

    def _looked(self, total: Any) -> Any:
        if DUE["place"] == "metric":
            die_once(Path(self.folder, "died"))
        return total


def classifier(config: Any) -> Any:
    if "folder" not in config:
        return problems.classifier(config)
    model = KERAS.Sequential(
        [
            KERAS.Input((problems.WIDTH,)),
            KERAS.layers.Dense(8, activation="tanh"),
            Deadly(config["folder"]),
            KERAS.layers.BatchNormalization(),
            KERAS.layers.Dropout(0.3),
            KERAS.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", metrics=["accuracy", Norm(model, config["folder"])])
    return model


def estimator(workers: int = 2, folder: Path | None = None, **options: Any) -> Estimator:
    config = {"flavour": FLAVOUR, "between": "both", "auc": True}
    if folder is not None:
        config["folder"] = str(folder)
    settings = RunSettings(retry_backoff_s=0.01, **options)
    return Estimator.from_keras(
        model=classifier, config=config, workers=workers, engine="local", settings=settings
    )


def fit(est: Estimator, *callbacks: Any, **options: Any) -> History:
    return est.fit(
        DATA,
        **{
            "epochs": EPOCHS,
            "batch_size": 12,
            "feature_cols": "x",
            "label_cols": "y",
            "validation_data": DATA,
            "callbacks": [KERAS.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1), *callbacks],
            "verbose": 0,
            **options,
        },
    )


def figures(history: History) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ("seconds", "rows_per_s")} for row in history]


def weights(est: Estimator) -> list[np.ndarray]:
    model = est.get_model()
    return [*model.get_weights(), *(np.asarray(v.numpy()) for v in model.optimizer.variables)]


def assert_same(est: Estimator, expected: list[np.ndarray]) -> None:
    for found, values in zip(weights(est), expected, strict=True):
        np.testing.assert_array_equal(found, values)


def processes(folder: Path) -> list[int]:
    """How many processes each rank had."""
    return [len(set(file.read_text().split())) for file in sorted(folder.glob("processes-*"))]


def most_times_made(folder: Path) -> dict[int, int]:
    """Step -> how often a rank's callbacks saw it, at most."""
    most: Counter[int] = Counter()
    for file in folder.glob("steps-*"):
        for step, count in Counter(map(int, file.read_text().split())).items():
            most[step] = max(most[step], count)
    return dict(most)


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    """Returns the history and the weights of a run with this many workers that nothing happened to."""
    known: dict[int, Any] = {}

    def of(workers: int) -> Any:
        if workers not in known:
            alone = estimator(workers)
            known[workers] = figures(fit(alone)), weights(alone)
        return known[workers]

    return of


@replaces
@pytest.mark.parametrize(
    ("ranks", "workers", "hook", "step"),
    [
        ((1,), 2, "on_train_batch_end", FALL),
        ((0,), 2, "on_train_batch_end", FALL),
        pytest.param((0, 2), 3, "on_train_batch_end", FALL, marks=one_unless_whole),  # several at once
        pytest.param((1,), 2, "on_train_batch_end", LAST_OF_EPOCH, marks=one_unless_whole),
        ((1,), 2, "on_epoch_begin", LAST_OF_EPOCH),  # with no step of its own in this epoch
        pytest.param((0,), 2, "on_test_begin", LAST_OF_EPOCH, marks=one_unless_whole),
        pytest.param((0,), 2, "on_epoch_end", LAST_OF_EPOCH, marks=one_unless_whole),
        pytest.param((1,), 2, "on_epoch_end", EPOCHS * STEPS, marks=one_unless_whole),
    ],
)
def test_survivors_keep_their_process_and_the_run_ends_as_if_undisturbed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    undisturbed: Any,
    ranks: tuple[int, ...],
    workers: int,
    hook: str,
    step: int,
) -> None:
    expected, trained = undisturbed(workers)
    est = estimator(workers)

    history = fit(est, Dies(tmp_path, *ranks, hook=hook, step=step))

    assert processes(tmp_path) == [2 if rank in ranks else 1 for rank in range(workers)]
    assert caplog.text.count("and no step was repeated") == len(ranks)
    assert most_times_made(tmp_path) == dict.fromkeys(range(1, EPOCHS * STEPS + 1), 1)
    assert figures(history) == expected
    assert_same(est, trained)


@one_is_enough  # the others run no Python within a step
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("place", ["forward", "metric"])
def test_a_worker_that_dies_before_or_after_its_part_of_a_step_is_replaced(
    tmp_path: Path, place: str, shared_memory: bool
) -> None:
    alone, est = (estimator(folder=tmp_path, shared_memory=shared_memory) for _ in range(2))
    expected = figures(fit(alone))

    history = fit(est, Dies(tmp_path, 1, hook=place))

    assert (tmp_path / "died").exists()
    assert processes(tmp_path) == [1, 2]
    assert figures(history) == expected
    assert_same(est, weights(alone))


@tensorflow_only
def test_a_worker_that_dies_before_a_compiled_step_is_written_restarts_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone, est = (estimator(folder=tmp_path, max_failures=1) for _ in range(2))  # it counts once
    expected = figures(fit(alone))

    history = fit(
        est, Dies(tmp_path, 1, hook="metric"), checkpoint=Checkpoints(tmp_path / "checkpoints", every=3)
    )

    assert processes(tmp_path) == [2, 2]
    assert "workers [1] have no record" in caplog.text
    assert "no step was repeated" not in caplog.text
    assert figures(history) == expected
    assert_same(est, weights(alone))


@one_is_enough
def test_a_loss_during_the_replacement_and_another_one_later_change_nothing(
    tmp_path: Path, undisturbed: Any
) -> None:
    expected, trained = undisturbed(2)
    folders = [tmp_path / name for name in ("first", "again", "later")]
    for folder in folders:
        folder.mkdir()
    est = estimator()

    history = fit(
        est,
        Dies(folders[0], 1),
        Dies(folders[1], 1, hook="on_epoch_begin", step=STEPS),  # the second time, in the new process
        Dies(folders[2], 0, step=FALL + 3),
    )

    assert processes(folders[2]) == [2, 3]
    assert figures(history) == expected
    assert_same(est, trained)
