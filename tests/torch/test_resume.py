"""A run that is begun again with resume=True ends as if it had never been interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupted import (
    DATA,
    EPOCHS,
    FALL,
    KEPT,
    ROWS,
    STEPS,
    Falls,
    assert_same,
    figures,
    fit,
    notes,
    shaky,
    times_trained,
    weights,
)

from kindler import Checkpoints, Epochs, Estimator
from kindler.callbacks import Callback
from kindler.errors import ConfigError
from tests.exact import assert_each_row_once_per_epoch, steps

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole() -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Figures and weights of the run that nobody interrupts."""
    est = shaky()
    history = fit(est)
    return figures(history), weights(est)


def interrupted(tmp_path: Path, *callbacks: Callback, **options: Any) -> Path:
    """The folder of a run that failed in the middle of epoch 2."""
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="boom"):
        fit(shaky(), *callbacks, Falls(tmp_path, "fail", checkpoints=folder), folder=folder, **options)
    return folder


def made_at(folder: Path) -> list[tuple[int, int]]:
    """The epoch and the step that each checkpoint of a run is named after."""
    names = [path.stem.split("-") for path in sorted(folder.iterdir())]
    return [(int(epoch), int(step)) for *_, epoch, _, step in names]


def test_checkpoints_change_nothing(tmp_path: Path, whole: Any) -> None:
    est = shaky()

    assert figures(fit(est, folder=tmp_path / "run")) == whole[0]
    assert_same(est, whole[1])


def test_a_run_that_failed_goes_on_in_the_middle_of_its_epoch(tmp_path: Path, whole: Any) -> None:
    folder = interrupted(tmp_path)
    again = shaky()

    history = fit(again, notes(tmp_path / "rows"), folder=folder, resume=True)

    assert figures(history) == whole[0], "tallies of the part before are in the figures"
    assert_same(again, whole[1])
    assert list(times_trained(tmp_path / "rows")) == list(range(KEPT + 1, EPOCHS * STEPS + 1))
    assert again.history["epoch"] == [1, 2, 3]


PROGRAM = """
    import sys
    from pathlib import Path
    from interrupted import Falls, fit, shaky

    work = Path(sys.argv[1])
    fit(shaky(), Falls(work, "kill_driver", checkpoints=work / "run"), folder=work / "run")
"""


