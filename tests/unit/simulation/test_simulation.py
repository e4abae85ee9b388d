"""Thousands of worlds, each with mishaps of its own: what is promised holds in all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kindler.engine.hub import Hub, _Member
from kindler.engine.meeting import HaltVote
from kindler.frame import Frame
from kindler.frameworks.base import BaseReplica
from kindler.runtime.broker_worker import _Slot
from kindler.train.loop import Loop, Start
from tests.unit.simulation.network import Peer
from tests.unit.simulation.seeds import first_failure
from tests.unit.simulation.world import world
from tests.whole import WHOLE

ROOT = Path(__file__).parents[3]
SEEDS = 10_000 if WHOLE else 1_000
FITS = 10_000 if WHOLE else 500  # each takes as long as three others
PLANTED = 1_000  # seeds, in which a planted defect must show


@pytest.mark.timeout(1800)
def test_gangs_end_with_all_results_or_with_the_error_of_what_went_wrong() -> None:
    failure = first_failure("gang", range(SEEDS))
    assert failure is None, failure and failure[1]


@pytest.mark.timeout(1800)
def test_a_fit_ends_as_an_undisturbed_one_or_with_the_error_of_what_went_wrong() -> None:
    failure = first_failure("fit", range(FITS))
    assert failure is None, failure and failure[1]


@pytest.mark.timeout(1800)
def test_each_task_gets_one_report_and_runs_again_only_where_something_went_wrong() -> None:
    failure = first_failure("tasks", range(SEEDS))
    assert failure is None, failure and failure[1]


@pytest.mark.parametrize("kind", ["gang", "fit", "tasks"])
def test_a_seed_is_the_same_world_in_every_process(kind: str) -> None:
    command = [sys.executable, "-m", "tests.unit.simulation.seeds", kind, "7"]
    run = partial(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=True)
    traces = {run().stdout for _ in range(2)}
    assert len(traces) == 1
    assert traces.pop().count("\n") > 5


@contextmanager
def acknowledgements_are_lost() -> Iterator[None]:
    """Those of results of ranks that a mishap has met."""
    send = Peer.send

    def without(self: Peer, kind: str, *buffers: Any, **fields: Any) -> None:
        if kind == "kept" and self.id in world().scenario.touched:
            return
        send(self, kind, *buffers, **fields)

    with patch.object(Peer, "send", without):
        yield


@contextmanager
def a_second_process_joins() -> Iterator[None]:
    """A rank that joins again does so at once, although its first process lives."""
    join = Hub._join

    def joins(self: Hub, peer: Any, frame: Frame) -> None:
        known: _Member | None = self._members.get(int(frame.fields["rank"]))
        if known is not None and not self._together and not known.finished:
            known.dead = True
        join(self, peer, frame)

    with patch.object(Hub, "_join", joins):
        yield


@contextmanager
def a_stale_lease_counts() -> Iterator[None]:
    """A process whose place another one has taken, as nothing was heard of it in time, is listened to."""
    handle = Hub._handle

    def handles(self: Hub, peer: Any, rank: int, frame: Frame) -> None:
        member = self._members[rank]
        holder, dead = member.peer, member.dead
        member.peer, member.dead = peer, False
        try:
            handle(self, peer, rank, frame)
        finally:
            if not member.dead:
                member.peer, member.dead = holder, dead

    with patch.object(Hub, "_handle", handles):
        yield


@contextmanager
def results_are_acknowledged_before_they_are_sent() -> Iterator[None]:
    """So a worker that dies in between takes the task with it."""
    deliver = _Slot._deliver

    def delivers(self: _Slot, message: Any, task_id: str, reply: bytes) -> None:
        self.link.open()
        self.link.channel.basic_ack(message.delivery_tag)
        deliver(self, message, task_id, reply)

    with patch.object(_Slot, "_deliver", delivers):
        yield


@contextmanager
def leases_end_unnoticed() -> Iterator[None]:
    """A worker believes that it has a task, whose lease it did not renew."""
    with patch.object(_Slot, "_keep", lambda self, message: None):
        yield


@contextmanager
def a_survivor_keeps_half_a_step() -> Iterator[None]:
    """It draws random numbers for the step again, after those that it had drawn."""
    go_back = Loop.go_back

    def goes_back(self: Loop, start: Start) -> None:
        assert start.point is not None
        go_back(self, replace(start, point=replace(start.point, snapshot=None)))

    with patch.object(Loop, "go_back", goes_back):
        yield


@contextmanager
def a_survivor_goes_on_at_a_step_of_its_own() -> Iterator[None]:
    """It is a step behind, and does not take the state of who is ahead."""
    rejoin = BaseReplica.rejoin

    def rejoins(self: BaseReplica, collective: Any, state: bytes = b"") -> None:
        rejoin(self, collective, b"" if self.step else state)

    with patch.object(BaseReplica, "rejoin", rejoins):
        yield


@contextmanager
def all_end_after_the_step_that_was_named_last() -> Iterator[None]:
    """Where ranks are asked to halt, rather than after the newest one."""

    def says(self: HaltVote, rank: int, begun: int) -> bool:
        self._largest = begun
        return self.left(rank)

    with patch.object(HaltVote, "says", says):
        yield


@contextmanager
def a_notice_during_a_replacement_is_forgotten() -> Iterator[None]:
    notice = Hub.notice

    def notices(self: Hub, *args: Any, **fields: Any) -> None:
        notice(self, *args, **fields)
        self._is_noticed = False

    with patch.object(Hub, "notice", notices):
        yield


@pytest.mark.parametrize(
    ("kind", "defect"),
    [
        ("gang", acknowledgements_are_lost),
        ("gang", a_second_process_joins),
        ("gang", a_stale_lease_counts),
        ("fit", a_survivor_keeps_half_a_step),
        ("fit", a_survivor_goes_on_at_a_step_of_its_own),
        ("fit", all_end_after_the_step_that_was_named_last),
        ("fit", a_notice_during_a_replacement_is_forgotten),
        ("tasks", results_are_acknowledged_before_they_are_sent),
        ("tasks", leases_end_unnoticed),
    ],
)
def test_a_planted_defect_is_found(kind: str, defect: Any) -> None:
    with defect():
        failure = first_failure(kind, range(PLANTED))
    assert failure is not None, f"{defect.__name__} was not found in {PLANTED} seeds"
