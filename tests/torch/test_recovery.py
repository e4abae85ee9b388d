"""A run that loses all its workers goes on by itself, from its newest checkpoint, to the same end.

Where one is left, the others are replaced: see `test_replaced.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from interrupted import (
    EPOCHS,
    FALL,
    KEPT,
    STEPS,
    Falls,
    assert_same,
    attempts,
    figures,
    fit,
    notes,
    shaky,
    times_trained,
    weights,
)

from kindler import Epochs, RunSettings
from kindler.errors import WorkerLostError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

LONG = Epochs(1, steps_per_epoch=2 * STEPS)


def test_a_run_that_lost_its_workers_ends_as_if_it_had_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = shaky()
    expected = figures(fit(alone))
    folder = tmp_path / "run"
    est = shaky()

    with caplog.at_level(logging.INFO, "kindler"):
        falls = Falls(tmp_path, "die", checkpoints=folder, rank=None)
        history = fit(est, falls, notes(tmp_path / "rows"), folder=folder, verbose=1)

    assert attempts(tmp_path) == [2, 2]
    assert figures(history) == expected
    assert_same(est, weights(alone))
    twice = {step for step, times in times_trained(tmp_path / "rows").items() if times > 1}
    assert twice <= set(range(KEPT + 1, FALL + 1))
    assert list(times_trained(tmp_path / "rows")) == list(range(1, EPOCHS * STEPS + 1))
    assert "lost worker" in caplog.text
    assert f"step-{KEPT:09d}.kindler" in caplog.text
    assert f"step-{KEPT:09d}.kindler" in capfd.readouterr().out


def test_a_loss_before_the_first_checkpoint_begins_the_run_again(tmp_path: Path) -> None:
    alone, est = shaky(), shaky()
    expected = figures(fit(alone, epochs=LONG))

    history = fit(est, Falls(tmp_path, "die", rank=None), epochs=LONG, checkpoint=tmp_path / "run")

    assert attempts(tmp_path) == [2, 2]
    assert figures(history) == expected
    assert_same(est, weights(alone))


def test_another_runs_checkpoints_in_the_folder_are_never_taken_up_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit(shaky(seed=5), folder=folder, epochs=6)
    alone, est = shaky(), shaky()
    expected = figures(fit(alone, epochs=LONG))

    history = fit(est, Falls(tmp_path, "die", rank=None), epochs=LONG, checkpoint=folder)

    assert attempts(tmp_path) == [2, 2]
    assert figures(history) == expected
    assert_same(est, weights(alone))


def test_a_resumed_run_that_loses_its_workers_goes_on_too(tmp_path: Path) -> None:
    alone, est = shaky(), shaky()
    expected = figures(fit(alone))
    folder = tmp_path / "run"
    fit(shaky(), folder=folder, epochs=1)

    history = fit(est, Falls(tmp_path, "die", rank=None), checkpoint=folder, resume=True)

    assert attempts(tmp_path) == [2, 2]
    assert figures(history) == expected
    assert_same(est, weights(alone))


def test_the_last_error_is_raised_when_the_retries_are_spent(tmp_path: Path) -> None:
    est = shaky(settings=RunSettings(max_failures=2, retry_backoff_s=0.01))

    with pytest.raises(WorkerLostError, match="(?s)lost worker .*SIGKILL.*failed 3 times"):
        fit(est, Falls(tmp_path, "die", rank=None, always=True), folder=tmp_path / "run")

    assert attempts(tmp_path) == [2, 2, 2]


def test_an_error_of_the_users_own_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boom"):
        fit(shaky(), Falls(tmp_path, "fail"), folder=tmp_path / "run")

    assert attempts(tmp_path) == [2]


def test_without_checkpoints_a_loss_is_raised_at_once_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(WorkerLostError, match=r"(?s)SIGKILL.*Hint: fit\(checkpoint=\.\.\.\)"):
        fit(shaky(), Falls(tmp_path, "die", rank=None))

    assert attempts(tmp_path) == [2]


def test_a_folder_that_cannot_be_written_fails_the_run_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    with pytest.raises(OSError, match=str(tmp_path / "file")):
        fit(shaky(), folder=tmp_path / "file")