def test_a_run_whose_driver_was_killed_goes_on_in_another_process(tmp_path: Path, whole: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text("\n".join(line[4:] for line in PROGRAM.splitlines()))
    parts = (str(ROOT / "src"), str(ROOT), str(ROOT / "tests/torch"))
    driver = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(parts)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert driver.returncode == -signal.SIGKILL, driver.stderr

    again = shaky()
    history = fit(again, folder=tmp_path / "run", resume=True)

    assert figures(history) == whole[0]
    assert_same(again, whole[1])


def test_another_worker_count_goes_on_in_the_middle_of_the_epoch_with_the_rows_that_are_left(
    tmp_path: Path, whole: Any
) -> None:
    fit(shaky(), notes(tmp_path / "whole"))
    folder = interrupted(tmp_path)
    again = shaky(workers=1)

    history = fit(again, notes(tmp_path / "rows"), folder=folder, resume=True)

    trained, expected = ({k: sorted(v) for k, v in steps(tmp_path / n).items()} for n in ("rows", "whole"))
    assert trained == {key: ids for key, ids in expected.items() if key[1] > KEPT}
    assert history["epoch"] == [1, 2, 3]
    assert history["num_samples"] == [ROWS] * 3
    assert history["loss"][0] == whole[0][0]["loss"]
    assert history["loss"][1] == pytest.approx(whole[0][1]["loss"], abs=0.2), "only dropout draws otherwise"


def test_with_rows_dealt_otherwise_the_epoch_begins_again_and_has_each_row_once(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    otherwise = {name: values[::-1].copy() for name, values in DATA.items()}

    history = fit(shaky(), notes(tmp_path / "rows"), data=otherwise, folder=folder, resume=True)

    trained = steps(tmp_path / "rows")
    assert {epoch for epoch, _ in trained} == {2, 3}
    assert sorted(i for key, ids in trained.items() if key[0] == 2 for i in ids) == list(range(ROWS))
    assert history["num_samples"] == [ROWS] * 3


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, whole: Any, damage: str
) -> None:
    folder = interrupted(tmp_path)
    newest = max(folder.iterdir())
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    again = shaky()

    with pytest.warns(UserWarning, match=newest.name):
        history = fit(again, notes(tmp_path / "rows"), folder=folder, resume=True)

    assert min(times_trained(tmp_path / "rows")) == STEPS + 1, "from the end of epoch 1"
    assert figures(history) == whole[0]
    assert_same(again, whole[1])


def test_a_run_that_is_complete_trains_nothing_and_returns_its_history(tmp_path: Path, whole: Any) -> None:
    folder = tmp_path / "run"
    fit(shaky(), folder=folder)
    again = shaky()

    history = fit(again, notes(tmp_path / "rows"), folder=folder, resume=True)

    assert figures(history) == whole[0]
    assert_same(again, whole[1])
    assert times_trained(tmp_path / "rows") == {}
    assert fit(again, folder=folder, resume=True)["epoch"] == [1, 2, 3]
    assert again.history["epoch"] == [1, 2, 3], "no epoch is in the history twice"


def test_a_longer_run_goes_on_where_a_shorter_one_ended(tmp_path: Path, whole: Any) -> None:
    fit(shaky(), folder=tmp_path / "run", epochs=1)
    again = shaky()

    assert figures(fit(again, folder=tmp_path / "run", resume=True)) == whole[0]
    assert_same(again, whole[1])


def test_without_a_checkpoint_resume_begins_anew(tmp_path: Path, whole: Any) -> None:
    assert figures(fit(shaky(), folder=tmp_path / "run", resume=True)) == whole[0]


def test_a_folder_behind_a_url_serves_as_well(tmp_path: Path, whole: Any) -> None:
    url: Any = f"local://{tmp_path}/run"  # fsspec's name for this machine's disk
    fit(shaky(), folder=url, epochs=1)
    again = shaky()

    assert figures(fit(again, folder=url, resume=True)) == whole[0]
    assert_same(again, whole[1])
    assert str(Estimator.latest_checkpoint(url)).startswith(f"{url}/checkpoint-")


def test_a_folder_alone_is_the_folder_of_checkpoints(tmp_path: Path, whole: Any) -> None:
    for name, checkpoint in (("alone", tmp_path / "alone"), ("group", Checkpoints(tmp_path / "group"))):
        est = shaky()
        assert figures(fit(est, checkpoint=checkpoint)) == whole[0]
        assert made_at(tmp_path / name) == [(epoch, epoch * STEPS) for epoch in (1, 2, 3)]
        assert figures(fit(shaky(), checkpoint=checkpoint, resume=True)) == whole[0]


def test_what_checkpoints_need_is_named() -> None:
    with pytest.raises(ConfigError, match=r"resume=True needs the folder.*checkpoint=\.\.\."):
        fit(shaky(), resume=True)
    with pytest.raises(TypeError, match="folder"):
        Checkpoints(every=1, best="val_loss")  # type: ignore[call-arg]
    every: Any = "epoch"
    with pytest.raises(
        ConfigError, match=r"every=\.\.\.\) must be a number of steps or a function.*received 'epoch'"
    ):
        fit(shaky(), checkpoint=Checkpoints("unused", every=every))
    with pytest.raises(ConfigError, match=r"Checkpoints\(best='val_loss'\) needs validation_data"):
        fit(shaky(), checkpoint=Checkpoints("unused", best="val_loss"), validation_data=None)


class Counts(Callback):
    """Counts steps, and asks to stop at the end of epoch 2."""

    def __init__(self, *, stop: bool = False, log: Path | None = None) -> None:
        self.steps, self.stop, self.log = 0, stop, log and str(log)

    def on_step_end(self, run: Any) -> None:
        self.steps += 1

    def on_epoch_end(self, run: Any, logs: dict[str, Any]) -> None:
        logs["counted"] = self.steps
        if self.stop and run.epoch == 2 and run.rank == 1:
            run.stop("two are enough")

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_callbacks_remember_what_they_want_to(tmp_path: Path) -> None:
    folder = interrupted(tmp_path, Counts())

    history = fit(shaky(), Counts(), folder=folder, resume=True)

    assert history["counted"] == [STEPS, 2 * STEPS, 3 * STEPS]


def test_a_run_that_a_callback_ended_is_not_taken_up_again(tmp_path: Path) -> None:
    assert fit(shaky(), Counts(stop=True), folder=tmp_path / "run")["epoch"] == [1, 2]

    assert fit(shaky(), Counts(), folder=tmp_path / "run", resume=True)["epoch"] == [1, 2]


class Unkeepable(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"self": self}


def test_a_callback_whose_state_json_cannot_carry_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Unkeepable\.state_dict\(\) returned .*, which is not JSON"):
        fit(shaky(), Unkeepable(), folder=tmp_path / "run")


class Asks(Callback):
    """One worker alone asks for a checkpoint."""

    def on_step_end(self, run: Any) -> None:
        if run.rank == 1 and run.step == 4:
            run.save_checkpoint()


def test_a_checkpoint_is_written_when_one_worker_asks_for_it(tmp_path: Path) -> None:
    fit(shaky(), Asks(), epochs=1, checkpoint=tmp_path)

    assert made_at(tmp_path) == [(1, 4), (1, STEPS)]


def test_the_best_checkpoint_is_kept_besides_the_last(tmp_path: Path) -> None:
    best = Checkpoints(tmp_path, keep=1, best="max:val_loss")
    history = fit(shaky(workers=1), epochs=6, checkpoint=best)

    worst = max(history, key=lambda row: row["val_loss"])["epoch"]
    assert [epoch for epoch, _ in made_at(tmp_path)] == sorted({worst, 6})


def test_an_epoch_of_fewer_steps_goes_on_with_the_rows_where_the_last_one_ended(tmp_path: Path) -> None:
    est = shaky()

    history = fit(est, notes(tmp_path), epochs=Epochs(7, steps_per_epoch=2))

    assert history["steps"] == [2] * 7
    ids = [i for step in steps(tmp_path).values() for i in step]
    assert sorted(ids) == sorted([*range(ROWS)] * 2), "fourteen steps are two passes"
    assert sorted(ids[:ROWS]) == list(range(ROWS))


def test_steps_per_epoch_of_one_pass_is_the_same_as_none(tmp_path: Path, whole: Any) -> None:
    est = shaky()

    assert figures(fit(est, notes(tmp_path), epochs=Epochs(EPOCHS, steps_per_epoch=STEPS))) == whole[0]
    assert_each_row_once_per_epoch(tmp_path, ROWS, EPOCHS)


def after_steps(number: int) -> Callable[[Any], bool]:
    return lambda progress: progress.step >= number


def after_epochs(number: int) -> Callable[[Any], bool]:
    return lambda progress: progress.epoch - (not progress.epoch_ended) >= number


@pytest.mark.parametrize(
    ("trigger", "epochs", "steps_made"),
    [
        (after_steps(10), None, [7, 3]),
        (after_epochs(2), None, [7, 7]),
        (after_epochs(5), 2, [7, 7]),
        (lambda progress: progress.loss is not None and progress.loss < 100, None, [7]),
        (lambda progress: progress.loss == 0 or progress.step == 1, 3, [1]),
    ],
    ids=["steps", "epochs", "fewer epochs", "loss", "either"],
)
def test_a_run_ends_when_its_trigger_fires_or_its_epochs_are_over(
    trigger: Any, epochs: int | None, steps_made: list[int]
) -> None:
    est = shaky(workers=1)

    assert fit(est, epochs=Epochs(epochs, stop_when=trigger))["steps"] == steps_made


def test_a_trigger_that_has_fired_ends_the_next_fit_before_it_begins(tmp_path: Path) -> None:
    est, again = shaky(workers=1), shaky(workers=1)
    one, two = Epochs(stop_when=after_steps(7)), Epochs(stop_when=after_epochs(2))
    assert fit(est, epochs=one, folder=tmp_path)["steps"] == [7]

    assert len(fit(est, epochs=one, folder=tmp_path)) == 0
    assert fit(est, epochs=two, folder=tmp_path)["epoch"] == [2]
    assert fit(again, epochs=two, folder=tmp_path, resume=True)["epoch"] == [2]


def test_max_steps_counts_from_where_the_run_began(tmp_path: Path) -> None:
    folder = interrupted(tmp_path, max_steps=FALL + 1)

    history = fit(shaky(), folder=folder, max_steps=FALL + 1, resume=True)

    assert history["steps"] == [STEPS, FALL + 1 - STEPS]


def test_a_checkpoint_of_the_middle_of_an_epoch_gives_its_weights(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    path = Estimator.latest_checkpoint(folder)
    assert path is not None
    assert path.endswith(f"step-{KEPT:09d}.kindler")

    est = shaky().load_checkpoint(path)
    history = fit(est, epochs=1)

    assert history["epoch"] == [3]
    assert est.predict(DATA, feature_cols=["id", "x"])["prediction"].shape[0] == ROWS


def test_a_checkpoint_written_after_every_step_costs_no_step(tmp_path: Path, whole: Any) -> None:
    every_step = Checkpoints(tmp_path / "run", every=1)

    assert figures(fit(shaky(), checkpoint=every_step)) == whole[0]
    assert len(list((tmp_path / "run").iterdir())) == 3
