"""Models in processes of their own: what one does to itself is no matter to the others, nor to the server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from kindler import Store, sandbox
from kindler.errors import UntrustedError
from kindler.serve.model_loading import DevicePlacement, start_of
from kindler.serve.settings import ServeSettings
from tests.serve.naughty import naughty
from tests.serve.served import Served, X, expected, linear, serving

ROWS = [[1.0, 1.0, 1.0]]
LIMIT = 400 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("processes") / "store"
    om = Store(folder)
    om.models.put(linear(), "fine")
    for name in ("naughty", "hung"):
        om.models.put(naughty, name, kind="function", trusted=True)
    om.close()
    options = ("--trusted", "--timeout-s", "10", "--drain-s", "1", "--processes", "1")
    with serving(folder, *options, "--model-memory-bytes", str(LIMIT)) as made:
        with httpx.Client(base_url=made.url, timeout=60) as client:
            for name, rows in (("fine", ROWS), ("naughty", [[0.0]]), ("hung", [[0.0]])):
                while client.put(f"/api/v1/model/{name}/predict", json={"data": rows}).status_code == 504:
                    pass  # it takes longer to load than a client waits
        yield made


def ask(served: Served, name: str, rows: Any) -> httpx.Response:
    return httpx.put(f"{served.url}/api/v1/model/{name}/predict", json={"data": rows}, timeout=60)


def values(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return np.ravel(reply.json()["result"]).tolist()


def test_after_a_crash_a_hang_and_an_exit_the_next_request_is_served(served: Served) -> None:
    before = values(ask(served, "naughty", [[6.0]]))
    seen = {*before}
    for what, status, told in (
        (2.0, 500, "its process was ended by SIGSEGV"),
        (1.0, 504, "did not answer in time"),
        (4.0, 400, "SystemExit"),
        (3.0, 503, "memory"),
    ):
        reply = ask(served, "naughty", [[what]])
        assert (reply.status_code, told in reply.text) == (status, True), reply.text
        assert values(ask(served, "fine", ROWS)) == pytest.approx(expected(ROWS))
        assert values(ask(served, "naughty", [[21.0]])) == [42.0]
        seen |= {*values(ask(served, "naughty", [[6.0]]))}
    assert len(seen) == 3  # a crash and a hang cost a process; an exception does not
    assert served.process.pid not in seen
    assert served.process.poll() is None
    told = httpx.get(f"{served.url}/metrics", timeout=60).text
    for reason in ("crashed", "hung"):
        line = f'kindler_process_restarts_total{{model="naughty",reason="{reason}",version="1"}} 1.0'
        assert line in told
    assert values(ask(served, "naughty", [[5.0]])) == [10.0]  # what it prints is in nobody's way


def test_only_the_request_that_crashes_a_model_fails_of_those_that_share_a_call(served: Served) -> None:
    async def play() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            rows = [[[2.0]], *([[float(i)]] for i in range(10, 40))]
            url = "/api/v1/model/naughty/predict"
            return await asyncio.gather(*(client.put(url, json={"data": one}) for one in rows))

    first, *others = asyncio.run(play())

    assert first.status_code == 500
    assert [values(reply) for reply in others] == [[2.0 * i] for i in range(10, 40)]


def test_arrays_larger_than_the_shared_memory_and_text_come_through_unchanged(served: Served) -> None:
    large = np.random.default_rng(0).normal(size=(1000, 3000))  # 24 MB, there and back
    content = large.astype("<f8").tobytes()
    tensor = {"name": "x", "shape": list(large.shape), "datatype": "FP64"}
    tensor["parameters"] = {"binary_data_size": len(content)}
    head = httpx.Response(200, json={"inputs": [tensor], "parameters": {"binary_data_output": True}}).content
    reply = httpx.post(
        f"{served.url}/v2/models/naughty/infer",
        content=head + content,
        headers={"inference-header-content-length": str(len(head))},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text[:500]
    told = int(reply.headers["inference-header-content-length"])
    np.testing.assert_array_equal(np.frombuffer(reply.content[told:]).reshape(large.shape), large * 2)

    words = ["ä", "", "z" * 5000]
    reply = httpx.post(
        f"{served.url}/v2/models/naughty/infer",
        json={"inputs": [{"name": "x", "shape": [3], "datatype": "BYTES", "data": words}]},
        timeout=60,
    )
    assert reply.json()["outputs"][0]["data"] == [word * 2 for word in words]


def test_the_server_ends_in_time_though_a_call_hangs_and_its_processes_with_it(served: Served) -> None:
    server = psutil.Process(served.process.pid)
    with httpx.Client(base_url=served.url, timeout=60) as client:
        with pytest.raises(httpx.ReadTimeout, match="timed out"):
            client.put("/api/v1/model/hung/predict", json={"data": [[1.0]]}, timeout=0.5)
        assert client.get("/readyz").status_code == 200
    children = server.children(recursive=True)
    assert len(children) >= 4  # one fork server or more, and a process for each model
    assert served.stop() == 0  # the call would wait for ever
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []


@pytest.mark.skipif(sandbox.unavailable_reason() is not None, reason="processes cannot be sandboxed here")
def test_a_sandboxed_process_has_nothing_of_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    om = Store(tmp_path / "store")
    om.models.put(linear(), "net")
    om.close()
    monkeypatch.setenv("DATABASE_PASSWORD", "hush-hush")
    with serving(tmp_path / "store", "--processes", "1") as served:
        assert values(ask(served, "net", X[:2].tolist())) == pytest.approx(expected(X[:2]))
        server = psutil.Process(served.process.pid)
        (fork_server,) = server.children()
        (model,) = fork_server.children()
        for process in (fork_server, model):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            assert b"hush-hush" not in environment
            assert b"PATH=" in environment
        open_files = [os.readlink(path) for path in Path(f"/proc/{model.pid}/fd").iterdir()]
        ours = {f"socket:[{n}]" for n in _sockets_of(server.pid)}
        assert not [name for name in open_files if str(tmp_path) in name or name in ours]
        kinds = sorted({name.partition(":")[0] for name in open_files})
        own = [f"/proc/{model.pid}/{name}" for name in ("cmdline", "maps")]
        assert set(kinds) <= {"/dev/null", "/memfd", "pipe", "socket", *own}
        status = Path(f"/proc/{model.pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status
        assert "CapEff:\t0000000000000000" in status
        served.process.send_signal(signal.SIGKILL)  # a server that could not say goodbye leaves nobody behind
        _, alive = psutil.wait_procs([fork_server, model], timeout=20)
        assert alive == []


def _sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that listen, or lead to the network or a database."""
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        found.add(line.split()[9])
    return found


