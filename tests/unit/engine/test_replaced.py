"""Gangs in which another process takes the place of a rank that died: all ends as if it had not."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from kindler.config import RunSettings
from kindler.engine import local
from kindler.engine.hub import Hub
from kindler.engine.job import Job, equal_ranks
from kindler.engine.meeting import (
    Gathering,
    Regrouping,
    Transcript,
    decode_parts,
    read_arrays,
    weighted_arrays,
)
from kindler.engine.outcome import Outcome
from kindler.engine.supervisor import Supervisor
from kindler.engine.wire import Channel, connect
from kindler.engine.worker import Worker
from kindler.errors import ConfigError, TrainingError, WorkerLostError
from tests.unit.engine.test_going_on import parsed

TURNS, KEPT = 6, 3
SECRET = b"s" * 32


def trains(worker: Worker, folder: bytes, deaths: bytes) -> list[bytes]:
    """Adds up means; `deaths` are "rank:turn", each of which happens once, or again and again after "!"."""
    places = dict(part.split(":") for part in deaths.decode().split())
    opened = worker.all_gather(b"opening %d" % worker.rank)
    kept = worker.opened()
    turn, value = (0, float(worker.rank)) if not kept else np.frombuffer(kept, np.float64).tolist()
    for now in range(int(turn), TURNS):
        dies = places.get(str(worker.rank), "")
        marker = Path(folder.decode(), f"dead-{worker.rank}")
        if dies.strip("!") == str(now) and (dies.endswith("!") or not marker.exists()):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        [mean] = worker.mean([np.full(3, value)], weight=worker.rank + 1)
        value = value * 0.5 + mean[0] + now
        if worker.rank == 0:
            worker.report("turn", number=now)
        if now == KEPT:
            worker.keep(np.array([now + 1, value]).tobytes())
    return [str(value).encode(), b"|".join(opened), str(bool(kept)).encode()]


def job(folder: Path, deaths: str, **settings: Any) -> Job:
    return Job(
        ranks=equal_ranks(f"{__name__}:trains", 3),
        buffers=(str(folder).encode(), deaths.encode()),
        settings=RunSettings(idle_s=0, **settings),
        together=False,
        replaceable=True,
    )


def outcome_of(folder: Path, deaths: str) -> tuple[list[tuple[bytes, ...]], list[dict[str, Any]]]:
    folder.mkdir()
    heard: list[dict[str, Any]] = []
    outcomes = local.run(job(folder, deaths), listener=lambda event: heard.append(event.fields))
    return [outcome.buffers for outcome in outcomes], heard


@pytest.mark.usefixtures("no_workers_left")
def test_a_gang_whose_ranks_were_replaced_ends_as_one_whose_ranks_lived(tmp_path: Path) -> None:
    undisturbed, _ = outcome_of(tmp_path / "a", "")
    # One dies before it has kept anything, one afterwards, and the one that reports in between.
    results, heard = outcome_of(tmp_path / "b", f"0:{KEPT + 2} 1:0 2:{KEPT + 1}")

    assert [result[:2] for result in results] == [result[:2] for result in undisturbed]
    assert [result[2] for result in results] == [b"True", b"False", b"True"]
    assert results[0][1] == b"opening 0|opening 1|opening 2"
    assert [fields["number"] for fields in heard if fields.get("name") == "turn"] == list(range(TURNS))
    dead = {fields["worker"]: fields["reason"] for fields in heard if fields.get("name") == "replaced"}
    assert dead.keys() == {0, 1, 2}
    assert all("SIGKILL" in reason for reason in dead.values())


@pytest.mark.usefixtures("no_workers_left")
def test_a_rank_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkerLostError, match=r"lost worker 1 .*SIGKILL"):
        local.run(job(tmp_path, "1:2!", max_failures=1), listener=lambda event: None)


def test_a_process_that_replaces_another_says_that_it_is_not_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A first one would be that of a stage which begins again, and end the one that runs."""
    attempts, hub = [], MagicMock()

    def dies(*_: object, attempt: int, **__: object) -> MagicMock:
        attempts.append(attempt)
        supervisor = MagicMock()
        supervisor.__enter__.return_value.run.return_value = Outcome(0, "lost", {"reason": "died"})
        return supervisor

    monkeypatch.setattr(local, "Supervisor", dies)
    local._LocalLaunch(job(tmp_path, "", max_failures=2), None)._supervise(0, hub)

    assert attempts == [0, 1, 2]
    hub.give_up.assert_called_once_with(0, {"host": "this machine", "reason": "died"})


