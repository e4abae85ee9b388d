"""What is done about losses that are not finite, seen at once or a little later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from kindler.errors import NonFiniteLossError
from kindler.train.loss_guard import LossGuard, NanLoss


def _guard(nan_loss: NanLoss, clock: Any = lambda: 0.0) -> tuple[LossGuard, list[str]]:
    told: list[str] = []
    return LossGuard(nan_loss, rank=1, tell=told.append, clock=clock), told


def _batch() -> tuple[Sequence[int | str], str]:
    return [7, 3], "Row 3 is odd."


def test_the_error_names_step_worker_rows_and_what_is_odd() -> None:
    guard, _ = _guard("raise")
    assert guard.saw(1, 0.5, _batch)
    with pytest.raises(
        NonFiniteLossError, match=r"the loss is inf in step 2 on worker 1\. .*rows 7, 3\. Row 3 is odd"
    ):
        guard.saw(2, math.inf, _batch)


@pytest.mark.parametrize(
    ("nan_loss", "what"), [("warn", "Training continues"), ("skip", "The step is skipped")]
)
def test_one_message_an_epoch_is_enough(nan_loss: NanLoss, what: str) -> None:
    guard, told = _guard(nan_loss)
    assert [guard.saw(step, math.nan, _batch) for step in (1, 2)] == [False, False]
    assert len(told) == 1
    assert what in told[0]
    guard.begin_epoch()
    guard.saw(3, math.nan, _batch)
    assert len(told) == 2


def test_losses_that_are_far_away_are_fetched_together_and_the_first_bad_one_is_named() -> None:
    now, fetched = [0.0], []

    def values(losses: Sequence[Any]) -> Sequence[float]:
        fetched.append(len(losses))
        return list(losses)

    guard, told = _guard("warn", lambda: now[0])
    for step, loss in enumerate((0.5, math.nan, math.nan), start=1):
        guard.note(step, loss, _batch, values)
    assert (fetched, told) == ([], [])
    now[0] = 1.0
    guard.note(4, 0.5, _batch, values)
    assert (fetched, told) == ([0], [])  # they may not be there yet: to look would be to wait
    now[0] = 2.0
    guard.note(5, 0.5, _batch, values)
    assert fetched == [0, 4]
    assert "in step 2 on worker 1" in told[0]
    for step in range(6, 6 + 2 * 256):  # however little time has passed
        guard.note(step, 0.5, _batch, values)
    assert fetched == [0, 4, 1, 256]


def test_what_was_not_looked_at_yet_is_seen_at_the_end_of_the_epoch() -> None:
    guard, _ = _guard("raise")
    guard.note(1, math.nan, _batch)
    with pytest.raises(NonFiniteLossError, match="in step 1"):
        guard.look()
    guard.look()  # nothing is left
