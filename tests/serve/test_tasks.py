"""Work that a server hands to the store's runtime, over HTTP: tasks, scripts, training."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from kindler import Store
from kindler.engine import fork_server
from kindler.errors import NotFoundError
from kindler.serve.auth import Access
from kindler.serve.http_errors import Problem
from kindler.serve.settings import ServeSettings
from kindler.serve.tasks import StartedTask, Tasks
from tests.conftest import eventually_none
from tests.serve.served import NAMES, X, command, expected, linear, serving

ROWS = [[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]
LATER = {"async": "true"}
ANYBODY = Access(None, "default")


def shout(text, times="1"):  # type: ignore[no-untyped-def]
    if not text:
        raise ValueError("there is nothing to shout")
    return {"text": text.upper() * int(times), "numbers": [1.5, None]}


def odd(nothing):  # type: ignore[no-untyped-def]
    import numpy
    import pandas

    days = pandas.to_datetime(["2026-01-02"])
    numbers = {
        "nan": float("nan"),
        "large": 1 << 70,
        "scalar": numpy.float32(0.5),
        "bytes": b"b",
        "pair": (1, 2),
    }
    return {"frame": pandas.DataFrame({"day": days, "x": [1.5]}), "array": numpy.eye(2), **numbers}


def knock(port):  # type: ignore[no-untyped-def]
    """Says that it runs, and never comes back by itself."""
    import socket

    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"here")
        connection.recv(1)


def filler(size):  # type: ignore[no-untyped-def]
    return b"x" * size


def picky(data, method=None):  # type: ignore[no-untyped-def]
    """A model that answers with a status of its own."""
    error = Exception("not here", 404)
    if data[0][0] < 0:
        return error
    raise error


def die(nothing):  # type: ignore[no-untyped-def]
    import os

    os.kill(os.getpid(), 9)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "store"
    om = Store(folder)
    om.models.put(linear(), "net")
    om.models.put(picky, "picky")
    om.datasets.put(X, "x")
    om.datasets.put(X @ [3.0, 2.0, 1.0], "y")
    for function in (shout, odd, knock, die):
        om.scripts.put(function, function.__name__)
    om.close()
    return folder


@pytest.fixture(scope="module")
def asked(filled: Path) -> Iterator[httpx.Client]:
    with (
        serving(filled, "--trusted", "--timeout-s", "30") as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        yield client
        pids = [child.pid for child in psutil.Process(served.process.pid).children(recursive=True)]
        assert pids  # the runtime's processes
        assert served.stop() == 0
    assert not eventually_none(lambda: [pid for pid in pids if psutil.pid_exists(pid)])


def ended(client: httpx.Client, task: str) -> str:
    """The status of a task that is no longer on its way."""
    look = {"status": ""}

    def on_its_way() -> bool:
        look.update(client.get(f"/api/v1/task/{task}/status").raise_for_status().json())
        return look["status"] in ("PENDING", "STARTED")

    assert not eventually_none(on_its_way, 60)
    return look["status"]


def begun(reply: httpx.Response) -> str:
    assert reply.status_code == 202, reply.text
    task: str = reply.json()["task_id"]
    assert reply.headers["location"] == f"/api/v1/task/{task}/result"
    return task


def test_a_prediction_that_nobody_waits_for_is_fetched_later(asked: httpx.Client) -> None:
    now = asked.put("/api/v1/model/net/predict", json={"data": ROWS}).json()["result"]
    columns = {"columns": NAMES, "data": [dict(zip(NAMES, row, strict=True)) for row in ROWS]}
    flat = {"columns": ["x"], "data": [{"x": row} for row in ROWS], "shape": [3]}
    for body in ({"data": ROWS}, columns, flat):
        reply = asked.put("/api/v1/model/net/predict", json=body, headers=LATER)
        task = begun(reply)
        assert reply.json()["resource_uri"] == "/api/v1/model/net/predict"
        assert ended(asked, task) == "SUCCESS"
        fetched = asked.get(reply.headers["location"]).json()
        assert (fetched["task_id"], fetched["status"]) == (task, "SUCCESS")
        assert fetched["response"]["model"] == "net"
        np.testing.assert_allclose(fetched["response"]["result"], now)
        np.testing.assert_allclose(now, expected(ROWS))
    stored = begun(asked.put("/api/v1/model/net/predict?datax=x&async=1"))
    assert ended(asked, stored) == "SUCCESS"
    found = asked.get(f"/api/v1/task/{stored}/result").json()["response"]["result"]
    np.testing.assert_allclose(found, expected(X))


def test_a_model_gives_its_exception_a_status(asked: httpx.Client) -> None:
    for rows in (ROWS, [[-1.0, 0.0, 0.0]]):
        reply = asked.put("/api/v1/model/picky/predict", json={"data": rows})
        assert (reply.status_code, "not here" in reply.json()["message"]) == (404, True)
        inputs = [{"name": "x", "shape": [len(rows), 3], "datatype": "FP64", "data": rows}]
        assert asked.post("/v2/models/picky/infer", json={"inputs": inputs}).status_code == 404
        task = begun(asked.put("/api/v1/model/picky/predict", json={"data": rows}, headers=LATER))
        assert ended(asked, task) == "FAILURE"
        assert asked.get(f"/api/v1/task/{task}/result").status_code == 404


def test_training_and_scoring_use_stored_datasets_and_serve_the_new_version(asked: httpx.Client) -> None:
    reply = asked.put("/api/v1/model/net/fit", params={"datax": "x", "datay": "y"})
    assert (reply.status_code, reply.json()["result"]) == (200, "net@2")
    score = asked.put("/api/v1/model/net@2/score", params={"datax": "x", "datay": "y"}).json()["result"]
    assert score == pytest.approx(1.0)
    served = asked.put("/api/v1/model/net@2/predict", json={"data": ROWS}).json()["result"]
    np.testing.assert_allclose(served, np.asarray(ROWS) @ [3.0, 2.0, 1.0])
    assert asked.put("/api/v1/model/net/fit").status_code == 400


def test_a_script_answers_at_once_or_later(asked: httpx.Client) -> None:
    now = asked.post("/api/v1/script/shout/run?times=2", json="ha").json()
    assert now["result"] == {"text": "HAHA", "numbers": [1.5, None]}
    assert (now["script"], now["resource_uri"]) == ("shout", "shout")
    assert asked.post("/api/v1/script/odd/run", json=0).json()["result"] == {
        "frame": {"day": ["2026-01-02 00:00:00"], "x": [1.5]},
        "array": [[1.0, 0.0], [0.0, 1.0]],
        "nan": None,
        "large": str(1 << 70),
        "scalar": 0.5,
        "bytes": "b",
        "pair": [1, 2],
    }
    task = begun(asked.post("/api/v1/script/shout/run", json="ho", headers=LATER))
    assert ended(asked, task) == "SUCCESS"
    assert asked.get(f"/api/v1/task/{task}/result").json()["response"]["result"]["text"] == "HO"


def test_what_failed_says_why_and_no_more(asked: httpx.Client) -> None:
    reply = asked.post("/api/v1/script/shout/run", json="")
    assert reply.status_code == 400
    assert reply.json()["message"] == "the task failed: ValueError: there is nothing to shout"

    task = begun(asked.post("/api/v1/script/die/run", json="", headers=LATER))
    assert ended(asked, task) == "FAILURE"
    reply = asked.get(f"/api/v1/task/{task}/result")
    assert reply.status_code == 400
    assert "WorkerLostError: lost a worker" in reply.json()["message"]
    assert "SIGKILL" in reply.json()["message"]

    assert asked.put("/api/v1/model/nothing/predict", json={"data": ROWS}, headers=LATER).status_code == 404
    assert asked.put("/api/v1/model/net/score?datax=nothing").status_code == 404
    assert asked.put("/api/v1/model/net/dance?datax=x").status_code == 404
    assert asked.put("/api/v1/model/net/predict", json={"data": "?"}, headers=LATER).status_code == 400
    for path in ("status", "result"):
        assert asked.get(f"/api/v1/task/nothing/{path}").status_code == 404


def test_a_task_that_runs_is_shown_and_can_be_cancelled(asked: httpx.Client, meeting: Any) -> None:
    task = begun(asked.post("/api/v1/script/knock/run", json=meeting.getsockname()[1], headers=LATER))
    connection, _ = meeting.accept()
    with connection:
        assert connection.recv(4) == b"here"
        assert asked.get(f"/api/v1/task/{task}/status").json()["status"] == "STARTED"
        assert asked.get(f"/api/v1/task/{task}/result").json()["response"]["result"] is None
        runtime = asked.get("/api/v1/stats").json()["runtime"]
        assert (runtime["engine"], runtime["busy"], runtime["waiting"]) == ("local", 1, 0)
        assert runtime["workers"] >= 1

        assert asked.delete(f"/api/v1/task/{task}").json() == {"task_id": task, "status": "REVOKED"}
        assert connection.recv(1) == b""  # its process is gone
    reply = asked.get(f"/api/v1/task/{task}/result")
    assert (reply.status_code, "was cancelled" in reply.json()["message"]) == (400, True)
    assert asked.get("/api/v1/stats").json()["runtime"]["busy"] == 0


@pytest.fixture
def meeting() -> Iterator[Any]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        yield listener


def test_tasks_need_the_scope_of_what_they_do_and_code_a_server_that_trusts(filled: Path) -> None:
    def key(*scopes: str) -> dict[str, str]:
        given = [part for scope in scopes for part in ("--scope", scope)]
        made = command("keys", "add", "--store", str(filled), *given)
        return {"authorization": f"Bearer {made.stdout.strip()}"}

    predict, write = key("predict"), key("predict", "read", "write")
    with serving(filled) as served, httpx.Client(base_url=served.url, timeout=60) as client:
        assert client.put("/api/v1/model/net/predict", json={"data": ROWS}, headers=LATER).status_code == 401
        task = begun(client.put("/api/v1/model/net/predict", json={"data": ROWS}, headers=predict | LATER))
        assert client.get(f"/api/v1/task/{task}/result").status_code == 401
        assert client.get(f"/api/v1/task/{task}/result", headers=predict).status_code == 200
        for method in ("get", "delete"):  # another key's task is no business of this one
            path = f"/api/v1/task/{task}" + ("/result" if method == "get" else "")
            assert client.request(method, path, headers=write).status_code == 404
        assert client.get(f"/api/v1/task/{task}/status", headers=key("admin")).status_code == 200
        assert client.delete(f"/api/v1/task/{task}", headers=predict).status_code == 200
        for path in ("predict?datax=x&async=1", "score?datax=x&datay=y", "fit?datax=x&datay=y"):
            assert client.put(f"/api/v1/model/net/{path}", headers=predict).status_code == 403
        refused = client.post("/api/v1/script/shout/run", json="ha", headers=write)
        assert (refused.status_code, "trusted" in refused.json()["message"]) == (403, True)


def test_no_more_tasks_are_begun_than_can_be_remembered(tmp_path: Path, meeting: Any) -> None:
    om = Store(tmp_path / "store", broker="local://?workers=1")
    om.scripts.put(knock, "knock")
    tasks = Tasks(om, ServeSettings(trusted=True, task_results=1))

    def start() -> StartedTask:
        port = meeting.getsockname()[1]
        return tasks.start(ANYBODY, {"script": "knock"}, lambda runtime: runtime.script("knock").run(port))

    first = start()
    with pytest.raises(Problem, match="1 tasks are unfinished") as caught:
        start()
    assert caught.value.status == 429
    assert first.handle.cancel()
    assert tasks.find(start().handle.id) is not first
    with pytest.raises(NotFoundError, match=first.handle.id):
        tasks.find(first.handle.id)
    om.close()
    fork_server.close()


def test_the_bytes_of_tasks_that_have_not_ended_are_bounded(tmp_path: Path, meeting: Any) -> None:
    om = Store(tmp_path / "store", broker="local://?workers=1")
    om.scripts.put(knock, "knock")
    tasks = Tasks(om, ServeSettings(trusted=True, queue_bytes=100))
    port = meeting.getsockname()[1]

    def start(size: int) -> StartedTask:
        return tasks.start(ANYBODY, {"script": "knock"}, lambda r: r.script("knock").run(port), size)

    first = start(80)
    with pytest.raises(Problem, match="hold 80 bytes of requests") as caught:
        start(30)
    assert caught.value.status == 429
    second = start(20)
    assert tasks.held_bytes == 100
    for task in (first, second):
        assert task.handle.cancel()
    assert not eventually_none(lambda: tasks.held_bytes)
    om.close()
    fork_server.close()


def test_results_of_finished_tasks_are_kept_within_a_number_of_bytes_and_for_a_while(tmp_path: Path) -> None:
    om = Store(tmp_path / "store", broker="local://?workers=1")
    om.scripts.put(filler, "filler")

    def done(tasks: Tasks, size: int) -> StartedTask:
        call = {"script": "filler"}
        task = tasks.start(ANYBODY, call, lambda runtime: runtime.script("filler").run(size))
        assert len(task.handle.get(60)) == size
        return task

    tasks = Tasks(om, ServeSettings(trusted=True, task_result_bytes=2500))
    finished = [done(tasks, size) for size in (1000, 1000, 1000)]
    assert tasks.find(finished[2].handle.id) is finished[2]
    assert tasks.find(finished[1].handle.id) is finished[1]
    with pytest.raises(NotFoundError, match=finished[0].handle.id):
        tasks.find(finished[0].handle.id)
    large = done(tasks, 5000)
    assert tasks.find(large.handle.id) is large  # the newest is kept, whatever its size
    with pytest.raises(NotFoundError, match=finished[2].handle.id):
        tasks.find(finished[2].handle.id)
    assert len(tasks.answer(large)["result"]) == 5000  # whoever waited for it has no id to ask with
    with pytest.raises(NotFoundError, match=large.handle.id):
        tasks.find(large.handle.id)

    brief = Tasks(om, ServeSettings(trusted=True, task_result_s=0))
    task = done(brief, 1)

    def is_kept() -> bool:
        try:
            return brief.find(task.handle.id) is task
        except NotFoundError:
            return False

    assert not eventually_none(is_kept)
    om.close()
    fork_server.close()


@pytest.mark.timeout(180)
def test_waiting_scripts_take_no_threads_and_do_not_outlive_the_server(tmp_path: Path, meeting: Any) -> None:
    filled = tmp_path / "store"
    om = Store(filled)
    om.scripts.put(knock, "knock")
    om.close()
    port = meeting.getsockname()[1]
    pids: list[int] = []

    async def play(served: Any) -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
            asked = client.build_request("POST", "/api/v1/script/knock/run", json=port)
            waiting = [asyncio.create_task(client.send(asked)) for _ in range(50)]
            connection, _ = await asyncio.to_thread(meeting.accept)
            with connection:
                while (await client.get("/api/v1/stats")).json()["runtime"]["waiting"] < 40:
                    await asyncio.sleep(0.1)
                assert (await client.get("/readyz")).status_code == 200
                assert (await client.get("/api/v1/models")).status_code == 200
                assert process.num_threads() < 45
                pids.extend(child.pid for child in process.children(recursive=True))
                assert served.stop() == 0
            await asyncio.gather(*waiting, return_exceptions=True)

    with serving(filled, "--trusted", "--drain-s", "1") as served:
        process = psutil.Process(served.process.pid)
        asyncio.run(play(served))
    assert pids
    assert not eventually_none(lambda: [pid for pid in pids if psutil.pid_exists(pid)])
