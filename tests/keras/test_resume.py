"""A run that lost a worker, or failed and is begun again, ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
import watchers
from flavour import FLAVOUR, KERAS, one_is_enough, one_unless_whole, unless_whole

from kindler import Checkpoints, Epochs, Estimator, History, Prepare, RunSettings
from tests.whole import whole_only

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

DATA = problems.problem(60)
CONTRARY = {**DATA, "y": 1 - DATA["y"]}
# Dropout of Keras 2 draws from operations whose state nobody can read.
CONFIG = {"flavour": FLAVOUR, "between": "batchnorm" if FLAVOUR == "tf_keras" else "both"}


def noisy(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": row["x"] + rng.normal(scale=0.3, size=problems.WIDTH)}


# On two backends rows are augmented, too; on the others they are taken as they are.
AUGMENTED = Prepare(transform=noisy, eval_transform=dict) if FLAVOUR in ("tensorflow", "torch") else Prepare()


def estimator(workers: int = 2) -> Estimator:
    return Estimator.from_keras(
        model=problems.classifier,
        config=CONFIG,
        workers=workers,
        engine="local",
        settings=RunSettings(retry_backoff_s=0.01),
        prepare=AUGMENTED,
    )


def callbacks(*more: Any) -> list[Any]:
    return [
        KERAS.callbacks.EarlyStopping(monitor="val_loss", patience=3),
        KERAS.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=2, factor=0.1),
        *more,
    ]


def fit(est: Estimator, folder: Path, *more: Any, resume: bool = False) -> History:
    return est.fit(
        DATA,
        epochs=9,
        batch_size=12,
        feature_cols="x",
        label_cols="y",
        validation_data=CONTRARY,
        callbacks=callbacks(*more),
        verbose=0,
        checkpoint=Checkpoints(folder, every=3),
        resume=resume,
    )


def figures(history: History) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ("seconds", "rows_per_s")} for row in history]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Figures and weights of the run that nobody interrupts; it stops early, after its rate was lowered."""
    est = estimator()
    history = fit(est, tmp_path_factory.mktemp("whole"))
    assert 3 < len(history) < 9
    return figures(history), est.get_model().get_weights()


@unless_whole("torch", "jax")
def test_a_run_whose_worker_was_killed_in_mid_epoch_ends_as_the_one_that_was_not(
    tmp_path: Path, whole: Any
) -> None:
    est = estimator()

    history = fit(est, tmp_path / "run", watchers.Falls(tmp_path, "kill", epoch=1, batch=3))

    assert (tmp_path / "fell").exists()
    assert figures(history) == whole[0]
    assert problems.largest_difference(est.get_model().get_weights(), whole[1]) == 0


@unless_whole("torch", "tensorflow")
@pytest.mark.parametrize(
    "batch",
    [pytest.param(3, id="in mid-epoch"), pytest.param(4, id="after an epoch", marks=one_unless_whole)],
)
def test_a_run_whose_worker_gets_sigterm_goes_on_where_it_was(
    tmp_path: Path, whole: Any, caplog: pytest.LogCaptureFixture, batch: int
) -> None:
    est = estimator()

    history = fit(est, tmp_path / "run", watchers.Falls(tmp_path, "terminate", epoch=1, batch=batch))

    assert "was given notice (SIGTERM): the run was saved after step" in caplog.text
    assert figures(history) == whole[0]
    assert problems.largest_difference(est.get_model().get_weights(), whole[1]) == 0


@pytest.fixture(scope="module")
def aborted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that failed in the middle of its third epoch, when counters had counted."""
    folder = tmp_path_factory.mktemp("aborted")
    with pytest.raises(ValueError, match="boom"):
        fit(estimator(), folder / "run", watchers.Falls(folder, "raise", epoch=2, batch=3))
    return folder / "run"


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@one_is_enough
def test_resume_goes_on_in_mid_epoch_and_callbacks_remember_what_they_counted(
    tmp_path: Path, aborted: Path, whole: Any
) -> None:
    again = estimator()

    history = fit(again, copied(aborted, tmp_path / "run"), watchers.Files(tmp_path), resume=True)

    assert figures(history) == whole[0], "stopped early where the whole run did"
    assert problems.largest_difference(again.get_model().get_weights(), whole[1]) == 0
    assert watchers.lines(tmp_path)[0][0]["epoch"] == 2


@one_is_enough
def test_one_worker_goes_on_with_a_run_of_two(tmp_path: Path, aborted: Path, whole: Any) -> None:
    again = estimator(workers=1)

    history = fit(again, copied(aborted, tmp_path / "run"), watchers.Files(tmp_path), resume=True)

    assert figures(history)[:2] == whole[0][:2]
    assert history["num_samples"] == [60] * len(history)
    assert watchers.lines(tmp_path)[0][0]["epoch"] == 2


@one_is_enough
@pytest.mark.parametrize("workers", [pytest.param(1, marks=whole_only), 3])
def test_another_number_of_workers_goes_on_in_mid_epoch_to_the_same_weights(
    tmp_path: Path, workers: int
) -> None:
    def plain(workers: int) -> Estimator:
        return Estimator.from_keras(
            model=problems.classifier, config={"flavour": FLAVOUR}, workers=workers, engine="local"
        )

    options: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 12,
        "feature_cols": "x",
        "label_cols": "y",
        "verbose": 0,
    }
    saved = {"checkpoint": Checkpoints(tmp_path / "run", every=3), **options}
    alone = plain(2)
    expected = alone.fit(DATA, **options)
    with pytest.raises(ValueError, match="boom"):
        plain(2).fit(DATA, callbacks=[watchers.Falls(tmp_path, "raise", epoch=1, batch=4)], **saved)
    written = max(path.name for path in (tmp_path / "run").iterdir())
    again = plain(workers)

    history = again.fit(DATA, resume=True, **saved)

    assert "epoch-00002-step-000000009" in written or "epoch-00002-step-000000006" in written
    assert (
        problems.largest_difference(again.get_model().get_weights(), alone.get_model().get_weights()) < 1e-5
    )
    assert history["loss"] == pytest.approx(expected["loss"], abs=1e-5), "the part before counts once"
    assert history["num_samples"] == [60] * 3


@one_is_enough
def test_a_run_that_stopped_early_is_not_taken_up_again(tmp_path: Path, aborted: Path, whole: Any) -> None:
    folder = copied(aborted, tmp_path / "run")
    fit(estimator(), folder, resume=True)

    assert len(fit(estimator(), folder, resume=True)) == len(whole[0])


@one_is_enough
def test_a_trigger_that_has_fired_ends_the_next_fit_before_it_begins(tmp_path: Path) -> None:
    def steps(est: Estimator, trigger: Any, **options: Any) -> list[int]:
        columns: dict[str, Any] = {"feature_cols": "x", "label_cols": "y", "checkpoint": tmp_path}
        length = Epochs(None, stop_when=trigger)
        history = est.fit(DATA, epochs=length, batch_size=12, verbose=0, **columns, **options)
        return [row["steps"] for row in history]

    def one_epoch(progress: Any) -> bool:
        return progress.epoch > 1 or progress.epoch_ended

    est = estimator(workers=1)
    assert steps(est, one_epoch) == [5]
    assert steps(est, one_epoch) == steps(est, lambda progress: progress.step >= 5) == []
    assert steps(estimator(workers=1), one_epoch, resume=True) == [5]
    assert est.get_model().optimizer.iterations == 5
