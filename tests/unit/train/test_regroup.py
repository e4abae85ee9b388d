"""What only a rank knows within an epoch is read by others of its machine after its death."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kindler.data.spool import Spool
from kindler.errors import SyncError
from kindler.train import rows
from kindler.train.loop import Place
from kindler.train.regroup import OwnStates, path_of


def place(step: int, epoch: int = 1) -> Place:
    return Place(epoch, step, step)


@pytest.fixture
def states(tmp_path: Path) -> Iterator[list[OwnStates]]:
    """Of three ranks, the last of which is on another machine."""
    paths: list[bytes] = []
    hosts = ("a", "a", "b")

    def worker(rank: int) -> Any:
        folder = tmp_path / str(rank)
        folder.mkdir()
        return SimpleNamespace(
            rank=rank, size=3, hosts=hosts, host=hosts[rank], scratch=folder, all_gather=lambda mine: paths
        )

    ranks = [OwnStates(worker(rank)) for rank in range(3)]
    for rank, states in enumerate(ranks):
        file = next((tmp_path / str(rank)).iterdir())
        paths.append(json.dumps([str(file), path_of(states.memory)]).encode())
    for states in ranks:
        states.share()
    yield ranks
    for states in ranks:
        states.close()


def test_the_last_two_steps_are_known_on_the_same_machine_even_without_the_folder(
    states: list[OwnStates], tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        states[0].write(place(step), lambda step=step: b"after %d" % step, rows=10 * step)  # type: ignore[misc]
    next((tmp_path / "0").iterdir()).unlink()

    assert states[1].read(0, place(3)) == (b"after 3", 30)
    assert states[1].read(0, place(2)) == (b"after 2", 20)
    assert states[1].read(0, place(1)) is None
    assert states[0].read(0, place(3)) == (b"after 3", 30)
    assert states[2].read(0, place(3)) is None, "it is on another machine"
    assert states[0].read(1, place(3)) is None, "that one has written nothing"


def test_what_is_written_after_a_step_comes_before_what_was_written_ahead_of_its_end(
    states: list[OwnStates],
) -> None:
    states[0].write(place(3), lambda: b"ahead", rows=30, ahead=True)
    assert states[1].read(0, place(3)) == (b"ahead", 30)
    states[0].write(place(3), lambda: b"after", rows=31)
    assert states[1].read(0, place(3)) == (b"after", 31)

    states[0].write(place(4), lambda: None, rows=40)
    assert states[1].read(0, place(4)) is None, "it cannot be told"


def test_a_state_that_is_too_large_is_not_taken_again_before_the_next_epoch(states: list[OwnStates]) -> None:
    taken: list[int] = []

    def large() -> bytes:
        taken.append(1)
        return bytes((1 << 20) + 1)

    states[0].write(place(1), lambda: b"small", rows=1)
    states[0].write(place(3), large, rows=3)
    states[0].write(place(4), large, rows=4)

    assert len(taken) == 1
    assert [states[1].read(0, place(step)) for step in (1, 3, 4)] == [None, None, None]
    states[0].write(place(5, epoch=2), lambda: b"small again", rows=1)
    assert states[1].read(0, place(5, epoch=2)) == (b"small again", 1)


def test_a_process_in_the_folder_of_the_one_before_it_reads_what_that_one_wrote(tmp_path: Path) -> None:
    worker: Any = SimpleNamespace(rank=0, scratch=tmp_path)
    before = OwnStates(worker)
    before.write(place(3), lambda: b"three", 24)
    after = OwnStates(worker)

    assert after.read(0, place(3)) == (b"three", 24)
    for states in (before, after):
        states.close()


def test_a_process_that_gets_other_rows_than_the_one_before_it_says_so() -> None:
    answers: list[bytes] = []

    def all_gather(mine: bytes) -> list[bytes]:
        answers.append(mine)
        return answers[:1]

    worker: Any = SimpleNamespace(rank=0, regroups=True, all_gather=all_gather)
    first = Spool(rows=3, arrays={"x": np.arange(3)})
    rows._whose_rows(worker, first, [3])
    rows._whose_rows(worker, first, [3])

    with pytest.raises(SyncError, match="worker 0 has other rows than the process whose place it takes"):
        rows._whose_rows(worker, Spool(rows=3, arrays={"x": np.array([0, 2, 1])}), [3])


def test_what_a_replica_keeps_is_open_on_the_same_machine_even_without_its_process(
    states: list[OwnStates],
) -> None:
    os.write(states[0].memory, b"kept")
    of_first = states[1].memory_of(0)
    os.ftruncate(states[0].memory, 8)  # it may grow

    assert of_first is not None
    assert os.pread(of_first, 9, 0) == b"kept" + bytes(4)
    assert states[2].memory_of(0) is None, "it is on another machine"
