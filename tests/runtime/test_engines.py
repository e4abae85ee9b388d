"""What the runtime promises, on each engine."""

from __future__ import annotations

import pickle
import select
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from runtime_servers import Broker, Meeting, X, Y

from kindler import Store
from kindler.errors import (
    ConfigError,
    DataError,
    NotFoundError,
    TaskCancelledError,
    TaskTimeoutError,
    UntrustedError,
    WorkerLostError,
)
from tests.conftest import eventually_none

WAIT_S = 120


def run(om: Store, name: str, *args: Any, **settings: Any) -> Any:
    """A handle of a script."""
    return om.runtime.options(**{"trusted": True, **settings}).script(name).run(*args)


def test_a_model_answers_as_it_does_here_to_data_and_to_names_of_data(om: Store) -> None:
    model, remote = om.models.get("net"), om.runtime.model("net")

    handle = remote.predict(X)
    np.testing.assert_array_equal(handle.get(WAIT_S), model.predict(X))
    assert (handle.status, handle.ready(), handle.error) == ("done", True, None)
    np.testing.assert_array_equal(remote.predict("x").get(WAIT_S), model.predict(X))
    np.testing.assert_array_equal(remote.predict(X.tolist()).get(WAIT_S), model.predict(X))
    np.testing.assert_allclose(remote.predict_proba("x").get(WAIT_S), model.predict_proba(X))
    assert remote.score("x", "y").get(WAIT_S) == model.score(X, Y)
    scaled = om.runtime.model("scaler").transform("x").get(WAIT_S)
    np.testing.assert_allclose(scaled, om.models.get("scaler").transform(X))


def test_fit_publishes_a_version_and_the_next_call_uses_it(om: Store) -> None:
    om.models.put(om.models.get("net"), "learner", attributes={"by": "me"})

    version = om.runtime.model("learner").fit("x", 1 - Y).get(WAIT_S)

    assert (str(version), version.attributes) == ("learner@2", {"by": "me"})
    assert version == om.models.metadata("learner")
    assert om.runtime.model("learner").predict(X).get(WAIT_S).tolist() == [1, 1, 0, 0]
    assert om.runtime.model("learner@1").predict(X).get(WAIT_S).tolist() == [0, 0, 1, 1]


def test_columns_of_a_table_are_named_beside_it(om: Store) -> None:
    om.datasets.put(pd.DataFrame({"a": X[:, 0], "kind": Y}), "table", mode="replace")
    om.models.put(om.models.get("net"), "columns")

    version = om.runtime.model("columns").fit("table[^kind]", "table[kind]").get(WAIT_S)
    assert om.runtime.model(str(version)).predict("table[^kind]").get(WAIT_S).tolist() == Y.tolist()
    with pytest.raises(ConfigError, match="available: a, kind"):
        om.runtime.model("net").predict("table[b]").get(WAIT_S)


def test_a_script_gets_its_arguments_and_gives_its_result(om: Store) -> None:
    table = pd.DataFrame({"a": [1, 2], "b": ["x", None]}, index=[5, 7])
    args, options = (
        om.runtime.options(trusted=True).script("echo").run(1, "a", X, table=table, t=(1, 2)).get(WAIT_S)
    )
    assert args[:2] == [1, "a"]
    np.testing.assert_array_equal(args[2], X)
    pd.testing.assert_frame_equal(options["table"], table)
    assert options["t"] == (1, 2)


def test_a_large_array_comes_and_goes_and_leaves_nothing(om: Store) -> None:
    large = np.random.default_rng(0).random((40_000, 8))
    (again,), _ = run(om, "echo", large).get(WAIT_S)
    np.testing.assert_array_equal(again, large)
    assert not eventually_none(lambda: om.datasets.list(".runtime/*", hidden=True))


def test_a_result_larger_than_allowed_is_an_error(om: Store) -> None:
    with pytest.raises(DataError, match=r"has 10\d\d bytes, more than result_bytes=1000.\nHint: .* raise"):
        run(om, "echo", bytes(1000), result_bytes=1000).get(WAIT_S)
    assert run(om, "echo", bytes(1000), result_bytes=1100).get(WAIT_S) == [[bytes(1000)], {}]


