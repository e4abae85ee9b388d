"""Gangs that go on without a rank that died, and ranks that run next to the others."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from kindler.config import RunSettings
from kindler.engine import local
from kindler.engine.job import Job, RankSpec, equal_ranks
from kindler.engine.meeting import Gathering, decode_parts, read_numbers, write_numbers
from kindler.engine.worker import Worker
from kindler.errors import ConfigError, WorkerLostError
from kindler.frame import Frame, Piece, reading


def parsed(pieces: list[Piece]) -> Frame:
    data = b"".join(bytes(piece) for piece in pieces)
    parser = reading()
    wanted = next(parser)
    try:
        while True:
            part, data = data[:wanted], data[wanted:]
            wanted = parser.send(part)
    except StopIteration as done:
        frame: Frame = done.value
        return frame


def test_a_gathering_is_complete_without_the_lost_whose_part_is_empty() -> None:
    gathering = Gathering(3, 3)
    gathering.bring(0, b"zero", "all")
    gathering.bring(1, b"one", [0, 2])
    assert not gathering.complete()
    assert gathering.complete({2})
    gathering.bring(2, b"two", "all")

    answers = {rank: parsed(pieces) for rank, pieces in gathering.answers({2}).items()}
    assert {rank: decode_parts(frame) for rank, frame in answers.items()} == {
        0: [b"zero", b"one", b""],
        1: [b"zero", b""],
    }
    assert {tuple(frame.fields["lost"]) for frame in answers.values()} == {(2,)}


def test_sums_are_those_of_the_ranks_that_are_left() -> None:
    gathering = Gathering(0, 2)
    gathering.bring(0, write_numbers([1, 2]), "sum")

    [total] = decode_parts(parsed(gathering.answers([1])[0]))
    assert read_numbers(total) == [1, 2]


def meets(worker: Worker, dying: bytes) -> list[bytes]:
    """What the workers of these tests run."""
    worker.become_optional()
    worker.barrier()
    if worker.rank in dying:
        os.kill(os.getpid(), signal.SIGKILL)
    told = worker.all_gather(str(worker.rank).encode())
    return [b",".join(told), str(worker.leads).encode()]


def serves(worker: Worker, dying: bytes) -> list[bytes]:
    assert (worker.size, worker.rank, worker.role) == (3, 3, "ps")
    worker.answer_calls(lambda rank, sock: sock.close(), lambda: None)
    return []


def returns(worker: Worker, dying: bytes) -> list[bytes]:
    worker.others_ended.wait(60)
    return [b"a result"]


def job(dying: bytes) -> Job:
    beside = RankSpec(target=f"{__name__}:serves", role="ps", ports=1, service=True, beside=True)
    ranks = (*equal_ranks(f"{__name__}:meets", 3), beside)
    return Job(ranks=ranks, buffers=(dying,), settings=RunSettings(idle_s=0))


@pytest.mark.usefixtures("no_workers_left")
def test_the_others_meet_without_a_rank_that_died_and_the_driver_hears_of_it() -> None:
    heard: list[dict[str, Any]] = []
    outcomes = local.run(job(b"\0"), listener=lambda event: heard.append(event.fields))

    results = {o.rank: o.buffers for o in outcomes if o.kind == "result"}
    assert results == {1: (b",1,2", b"True"), 2: (b",1,2", b"False")}
    [left] = [fields for fields in heard if fields.get("name") == "left"]
    assert left["worker"] == 0
    assert "SIGKILL" in left["reason"]


@pytest.mark.usefixtures("no_workers_left")
def test_a_gang_of_which_all_died_is_lost() -> None:
    with pytest.raises(WorkerLostError, match="lost worker 0 .*SIGKILL"):
        local.run(job(b"\0\1\2"), listener=lambda event: None)


@pytest.mark.usefixtures("no_workers_left")
def test_the_result_of_a_service_is_none_of_the_gang() -> None:
    service = RankSpec(target=f"{__name__}:returns", role="ps", service=True, beside=True, grace_s=30)
    ranks = (*equal_ranks(f"{__name__}:meets", 1), service)
    with pytest.raises(WorkerLostError, match="lost worker 0 .*SIGKILL"):
        local.run(
            Job(ranks=ranks, buffers=(b"\0",), settings=RunSettings(idle_s=0)), listener=lambda event: None
        )


def test_ranks_beside_the_others_are_services_and_come_last() -> None:
    beside = RankSpec(target="a:b", service=True, beside=True)

    with pytest.raises(ConfigError, match="come last"):
        Job(ranks=(beside, *equal_ranks("a:b", 2)))
    with pytest.raises(ConfigError, match="is a service: pass service=True"):
        Job(ranks=(*equal_ranks("a:b", 1), RankSpec(target="a:b", beside=True)))
