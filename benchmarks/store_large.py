"""Does a store stay quick with 100,000 names: pages, look-ups beside misspelled names, 1,000 appends?

The catalog is filled with rows of models; then pages of 100 are read from its start, middle and end, by the
shelf and over HTTP. Clients of a server predict with a model while others ask, 200 times a second, for the
same model, or for models that are not there, each time another one: the two should be the same to the former.
Look-ups of a name that is there are timed alone, and beside a thread that looks up names that are not there
as fast as it can. At last a small array is appended 1,000 times to one dataset, and the catalog's bytes for
it are compared after half of the appends and after all.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import _bench as bench
import numpy as np

NAMES, APPENDS, LOOKUPS = 100_000, 1_000, 2_000
EVERY_S = 0.005


def main() -> None:
    """Measure, and print."""
    from kindler import Store

    given = bench.arguments(__doc__ or "", repeats=3)
    names, appends, lookups = (2_000, 50, 100) if given.quick else (NAMES, APPENDS, LOOKUPS)
    report = bench.Report("store_large", f"a store with {names} names", quick=given.quick)
    with bench.workplace() as folder:
        om = Store(folder / "store")
        fill(om, names)
        pages, over_http, alone, beside = [], [], [], []
        for _ in range(given.repeats):
            pages.append(max(page(om, f"m/{at:06d}") for at in (0, names // 2, names - 200)))
            over_http.append(max(asyncio.run(http_pages(om, names))))
            alone.append(lookup_s(om, lookups, misspelled=False))
            beside.append(lookup_s(om, lookups, misspelled=True))
        half, whole = appended(om, appends)
        om.close()
        right, wrong = served(folder, lookups, given.repeats)
    report.limit("page of 100 names, the slowest", pages, "s", at_most=0.2)
    report.limit("the same over HTTP", over_http, "s", at_most=0.2)
    report.figure("look-up of a name", [value * 1e3 for value in alone], "ms")
    report.ratio("the same while a thread looks up misspelled names", beside, alone, at_most=3.0)
    report.figure("a prediction while clients request existing names", right, "ms")
    report.ratio("the same while clients request misspelled names", wrong, right, at_most=1.1)
    report.figure(f"catalog after {appends} appends", [whole / 1e6], "MB")
    report.ratio("catalog of all appends / of half", [whole], [half], at_most=2.2)
    report.finish(names=names, appends=appends)


def fill(om: Any, count: int) -> None:
    """Rows of so many models."""
    from sklearn.linear_model import LinearRegression

    from kindler.store import tables

    om.models.put(LinearRegression().fit([[0.0], [1.0]], [0.0, 1.0]), "fine")
    fixed = {"number": 1, "kind": "function", "size": 0, "digest": ""}
    fixed |= {"created": datetime.now(timezone.utc).isoformat()}
    fixed |= {"manifest": '{"attributes":{},"meta":{}}'}
    objects = [
        {"id": 1000 + i, "bucket": "default", "shelf": "models", "name": f"m/{i:06d}", "last": 1}
        for i in range(count)
    ]
    with om.store.catalog.database.writing() as connection:
        connection.execute(tables.objects.insert(), objects)
        connection.execute(tables.versions.insert(), [{"object": row["id"], **fixed} for row in objects])


def page(om: Any, after: str) -> float:
    """Seconds of a page."""
    started = time.perf_counter()
    assert len(om.models.newest(after=after, limit=100)) == 100
    return time.perf_counter() - started


async def http_pages(om: Any, names: int) -> list[float]:
    """Seconds of pages over HTTP, without a network."""
    import httpx

    from kindler.serve.app import create_app

    spent = []
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(om)), base_url="http://127.0.0.1", timeout=60
    ) as client:
        await client.get("/api/v1/models?limit=1")
        for at in (0, names // 2, names - 200):
            started = time.perf_counter()
            reply = await client.get("/api/v1/models", params={"limit": 100, "after": f"m/{at:06d}"})
            spent.append(time.perf_counter() - started)
            assert len(json.loads(reply.content)["models"]) == 100
    return spent


def lookup_s(om: Any, count: int, *, misspelled: bool) -> float:
    """Seconds of a look-up, the middle of many."""
    from kindler.errors import NotFoundError

    over = threading.Event()

    def ask() -> None:
        number = 0
        while not over.is_set():
            number += 1
            try:
                om.models.metadata(f"m/x{number}")
            except NotFoundError:
                pass

    other = threading.Thread(target=ask)
    if misspelled:
        other.start()
    spent = []
    for i in range(count):
        started = time.perf_counter()
        om.models.metadata(f"m/{i % 1000:06d}")
        spent.append(time.perf_counter() - started)
    over.set()
    if misspelled:
        other.join()
    return sorted(spent)[len(spent) // 2]


def served(folder: Path, count: int, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds of a prediction, the middle of many, beside right names and beside wrong ones."""
    command = [sys.executable, "-m", "kindler.cli", "serve", "--store", str(folder / "store"), "--port", "0"]
    process = subprocess.Popen([*command, "--log-level", "error"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found: dict[bool, list[float]] = {False: [], True: []}
    try:
        port = int(process.stdout.readline().rpartition(":")[2])
        asyncio.run(predicting(port, 50, misspelled=False))
        for _ in range(repeats):
            for misspelled in found:
                found[misspelled].append(asyncio.run(predicting(port, count, misspelled=misspelled)))
    finally:
        process.terminate()
        process.wait(60)
    return found[False], found[True]


async def predicting(port: int, count: int, *, misspelled: bool) -> float:
    """See `served`."""
    spent: list[float] = []

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> bytes:
        body = b'{"data": [[1.0]]}'
        head = f"PUT /api/v1/model/{name}/predict HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        writer.write(
            f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        told = await reader.readuntil(b"\r\n\r\n")
        length = int(told.lower().partition(b"content-length:")[2].split(None, 1)[0])
        await reader.readexactly(length)
        return told.split(None, 2)[1]

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while len(spent) < count:
            started = time.perf_counter()
            assert await ask(reader, writer, "fine") == b"200"
            spent.append((time.perf_counter() - started) * 1e3)
        writer.close()

    async def other() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in itertools.count():
            name = f"m/x{time.monotonic_ns()}-{number}" if misspelled else "fine"
            await ask(reader, writer, name)
            await asyncio.sleep(EVERY_S)

    others = [asyncio.create_task(other())]
    await asyncio.gather(*(client() for _ in range(4)))
    for task in others:
        task.cancel()
    return sorted(spent)[len(spent) // 2]


def appended(om: Any, count: int) -> tuple[int, int]:
    """Bytes of the catalog's manifests for a dataset after half of the appends, and after all."""

    def size() -> int:
        asked = "SELECT SUM(LENGTH(manifest)) FROM kindler_versions WHERE kind = 'numpy'"
        with om.store.catalog.database.reading() as connection:
            return int(connection.exec_driver_sql(asked).scalar() or 0)

    half = 0
    for i in range(count):
        om.datasets.put(np.arange(4) + i, "grows", mode="append")
        if i + 1 == count // 2:
            half = size()
    assert om.datasets.get("grows").shape == (4 * count,)
    return half, size()


if __name__ == "__main__":
    main()
