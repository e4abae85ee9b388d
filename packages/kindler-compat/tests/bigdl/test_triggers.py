"""Triggers decide by what they are shown, so all workers decide alike."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from kindler.callbacks import Progress
from kindler.compat.bigdl.optim.triggers import (
    EveryEpoch,
    MaxEpoch,
    MaxIteration,
    MaxScore,
    MinLoss,
    SeveralIteration,
    Trigger,
    TriggerAnd,
    TriggerOr,
)
from kindler.errors import ConfigError

EPOCH = 4  # steps


def fired(trigger: Trigger, steps: int = 12) -> list[tuple[int, bool]]:
    """The moments of three epochs of four steps at which a trigger fires: step, and whether an epoch ends."""
    moments = [Progress(epoch=(s - 1) // EPOCH + 1, step=s) for s in range(1, steps + 1) if s % EPOCH]
    moments += [
        Progress(epoch=s // EPOCH, step=s, epoch_ended=True, loss=1.0 / s, score=s / 10)
        for s in range(EPOCH, steps + 1, EPOCH)
    ]
    return sorted((p.step, p.epoch_ended) for p in moments if trigger(p))


@pytest.mark.parametrize(
    ("trigger", "moments"),
    [
        (EveryEpoch(), [(4, True), (8, True), (12, True)]),
        (SeveralIteration(5), [(4, True), (5, False), (8, True), (10, False), (12, True)]),
        (SeveralIteration(4), [(4, True), (8, True), (12, True)]),
        (MaxEpoch(2), [(8, True), (9, False), (10, False), (11, False), (12, True)]),
        (MaxIteration(10), [(10, False), (11, False), (12, True)]),
        (MaxScore(0.8), [(12, True)]),
        (MinLoss(0.125), [(12, True)]),
        (TriggerAnd(EveryEpoch(), MaxIteration(7)), [(8, True), (12, True)]),
        (TriggerOr(MaxIteration(11), MaxScore(0.5)), [(8, True), (11, False), (12, True)]),
    ],
    ids=repr,
)
def test_a_trigger_fires_at_these_moments(trigger: Trigger, moments: list[tuple[int, bool]]) -> None:
    assert fired(trigger) == moments


def test_scores_and_losses_are_looked_at_only_when_an_epoch_has_ended() -> None:
    within = Progress(epoch=1, step=1)

    assert not MaxScore(-1.0)(within)
    assert not MinLoss(1e9)(within)


def test_triggers_are_values() -> None:
    both = TriggerOr(SeveralIteration(3), TriggerAnd(EveryEpoch(), MinLoss(0.5)))

    assert pickle.loads(pickle.dumps(both)) == both
    assert both != TriggerOr(SeveralIteration(4), TriggerAnd(EveryEpoch(), MinLoss(0.5)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SeveralIteration(0),
        lambda: MaxEpoch(1.5),  # type: ignore[arg-type]
        lambda: MaxIteration(True),
        lambda: TriggerAnd(EveryEpoch(), 3),  # type: ignore[arg-type]
    ],
)
def test_a_trigger_that_cannot_work_is_refused(wrong: Callable[[], Trigger]) -> None:
    with pytest.raises(ConfigError, match="takes triggers; received 3|at least 1"):
        wrong()