def test_a_rank_whose_connection_to_the_driver_breaks_is_lost_and_replaced(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_child(*_: object, wanted: Callable[[], bool], **__: object) -> None:
        while wanted():
            time.sleep(0.01)
        raise TrainingError("nobody wants it")

    monkeypatch.setattr("kindler.engine.fork_server.start_child", start_child)
    with Supervisor(hub._job, 0, hub=hub.address, owner=os.getpid()) as supervisor:
        supervisor.start()
        while not hub.joined:
            time.sleep(0.01)
        assert hub._server is not None
        hub._server.close(10)  # which says nothing to anybody
        outcome = supervisor.run()

    assert (outcome.kind, outcome.fields["reason"]) == ("lost", "its connection to the driver broke")
    assert supervisor.needs_another(outcome)


def test_ranks_that_run_together_cannot_be_replaced() -> None:
    with pytest.raises(ConfigError, match="pass together=False, too"):
        Job(ranks=equal_ranks("a:b", 2), replaceable=True)


def test_means_count_by_weight_in_their_own_types() -> None:
    gathering = Gathering(0, 3)
    for rank, weight in enumerate([1.0, 3.0, 0.0]):
        arrays = [np.full(2, np.nan if rank == 2 else rank, np.float32), np.full(1, rank * 2.0)]
        gathering.bring(rank, weighted_arrays(arrays, weight), "mean")

    [mean] = decode_parts(parsed(gathering.answers()[0]))
    single, double = read_arrays(mean)
    assert (single.dtype, single.tolist()) == (np.float32, [0.75, 0.75])
    assert (double.dtype, double.tolist()) == (np.float64, [1.5])


def test_a_transcript_forgets_what_no_process_can_ask_for_and_leaves_no_file() -> None:
    large = b"x" * (1 << 20)
    with closing(Transcript(2)) as transcript:
        for turn in range(4):
            same = [large]
            transcript.answered(turn, {0: same, 1: same})
        for rank in (0, 1):
            assert transcript.opens(rank, 1) == (1, b"")
        transcript.keep(0, 3, large)
        assert transcript.answer(1, 0) == large, "the other one may still need it"
        transcript.keep(1, 2, b"mine")

        assert [turn for turn in range(5) if transcript.answer(turn, 0) is not None] == [0, 2, 3]
        assert transcript.opens(0, 1) == (3, large)
        assert transcript._folder is not None
        folder = transcript._folder.path
        assert len(list(folder.iterdir())) == 4  # turns 0, 2 and 3, and what rank 0 has kept
    assert not folder.exists()


def prepared(size: int, most: int) -> Regrouping:
    group = Regrouping(size, most)
    assert all(group.prepare(rank) for rank in range(size))
    return group


def test_a_loss_before_all_ranks_are_prepared_is_not_survived() -> None:
    group = Regrouping(2, most=3)
    group.prepare(0)

    assert not group.lose(1, {})
    assert not group.absent


def test_ranks_go_on_once_survivors_and_all_replacements_have_come() -> None:
    group = prepared(3, most=3)

    assert group.lose(1, {"reason": "killed", "died": 2.0})
    assert [group.come(0), group.come(2)] == [False, False]
    assert group.lose(2, {"reason": "killed too", "died": 3.0}), "one that has come may die, too"
    assert [group.prepare(1), group.prepare(2)] == [False, False], "they replace others"
    assert [group.come(1), group.come(2)] == [False, True]
    group.part()
    assert not group.absent
    assert not group.come(0), "the next time, all have to come again"


def test_all_losses_since_ranks_went_on_last_are_told_of_once_they_do() -> None:
    group = prepared(2, most=3)
    for died in (2.0, 4.0):  # the second time, before they can
        assert group.lose(1, {"reason": "killed", "died": died})
        group.come(0)
        group.come(1)
        group.part()

    assert group.resume(now=5.0) == [
        {"worker": 1, "seconds": 3.0, "reason": "killed"},
        {"worker": 1, "seconds": 1.0, "reason": "killed"},
    ]
    assert group.resume(now=6.0) == []


def test_the_last_rank_and_one_loss_too_many_end_the_run() -> None:
    group = prepared(2, most=3)
    assert group.lose(0, {})
    assert not group.lose(1, {})

    few = prepared(2, most=1)
    assert few.lose(0, {})
    few.part()
    assert not few.lose(0, {})


def test_a_gather_is_void_only_if_one_that_died_took_no_part_in_it() -> None:
    gathering = Gathering(0, 3)
    gathering.bring(1, b"", "all")

    assert not gathering.lacks([1])
    assert gathering.lacks([1, 2])
    assert not gathering.lacks([])


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(
        Job(
            ranks=equal_ranks("", 2),
            secret=SECRET,
            settings=RunSettings(heartbeat_s=0.05),
            together=False,
            replaceable=True,
        )
    ) as hub:
        yield hub


def come(hub: Hub, rank: int, attempt: int = 0) -> Channel:
    channel = connect(hub.address, SECRET, timeout_s=10)
    channel.send("hello", rank=rank, host=f"host-{rank}-{attempt}", attempt=attempt)
    return channel


def told(channel: Channel) -> str:
    return str(channel.receive(10).kind)


def test_a_second_task_of_a_rank_waits_until_the_first_is_gone(hub: Hub) -> None:
    first, other = come(hub, 0), come(hub, 1)
    assert told(first) == told(other) == "welcome"
    for channel in (first, other):
        channel.send("pulse", ticks=0, waiting=False)
    second = come(hub, 0, attempt=1)
    with pytest.raises(TimeoutError):
        second.receive(0.3)
    first.close()
    assert told(second) == "welcome"
    [event] = [event for event in hub.events(10) if event.fields["name"] == "replaced"]
    assert (event.rank, event.fields["host"]) == (0, "host-0-0")
    second.close()
    other.close()


def test_a_third_task_of_a_rank_ends_nobody_and_takes_its_place_first(hub: Hub) -> None:
    first, other = come(hub, 0), come(hub, 1)
    assert told(first) == told(other) == "welcome"
    for channel in (first, other):
        channel.send("pulse", ticks=0, waiting=False)
    second = come(hub, 0, attempt=1)
    with pytest.raises(TimeoutError):
        second.receive(0.1)
    third = come(hub, 0, attempt=2)
    with pytest.raises(TimeoutError):
        third.receive(0.1)
    first.close()
    assert told(third) == "welcome"
    third.close()
    assert told(second) == "welcome"  # and nothing before it
    for channel in (second, other):
        channel.close()


def test_a_replacement_gets_the_answer_of_the_turn_that_it_asks_for(hub: Hub) -> None:
    first, other = come(hub, 0), come(hub, 1)
    assert told(first) == told(other) == "welcome"
    for channel in (first, other):
        channel.send("pulse", ticks=0, waiting=False)
    for turn in (0, 1):
        for rank, channel in enumerate((first, other)):
            if (rank, turn) != (1, 1):
                channel.send("gather", b"%d in %d" % (rank, turn), turn=turn, wants="all")
        if turn == 0:
            assert told(first) == told(other) == "gathered"
    first.close()  # it has brought its part of turn 1, and waits for the other
    assert any(event.fields["name"] == "replaced" for event in hub.events(10))
    again = come(hub, 0, attempt=1)
    assert told(again) == "welcome"
    other.send("gather", b"1 in 1", turn=1, wants="all")
    assert decode_parts(other.receive(10)) == [b"0 in 1", b"1 in 1"]

    answers = []
    for turn in (0, 1):
        again.send("gather", b"0 in %d" % turn, turn=turn, wants="all")
        answers.append(decode_parts(again.receive(10)))
    assert answers == [[b"0 in 0", b"1 in 0"], [b"0 in 1", b"1 in 1"]]
    for channel in (again, other):
        channel.close()


def test_a_replacement_is_welcome_even_if_its_rank_had_no_job_yet(hub: Hub) -> None:
    first, other = come(hub, 0), come(hub, 1)
    assert told(first) == told(other) == "welcome"
    other.send("pulse", ticks=0, waiting=False)
    for channel in (first, other):
        channel.close()
    replaced = 0
    while replaced < 2:
        replaced += sum(event.fields["name"] == "replaced" for event in hub.events(10))
    again = [come(hub, rank, attempt=1) for rank in (0, 1)]
    assert [told(channel) for channel in again] == ["welcome"] * 2
    for channel in again:
        channel.close()


def test_a_replacement_hears_where_to_halt(hub: Hub) -> None:
    first, other = come(hub, 0), come(hub, 1)
    assert told(first) == told(other) == "welcome"
    for channel in (first, other):
        channel.send("pulse", ticks=0, waiting=False)
        channel.send("report", name="here")
    here = 0
    while here < 2:
        here += len(list(hub.events(10)))
    asking = threading.Thread(target=hub.halt, args=(10,))
    asking.start()
    assert told(first) == told(other) == "halt"
    other.send("halting", begun=3)
    first.close()  # before it has said how far it is
    again = come(hub, 0, attempt=1)
    assert told(again) == "welcome"
    again.send("pulse", ticks=0, waiting=False)
    assert told(again) == "halt"
    again.send("halting", begun=1)
    halts = [channel.receive(10).fields for channel in (again, other)]
    assert halts == [{"last": 3, "moves": False}] * 2
    asking.join(10)
    again.close()
    later = come(hub, 0, attempt=2)
    assert told(later) == "welcome"
    later.send("pulse", ticks=0, waiting=False)
    assert told(later) == "halt"
    assert later.receive(10).fields == {"last": 3, "moves": False}
    for channel in (later, other):
        channel.close()


def test_a_task_of_a_stage_that_begins_again_takes_the_place_of_one_that_runs(hub: Hub) -> None:
    first, other = come(hub, 0), come(hub, 1)
    assert told(first) == told(other) == "welcome"
    for channel in (first, other):
        channel.send("pulse", ticks=0, waiting=False)
    again = come(hub, 0)
    assert told(first) == "dismiss"
    assert told(again) == "welcome"
    first.send("error", types=["builtins:ValueError"], message="late", traceback="", host="a")
    with pytest.raises(TimeoutError):
        other.receive(0.3)  # nobody hears what a process says whose place another one has
    other.close()
    again.close()


def test_a_rank_that_is_done_is_not_needed_again(hub: Hub) -> None:
    first, other = come(hub, 0), come(hub, 1)
    assert told(first) == told(other) == "welcome"
    first.send("done")
    while not any(event.kind == "done" for event in hub.events(10)):
        pass
    late = come(hub, 0, attempt=1)
    assert told(late) == "abort"
    for channel in (first, other, late):
        channel.close()