def test_what_a_script_raises_is_raised_here_with_what_it_printed(om: Store) -> None:
    handle = run(om, "fail", "no such flower")
    with pytest.raises(ValueError, match="no such flower"):
        handle.get(WAIT_S)
    assert handle.status == "failed"
    assert isinstance(handle.error, ValueError)
    talked = run(om, "talk", "some words")
    talked.get(WAIT_S)
    assert talked.log == "some words"


def test_what_is_not_there_is_said_at_once(om: Store) -> None:
    with pytest.raises(NotFoundError, match="'nett'"):
        om.runtime.model("nett").predict(X)
    with pytest.raises(NotFoundError, match="no dataset"):
        om.runtime.model("net").predict("nothing").get(WAIT_S)
    with pytest.raises(ConfigError, match="has no transform"):
        om.runtime.model("net").transform(X).get(WAIT_S)


def test_code_runs_only_for_who_trusts_it(om: Store) -> None:
    with pytest.raises(UntrustedError):
        om.runtime.script("echo").run().get(WAIT_S)
    with pytest.raises(UntrustedError):
        om.runtime.model("net").predict("made").get(WAIT_S)
    made = om.runtime.options(trusted=True).model("net").predict("made").get(WAIT_S)
    assert made.tolist() == [0, 1, 1]


def test_a_function_is_a_model_that_is_called_with_the_verb(om: Store) -> None:
    got = om.runtime.options(trusted=True).model("twice").predict("made", depth=3).get(WAIT_S)
    assert (got["verb"], got["result"].tolist(), got["options"]) == (
        "predict",
        [[0.0], [2.0], [4.0]],
        {"depth": 3},
    )


def test_tasks_of_a_sequence_follow_each_other_and_stop_at_a_failure(om: Store) -> None:
    om.models.put(om.models.get("net"), "sequenced")
    with om.runtime.options(trusted=True).sequence() as flow:
        flow.model("sequenced").fit("x", 1 - Y)
        flow.model("sequenced").predict("x")
        assert flow.status == ["pending", "pending"]
        fitted, predicted = flow.run().getall(WAIT_S)
    assert (str(fitted), predicted.tolist()) == ("sequenced@2", [1, 1, 0, 0])

    broken = om.runtime.options(trusted=True).sequence()
    broken.script("fail").run("stop here")
    broken.script("echo").run(1)
    with pytest.raises(ValueError, match="stop here"):
        broken.run().getall(WAIT_S)
    with pytest.raises(TaskCancelledError, match="not started, because"):
        broken.handles[1].get(WAIT_S)


def test_a_task_of_a_sequence_that_is_cancelled_cancels_those_after_it(om: Store, meeting: Meeting) -> None:
    flow = om.runtime.options(trusted=True).sequence()
    flow.script("hold").run(meeting.port)
    for n in range(2):
        flow.script("echo").run(n)
    flow.run()
    _, connection = meeting.arrived()
    assert flow.handles[1].cancel()
    with pytest.raises(TaskCancelledError, match=r"not started, because run\(\) of 'echo' was cancelled"):
        flow.handles[2].get(WAIT_S)
    with connection:
        connection.sendall(b"go")
    assert flow.handles[0].get(WAIT_S) == "go"
    assert flow.status == ["done", "cancelled", "cancelled"]


def test_callbacks_hear_of_the_end(om: Store) -> None:
    heard: list[Any] = []
    done = threading.Event()

    def hear(handle: Any) -> None:
        heard.append(handle)
        done.set()

    handle = om.runtime.callback(hear).model("net").predict(X)
    assert done.wait(WAIT_S)
    assert heard == [handle]

    om.datasets.drop("remembered", force=True)
    om.runtime.options(trusted=True).callback("remember").model("net").predict(X).get(WAIT_S)
    assert om.datasets.get("remembered") == {"result": [0.0, 0.0, 1.0, 1.0]}


def test_a_task_whose_worker_is_killed_is_begun_again(om: Store, tmp_path: Path) -> None:
    assert run(om, "die_once", str(tmp_path / "mark")).get(WAIT_S) == "the second time"


