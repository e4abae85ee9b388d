"""Thousands of worlds, each with mishaps of its own: what is promised holds in all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from kindler.engine.hub import Hub, _Member
from kindler.frame import Frame
from tests.unit.simulation.network import Peer
from tests.unit.simulation.seeds import first_failure
from tests.unit.simulation.world import world
from tests.whole import WHOLE

SEEDS = 10_000 if WHOLE else 2_000
PLANTED = 1_000  # seeds, in which a planted defect must show


@pytest.mark.timeout(1800)
def test_gangs_end_with_all_results_or_with_the_error_of_what_went_wrong() -> None:
    failure = first_failure("gang", range(SEEDS))
    assert failure is None, failure and failure[1]


def test_a_seed_is_the_same_world_in_every_process() -> None:
    command = [sys.executable, "-m", "tests.unit.simulation.seeds", "gang", "7"]
    traces = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(traces) == 1
    assert "the run ended with" in traces.pop()


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
        if member.peer is not peer and frame.kind in ("gather", "report", "result", "done"):
            holder, member.peer = member.peer, peer
            try:
                handle(self, peer, rank, frame)
            finally:
                member.peer = holder
        else:
            handle(self, peer, rank, frame)

    with patch.object(Hub, "_handle", handles):
        yield


@pytest.mark.parametrize("defect", [acknowledgements_are_lost, a_second_process_joins, a_stale_lease_counts])
def test_a_planted_defect_is_found(defect: Any) -> None:
    with defect():
        failure = first_failure("gang", range(PLANTED))
    assert failure is not None, f"{defect.__name__} was not found in {PLANTED} seeds"
