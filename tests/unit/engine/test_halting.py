"""How ranks agree on the last step: the newest that one has begun, however they stand."""

from __future__ import annotations

import threading

import pytest

from kindler.engine.meeting import Halting, HaltVote
from kindler.errors import TrainingError


def test_ranks_end_after_the_newest_step_that_one_has_begun() -> None:
    ahead, behind = Halting(), Halting()
    assert ahead.go_on(1, timeout_s=1)
    assert behind.go_on(1, timeout_s=1)
    assert ahead.go_on(2, timeout_s=1)  # it waits for the other one in there
    vote = HaltVote([0, 1])
    assert not vote.says(0, ahead.asked())
    assert vote.says(1, behind.asked())
    for rank in (ahead, behind):
        rank.answer(vote.wait(0) or 0)

    assert behind.go_on(2, timeout_s=1)
    assert not behind.go_on(3, timeout_s=1)
    assert not ahead.go_on(3, timeout_s=1)


def test_a_rank_that_was_asked_begins_nothing_until_it_hears_of_the_others() -> None:
    halting, begun = Halting(), threading.Event()
    assert halting.asked() == 0
    thread = threading.Thread(target=lambda: halting.go_on(1, timeout_s=60) and begun.set())
    thread.start()
    assert not begun.is_set()
    halting.answer(1)
    thread.join(60)
    assert begun.is_set()
    waiting = Halting()
    waiting.asked()
    with pytest.raises(TrainingError, match="did not report within 0 s where to halt"):
        waiting.go_on(1, timeout_s=0)


def test_where_ranks_do_not_meet_in_steps_each_leaves_the_last_epoch_where_it_is() -> None:
    halting = Halting()
    assert halting.go_on(2, whole=False, timeout_s=1)
    halting.asked()
    halting.answer(3)
    assert halting.go_on(2, whole=False, timeout_s=1)  # others are in the epoch after it
    assert not halting.go_on(3, whole=False, timeout_s=1)


def test_ranks_that_end_meanwhile_are_not_waited_for() -> None:
    vote = HaltVote([0, 1])
    assert not vote.says(1, 4)
    assert vote.wait(0) is None
    assert vote.left(0)
    assert vote.wait(0) == 4
    assert not vote.left(1)  # said once
