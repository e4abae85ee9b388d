"""Models that do not come back: they hold up nobody but themselves, and not the server's end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import uvloop

from kindler import Store
from kindler.engine.placement import half_of_memory
from kindler.models.signature import Arrays
from kindler.serve.app import create_app
from kindler.serve.batching import Batcher
from kindler.serve.http_errors import Problem
from kindler.serve.http_protocol import GuardedTransport
from kindler.serve.model_pool import MAX_LOST_CALLS, LocalPool
from kindler.serve.settings import ServeSettings
from kindler.serve.threads import Threads
from tests.serve.served import Served, linear, serving

HUNG = 9


def hanging(x):  # type: ignore[no-untyped-def]
    import threading

    if x.ravel()[0] > 0:
        threading.Event().wait()
    return x


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("hangs") / "store"
    om = Store(folder)
    om.models.put(linear(), "fine")
    for i in range(HUNG):
        om.models.put(hanging, f"hung{i}", kind="function", trusted=True)
    om.close()
    with serving(folder, "--trusted", "--timeout-s", "1", "--drain-s", "1", "--isolation", "none") as made:
        yield made


def test_a_model_that_hangs_blocks_itself_alone_and_the_server_ends(served: Served) -> None:
    hung, rows = {"data": [[1.0]]}, {"data": [[1.0, 1.0, 1.0]]}

    async def play() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:

            async def ask(name: str, body: Any = hung) -> int:
                reply = await client.put(f"/api/v1/model/{name}/predict", json=body)
                return reply.status_code

            while await ask("fine", rows) != 200:
                pass  # a second may not be enough to load it
            while any(status == 504 for status in await every(ask, {"data": [[-1.0]]})):
                pass
            for _ in range(MAX_LOST_CALLS + 1):
                assert set(await every(ask, hung)) == {504}
            assert set(await every(ask, hung)) == {503}  # at once, from now on
            assert await ask("fine", rows) == 200
            ready = (await client.get("/readyz")).json()
            assert sorted(ready["stuck"]) == [f"hung{i}@1" for i in range(HUNG)]
            assert (await client.get("/v2/models/hung0/ready")).status_code == 503
            assert (await client.get("/v2/models/fine/ready")).status_code == 200
            assert (await client.get("/healthz")).status_code == 200

    async def every(ask: Any, body: Any) -> list[int]:
        return await asyncio.gather(*(ask(f"hung{i}", body) for i in range(HUNG)))

    asyncio.run(play())
    threads = psutil.Process(served.process.pid).num_threads()
    assert threads < 40 + HUNG * (MAX_LOST_CALLS + 1) + 16 * psutil.cpu_count()
    assert served.stop() == 0  # within 30 s, where the calls would wait for ever


def test_lost_calls_are_replaced_and_forgiven_when_they_come_back() -> None:
    gate = threading.Event()
    now = [0.0]

    def call(inputs: Arrays, method: str) -> Arrays:
        if inputs["x"][0] < 0:
            gate.wait(30)
        return {"y": inputs["x"]}

    async def play() -> None:
        settings = ServeSettings(timeout_s=5)
        pool = LocalPool(call, settings, clock=lambda: now[0])
        batcher = Batcher(pool, settings, {"predict": True}, clock=lambda: now[0])

        def ask(value: float) -> Any:
            return batcher.submit({"x": np.array([value])}, "predict", rows=1, timeout_s=5)

        hung = []
        for _ in range(MAX_LOST_CALLS):
            hung.append(ask(-1))
            await asyncio.sleep(0)
            now[0] += 6  # its client has gone
            hung[-1].leave()
            assert (await ask(1).future)["y"].tolist() == [1]
            assert not batcher.is_stuck
        hung.append(ask(-1))
        await asyncio.sleep(0)
        now[0] += 6
        with pytest.raises(Problem, match="unresponsive") as caught:
            ask(1)
        assert caught.value.status == 503
        assert batcher.is_stuck
        gate.set()
        await hung[-1].future
        while pool.free < settings.batches:
            await asyncio.sleep(0.01)
        assert not batcher.is_stuck
        assert (await ask(2).future)["y"].tolist() == [2]
        pool.close()

    asyncio.run(play())


def test_threads_end_when_they_have_nothing_to_do_and_nobody_waits_for_those_that_do() -> None:
    never = threading.Event()
    pool = Threads(2, "test-threads")
    first = pool.submit(never.wait)
    assert [pool.submit(lambda i=i: i * 2).result(30) for i in range(50)] == [i * 2 for i in range(50)]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(30)
    named = [thread for thread in threading.enumerate() if thread.name == "test-threads"]
    assert len(named) == 2
    assert all(thread.daemon for thread in named)
    begun = threading.Event()
    second, third = pool.submit(lambda: begun.set() or never.wait()), pool.submit(never.wait)
    assert begun.wait(30)
    pool.shutdown(cancel_futures=True)  # returns, although they wait
    with pytest.raises(RuntimeError, match="cannot schedule new futures"):
        pool.submit(print)
    assert third.cancelled()
    never.set()
    assert first.result(30)
    assert second.result(30)


def test_the_memory_of_a_container_counts(tmp_path: Path) -> None:
    (tmp_path / "max").write_text("1000000\n")
    (tmp_path / "none").write_text("max\n")
    assert half_of_memory([str(tmp_path / "max"), str(tmp_path / "none")]) == 500_000
    whole = half_of_memory([])
    assert half_of_memory([str(tmp_path / "none"), str(tmp_path / "absent")]) == whole > 500_000


def test_a_request_that_runs_when_the_server_waits_no_longer_gets_503(tmp_path: Path) -> None:
    async def play() -> list[Any]:
        om = Store(tmp_path / "store")
        front = create_app(om, ServeSettings(isolation="none"))
        asked, sent = asyncio.Event(), []

        async def receive() -> Any:
            asked.set()
            await asyncio.get_running_loop().create_future()  # the body never comes

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/models/net:predict", "query_string": b""}
        task = asyncio.create_task(front({**scope, "headers": [(b"host", b"localhost")]}, receive, send))
        await asked.wait()
        task.cancel()  # as uvicorn does at the end of the drain
        await task
        om.close()
        return sent

    start, body = asyncio.run(play())
    assert start["status"] == 503
    assert b"the server is being stopped" in body["body"]


def test_what_is_written_to_a_client_that_has_gone_is_dropped() -> None:
    async def play() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        raw, _ = await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
        raw.abort()
        for _ in range(10):  # turns of the loop, in which uvloop closes it
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="closed"):
            raw.write(b"uvloop raises here")
        transport = GuardedTransport(raw)
        transport.write(b"dropped")
        transport.pause_reading()
        transport.resume_reading()
        server.close()

    uvloop.run(play())