def test_limits_of_a_version_can_only_be_lower_than_the_servers(tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    asked = {"memory_bytes": 1 << 20, "timeout_s": 1e9, "processes": 1}
    version = om.models.put(linear(), "net", attributes={"limits": asked})
    settings = ServeSettings(timeout_s=5, processes=3, model_memory_bytes=1 << 30)

    start, processes = start_of(version, settings, DevicePlacement(), None)

    assert (start.memory_bytes, start.call_s, processes) == (1 << 20, 5, 1)
    nonsense = om.models.put(linear(), "net", attributes={"limits": {"processes": -1, "timeout_s": "long"}})
    start, processes = start_of(nonsense, settings, DevicePlacement(), None)
    assert (start.memory_bytes, start.call_s, processes) == (1 << 30, 5, 3)
    half = om.models.put(linear(), "net", attributes={"limits": {"processes": 0.5}})
    assert start_of(half, settings, DevicePlacement(), None)[1] == 1
    om.close()


def test_where_no_process_can_be_sandboxed_kinds_that_need_it_are_refused(tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    version = om.models.put(linear(), "net")

    def sandboxed(unsandboxed: str | None, **settings: Any) -> bool | None:
        return start_of(version, ServeSettings(**settings), DevicePlacement(), unsandboxed)[0].sandboxed

    assert not sandboxed("no Landlock")
    assert sandboxed(None)
    object.__setattr__(version, "kind", "onnx")
    with pytest.raises(
        UntrustedError, match="require a sandboxed process, which this host does not support: no Landlock"
    ):
        sandboxed("no Landlock")
    object.__setattr__(version, "meta", {"model_kind": "sklearn"})  # as metadata of an archive may say
    with pytest.raises(UntrustedError, match="of kind 'onnx', was rejected"):
        sandboxed("no Landlock")
    assert not sandboxed("none", trusted=True)
    om.close()
