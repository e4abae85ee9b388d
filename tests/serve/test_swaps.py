"""A tag rolls under load: nobody notices, and every answer is of one whole version."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from kindler import Store
from tests.serve.served import constant, serving
from tests.whole import WHOLE

CLIENTS, ROLLS = 50 if WHOLE else 10, 20
ROWS = [[0.0, 0.0, 0.0]] * 3


@pytest.mark.timeout(120)
def test_rolling_a_tag_twenty_times_under_load_fails_no_request(tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    for number in (1, 2, 3):
        om.models.put(constant(number), "net")
    om.models.tag("net@1", "prod")
    seen: list[float] = []

    async def ask(client: httpx.AsyncClient, until: asyncio.Event) -> None:
        while not until.is_set():
            reply = await client.post("/v1/models/net/labels/prod:predict", json={"instances": ROWS})
            assert reply.status_code == 200, reply.text
            values = reply.json()["predictions"]
            assert len(values) == len(ROWS)
            assert len(set(values)) == 1
            seen.append(values[0])

    async def roll(client: httpx.AsyncClient) -> None:
        for i in range(ROLLS):
            target = 1 + (i + 1) % 3
            await asyncio.to_thread(om.models.tag, f"net@{target}", "prod")
            # By another process, so the server has to find out by itself: until it has, the load goes on.
            while True:
                reply = await client.post("/v1/models/net/labels/prod:predict", json={"instances": ROWS})
                if reply.json()["predictions"][0] == target:
                    break

    async def load(url: str) -> None:
        limits = httpx.Limits(max_connections=CLIENTS + 1)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            until = asyncio.Event()
            clients = [asyncio.create_task(ask(client, until)) for _ in range(CLIENTS)]
            try:
                await asyncio.wait_for(roll(client), 100)
            finally:
                until.set()
                await asyncio.gather(*clients)

    with serving(tmp_path / "store", "--refresh-s", "0.05") as served:
        asyncio.run(load(served.url))
    om.close()
    assert set(seen) == {1.0, 2.0, 3.0}
    assert len(seen) > ROLLS * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_stopped_finishes_what_it_has_begun(tmp_path: Path, number: int) -> None:
    om = Store(tmp_path / "store")
    om.scripts.put(waiting, "wait")
    om.close()

    async def play(url: str) -> tuple[httpx.Response, int]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            mark = tmp_path / "begun"
            running = asyncio.create_task(client.post("/api/v1/script/wait/run", json=str(mark)))
            while not mark.exists():
                await asyncio.sleep(0.01)
            served.process.send_signal(number)
            mark.with_suffix(".go").touch()
            reply = await running
        return reply, await asyncio.to_thread(served.process.wait, 30)

    with serving(tmp_path / "store", "--trusted") as served:
        reply, code = asyncio.run(play(served.url))
    assert reply.json()["result"] == "done"
    assert code == 0


def waiting(mark):  # type: ignore[no-untyped-def]
    import pathlib
    import time

    begun = pathlib.Path(mark)
    begun.touch()
    while not begun.with_suffix(".go").exists():
        time.sleep(0.01)
    return "done"
