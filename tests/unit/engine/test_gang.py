"""Gangs of real processes on the local engine: roles, feeds, held ports, and every way to end one."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kindler.config import RunSettings
from kindler.engine import fork_server, local
from kindler.engine.gang import Gang, NotBegun
from kindler.engine.job import Job, RankSpec, equal_ranks
from kindler.engine.outcome import Outcome
from kindler.errors import ConfigError, FeedError, TrainingError, WorkerError, WorkerLostError

pytestmark = pytest.mark.usefixtures("no_workers_left")


@pytest.fixture(scope="module", autouse=True)
def _no_processes_left() -> Iterator[None]:
    yield
    fork_server.close()


def target(name: str) -> str:
    return f"tests.unit.gang_targets:{name}"


def start(name: str, count: int = 1, **options: Any) -> Gang:
    return local.start(Job(ranks=equal_ranks(target(name), count), **options))


def until_reported(gang: Gang, name: str, count: int = 1) -> None:
    """Read events until as many ranks have reported `name`."""
    for event in gang.events():
        count -= event.kind == "report" and event.fields["name"] == name
        if count == 0:
            return
    gang.wait()


def flood(gang: Gang, timeout_s: float = 60) -> None:
    """Push to the first rank more than anybody takes who does not read."""
    for _ in range(1_000):
        gang.push(0, "rows", bytes(1 << 20), timeout_s=timeout_s)


def test_roles_have_targets_and_environments_of_their_own_and_know_each_other() -> None:
    ranks = (
        RankSpec(
            target=target("facts"), role="chief", environment={"KINDLER_TEST_ROLE": "the chief"}, ports=2
        ),
        RankSpec(target=target("facts"), ports=1),
        RankSpec(target=target("say_role"), role="ps"),
        RankSpec(target=target("facts"), environment={"KINDLER_TEST_ROLE": "the last"}, ports=1),
    )
    with local.start(Job(ranks=ranks, buffers=())) as gang:
        members = gang.members()
        addresses = [gang.address(rank) for rank in range(4)]
        outcomes = gang.wait()

    assert [outcome.rank for outcome in outcomes] == [0, 1, 2, 3]
    assert outcomes[2].buffers == (b"another target, role ps",)
    told = [json.loads(outcomes[rank].buffers[0]) for rank in (0, 1, 3)]
    assert [(one["role"], one["index"]) for one in told] == [("chief", 0), ("worker", 0), ("worker", 1)]
    assert [one["variable"] for one in told] == ["the chief", None, "the last"]
    assert {tuple(one["roles"]) for one in told} == {("chief", "worker", "ps", "worker")}
    assert [len(one["endpoints"]) for one in told] == [2, 1, 1]
    spec = {"chief": told[0]["endpoints"][:1], "worker": told[1]["endpoints"] + told[2]["endpoints"]}
    assert all(one["spec"] == spec for one in told)
    assert [list(members[rank].endpoints) for rank in (0, 1, 3)] == [one["endpoints"] for one in told]
    assert addresses == [*spec["chief"], spec["worker"][0], "127.0.0.1", spec["worker"][1]]


def test_the_exception_of_a_role_reaches_the_driver_and_stops_the_others() -> None:
    ranks = (RankSpec(target=target("hang")), RankSpec(target=target("fail"), role="evaluator"))

    with (
        local.start(Job(ranks=ranks)) as gang,
        pytest.raises(LookupError, match="^evaluator gives up") as caught,
    ):
        gang.wait()

    assert isinstance(caught.value, WorkerError)
    assert (caught.value.rank, caught.value.role) == (1, "evaluator")
    assert caught.value.host == socket.gethostname()
    assert "on worker 1 (evaluator), host" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "error"), [("talk", None), ("talk_and_fail", LookupError), ("talk_and_die", WorkerLostError)]
)
def test_all_that_workers_print_before_their_end_is_heard(name: str, error: type[Exception] | None) -> None:
    said: dict[int, list[str]] = {0: [], 1: []}
    gang = start(name, 2, together=False, environment=(("PYTHONUNBUFFERED", ""),))  # some images set it

    with gang:
        for event in gang.events():
            if event.kind == "log":
                said[event.rank].append(event.fields["line"])
        if error is None:
            gang.wait()
        else:
            with pytest.raises(error, match="that was all|SIGKILL"):
                gang.wait()

    everything = [str(number) for number in range(2_000)]
    assert everything in said.values()
    assert error is not None or said == {0: everything, 1: everything}


def test_a_service_is_stopped_once_all_others_have_a_result() -> None:
    ranks = (
        RankSpec(target=target("hang"), role="ps", service=True),
        RankSpec(target=target("say_role")),
    )

    outcomes = local.run(Job(ranks=ranks), listener=lambda event: None)

    assert [outcome.kind for outcome in outcomes] == ["aborted", "result"]


def test_a_gang_of_services_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one rank that is not a service"):
        Job(ranks=(RankSpec(target=target("hang"), service=True),))


def test_what_is_pushed_to_a_worker_comes_back_as_it_works() -> None:
    large = bytes(range(256)) * (40 << 10)  # more than one frame
    batches = [(b"a", b"bc"), (b"",), (large,), (b"last",)]
    with start("echo", 2) as gang:
        for batch in batches:
            gang.push(1, "rows", *batch)
        first = gang.output(1, "echoed").get()  # while the feed is still open
        for rank in (0, 1):
            gang.feed(rank, "rows").end()

        assert first == batches[0]
        assert list(gang.output(1, "echoed")) == batches[1:]
        assert list(gang.output(0, "echoed")) == []
        assert [int(outcome.buffers[0]) for outcome in gang.wait()] == [0, 7 + len(large)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("read_one", "worker 0 has returned and reads no more"),
        ("close_feed", "worker 0 closed it: seen enough"),
        ("read_one_and_die", "worker 0 was lost: its process was ended by SIGKILL"),
        ("fail", "worker 0 failed with LookupError: worker gives up"),
    ],
)
def test_a_push_to_a_worker_that_reads_no_more_says_why(name: str, message: str) -> None:
    with start(name) as gang, pytest.raises(FeedError, match=message):
        flood(gang)


def test_a_lost_worker_is_what_wait_raises_after_a_push_has_failed() -> None:
    with start("read_one_and_die") as gang:
        with pytest.raises(FeedError, match="SIGKILL"):
            flood(gang)
        with pytest.raises(WorkerLostError, match="lost worker 0"):
            gang.wait()


def test_a_push_to_a_worker_that_hangs_ends_in_time() -> None:
    with start("hang") as gang, pytest.raises(FeedError, match="worker 0 has taken nothing for 0.1 s"):
        flood(gang, timeout_s=0.1)


def test_what_goes_wrong_while_feeding_is_raised_in_the_worker() -> None:
    with start("fail_on_bad_feed") as gang:
        gang.feed(0, "rows").fail("the source is gone")
        with pytest.raises(FeedError, match="feed 'rows': the source is gone"):
            gang.wait()


def test_a_rank_that_is_not_there_cannot_be_fed() -> None:
    with start("hang") as gang, pytest.raises(ConfigError, match="rank=1: this gang has the ranks 0 to 0"):
        gang.push(1, "rows", b"")


def test_a_held_port_is_bound_by_the_program_and_reached_by_the_others() -> None:
    job = Job(ranks=(RankSpec(target=target("ring"), ports=1),) * 3)

    outcomes = local.run(job, listener=lambda event: None)

    assert [outcome.buffers[0] for outcome in outcomes] == [b"2", b"0", b"1"]


def test_abort_ends_all_ranks_and_wait_says_why() -> None:
    with start("hang", 2) as gang:
        until_reported(gang, "hanging", 2)
        with pytest.raises(TimeoutError, match="still running"):
            gang.wait(0.01)
        assert gang.is_running
        gang.abort("nobody needs it")
        with pytest.raises(TrainingError, match="the gang was aborted: nobody needs it"):
            gang.wait()

    assert not gang.is_running


def test_a_killed_worker_is_lost_however_little_time_workers_have_to_stop() -> None:
    settings = RunSettings(stop_timeout_s=0.0005)
    with start("die_slowly", settings=settings) as gang, pytest.raises(WorkerLostError, match="SIGKILL"):
        gang.wait(60)


def test_abort_ends_a_frozen_worker_with_more_on_its_way_than_it_takes() -> None:
    with start("read_one_and_stop", settings=RunSettings(stop_timeout_s=5)) as gang:
        for _ in range(16):
            gang.push(0, "rows", bytes(1 << 20))
        gang.abort("enough")
        with pytest.raises((TrainingError, WorkerLostError), match="aborted|was stopped"):
            gang.wait(60)


def test_an_interrupt_on_the_driver_leaves_nothing() -> None:
    gang = start("hang", 2)
    with pytest.raises(KeyboardInterrupt, match="^$"):  # noqa: SIM117 - it is raised through the gang's block
        with gang:
            interrupted_while_running(gang)

    assert not gang.is_running


def interrupted_while_running(gang: Gang) -> None:
    until_reported(gang, "hanging", 2)
    signal.raise_signal(signal.SIGINT)


def test_two_gangs_run_side_by_side() -> None:
    with start("echo") as first:
        with start("echo") as second:
            for number, gang in enumerate((first, second)):
                gang.push(0, "rows", b"x" * (number + 1))
            second.feed(0, "rows").end()
            assert second.wait()[0].buffers == (b"2",)
        assert first.is_running
        first.feed(0, "rows").end()
        assert first.wait()[0].buffers == (b"1",)


def test_a_failed_gang_does_not_disturb_another() -> None:
    with start("echo") as gang:
        gang.push(0, "rows", b"before")
        with pytest.raises(LookupError, match="gives up"), start("fail") as other:
            other.wait()
        gang.push(0, "rows", b"after")
        gang.feed(0, "rows").end()

        assert list(gang.output(0, "echoed")) == [(b"before",), (b"after",)]
        assert gang.wait()[0].buffers == (b"11",)


@pytest.mark.parametrize(
    ("sync", "error", "message"), [(True, NotBegun, "^$"), (False, WorkerError, "reset")]
)
def test_after_a_notice_before_the_first_step_only_an_error_of_a_workers_own_counts(
    sync: bool, error: type[Exception], message: str
) -> None:
    fields = {"types": ["builtins:OSError"], "message": "reset", "traceback": "", "host": "h", "sync": sync}
    gang = Gang(Job(ranks=equal_ranks("", 2)), SimpleNamespace(outcomes=lambda hub: []))  # type: ignore[arg-type]
    gang._hub = SimpleNamespace(ended_unbegun=True, joined=2)  # type: ignore[assignment]
    with pytest.raises(error, match=message):
        gang._judged([Outcome(1, "error", fields)])


def test_a_broken_exchange_does_not_hide_why_a_gang_was_aborted() -> None:
    fields = {"types": ["builtins:OSError"], "message": "reset", "traceback": "", "host": "h", "sync": True}
    gang = Gang(Job(ranks=equal_ranks("", 2)), SimpleNamespace(outcomes=lambda hub: []))  # type: ignore[arg-type]
    gang.abort("it is late")
    with pytest.raises(TrainingError, match="aborted: it is late"):
        gang._judged([Outcome(1, "error", fields)])