def test_a_task_that_kills_each_worker_fails_with_that_reason(om: Store) -> None:
    for retries in (0, 1):
        handle = run(om, "die", max_retries=retries)
        with pytest.raises(WorkerLostError, match="SIGKILL"):
            handle.get(WAIT_S)
        assert handle.status == "failed"
    assert "started 2 times" in str(handle.error)
    assert run(om, "echo", 1).get(WAIT_S) == [[1], {}]


def test_a_task_that_takes_too_long_is_ended(om: Store, meeting: Meeting) -> None:
    handle = run(om, "hold", meeting.port, timeout_s=1)
    with pytest.raises(TaskTimeoutError, match="was stopped") as caught:
        handle.get(WAIT_S)
    assert not caught.value.goes_on


def test_a_running_task_and_a_waiting_one_can_be_cancelled(om: Store, meeting: Meeting) -> None:
    running = [run(om, "hold", meeting.port) for _ in range(2)]
    connections = [meeting.arrived()[1] for _ in running]
    waiting = run(om, "echo", 1)

    assert (running[0].ready(), waiting.status) == (False, "pending")
    with pytest.raises(TaskTimeoutError, match="it is still running"):
        running[0].get(0.01)
    assert waiting.cancel()
    assert running[0].cancel()
    gone, _, _ = select.select(connections, [], [], WAIT_S)
    assert [connection.recv(1) for connection in gone] == [b""]  # its process is gone
    for handle in (waiting, running[0]):
        assert handle.status == "cancelled"
        with pytest.raises(TaskCancelledError):
            handle.get(WAIT_S)
    assert running[1].cancel()
    assert not run_to_the_end(om).cancel()


def run_to_the_end(om: Store) -> Any:
    handle = run(om, "echo", 1)
    handle.get(WAIT_S)
    return handle


def test_tasks_of_a_parallel_run_side_by_side(om: Store, meeting: Meeting) -> None:
    flow = om.runtime.options(trusted=True).parallel()
    for _ in range(2):
        flow.script("hold").run(meeting.port)
    flow.run()
    for _, connection in [meeting.arrived(), meeting.arrived()]:  # both run before one may go on
        connection.sendall(b"go")
        connection.close()
    assert flow.getall(WAIT_S) == ["go", "go"]
    assert flow.ready()


def test_a_callback_may_wait_for_another_task(om: Store) -> None:
    got: list[Any] = []
    done = threading.Event()

    def ask_again(_: Any) -> None:
        got.append([run(om, "echo", n).get(WAIT_S) for n in range(3)])
        done.set()

    om.runtime.options(trusted=True).callback(ask_again).script("echo").run(0)
    assert done.wait(WAIT_S)
    assert got == [[[[n], {}] for n in range(3)]]


def test_the_load_tells_who_works_and_what_waits(om: Store, meeting: Meeting) -> None:
    running = [run(om, "hold", meeting.port) for _ in range(2)]
    connections = [meeting.arrived()[1] for _ in running]
    waiting = run(om, "echo", 1)

    load = om.runtime.load()
    assert (load.workers, load.busy, load.waiting) == (2, 2, 1)
    for connection in connections:
        connection.sendall(b"go")
        connection.close()
    assert [handle.get(WAIT_S) for handle in [*running, waiting]] == ["go", "go", [[1], {}]]


class Malice:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


def test_a_pickle_from_the_broker_is_refused_and_the_worker_lives(
    om: Store, broker: Broker | None, tmp_path: Path
) -> None:
    if broker is None:
        pytest.skip("no broker, no messages of others")
    import kombu

    mark = tmp_path / "mark"
    evil = pickle.dumps(([Malice(mark)], {}, {}))
    with kombu.Connection(broker.url.partition("?")[0]) as connection:
        producer = connection.Producer()
        for kind in ("application/x-python-serialize", "application/x-kindler-frame", "application/data"):
            producer.publish(
                evil,
                exchange="",
                routing_key="kindler.default",
                content_type=kind,
                content_encoding="binary",
                correlation_id=kind,
                headers={"retries": 0},
            )
        producer.publish(b"{}", exchange="", routing_key="kindler.default", headers={"retries": []})
    assert [run(om, "echo", n).get(WAIT_S) for n in range(4)] == [[[n], {}] for n in range(4)]
    assert not mark.exists()
