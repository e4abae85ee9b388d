"""Which failures are tried again: those that the same run may survive."""

from __future__ import annotations

import pytest

from kindler.config import RunSettings
from kindler.errors import (
    ConfigError,
    DataError,
    KindlerError,
    StartTimeoutError,
    SyncError,
    SyncTimeoutError,
    TrainingError,
    WorkerLostError,
    worker_error,
)
from kindler.estimator.run import explain, retry_wait_s

SETTINGS = RunSettings(max_failures=3, retry_backoff_s=1.0)
LOST = WorkerLostError("killed", rank=1, host="a")


def test_a_lost_worker_is_tried_again_after_waits_that_double() -> None:
    answers = [retry_wait_s(LOST, failures, SETTINGS, has_checkpoints=True) for failures in range(4)]

    assert answers == [1.0, 2.0, 4.0, None]


def test_no_wait_is_longer_than_half_a_minute() -> None:
    patient = RunSettings(max_failures=100, retry_backoff_s=5.0)

    assert retry_wait_s(LOST, 50, patient, has_checkpoints=True) == 30.0


def test_nothing_is_tried_again_without_checkpoints_or_without_leave() -> None:
    assert retry_wait_s(LOST, 0, SETTINGS, has_checkpoints=False) is None
    assert retry_wait_s(LOST, 0, RunSettings(max_failures=0), has_checkpoints=True) is None


def test_a_broken_exchange_is_the_echo_of_a_loss() -> None:
    assert retry_wait_s(SyncError("broke"), 0, SETTINGS, has_checkpoints=True) == 1.0


def test_a_gang_that_does_not_come_up_is_tried_again_only_if_it_once_did() -> None:
    late = StartTimeoutError("late")

    assert retry_wait_s(late, 0, SETTINGS, has_checkpoints=True) is None
    assert retry_wait_s(late, 1, SETTINGS, has_checkpoints=True) == 2.0


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no"),
        DataError("null"),
        TrainingError("no"),
        SyncTimeoutError(op="sum", missing=[1], size=2, waited_s=3),
        worker_error(types=["builtins:ValueError"], message="m", traceback="t", rank=0, host="h"),
    ],
)
def test_what_would_happen_again_is_never_tried_again(error: KindlerError) -> None:
    assert retry_wait_s(error, 0, SETTINGS, has_checkpoints=True) is None


def test_the_last_error_says_how_often_the_run_was_tried() -> None:
    lost = WorkerLostError("killed", rank=1, host="a", exit_code=-9)
    explain(lost, 3, trains=True, has_checkpoints=True)

    assert "lost worker 1 on a: killed" in str(lost)
    assert "failed 4 times" in str(lost)


def test_a_first_loss_says_what_would_have_let_the_run_go_on() -> None:
    def explained(**facts: bool) -> str:
        lost = WorkerLostError("killed", rank=1, host="a")
        explain(lost, 0, **facts)
        return str(lost)

    assert "Hint: fit(checkpoint=...) writes checkpoints" in explained(trains=True, has_checkpoints=False)
    assert "Hint" not in explained(trains=False, has_checkpoints=False)
    assert "Hint" not in explained(trains=True, has_checkpoints=True)


def test_a_lost_server_is_not_tried_again_and_its_newest_checkpoint_is_named() -> None:
    lost = WorkerLostError("killed", rank=2, host="a", role="ps")

    assert retry_wait_s(lost, 0, SETTINGS, has_checkpoints=True) is None
    explain(lost, 0, trains=True, has_checkpoints=True, newest="/run/checkpoint-7")
    assert "It was the parameter server" in str(lost)
    assert "newest checkpoint is /run/checkpoint-7" in str(lost)
