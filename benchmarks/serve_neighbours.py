"""What does a healthy model notice of neighbours that hang, crash and eat memory, and of bombs?

One server with a linear model whose answers are known, and three models that behave badly. 32 clients ask the
healthy one, first alone, then while others ask the bad ones without a pause and send Parquet, CSV and JSON
bodies that would become gigabytes. Every answer of the healthy model is compared with what it must be.
"""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _bad_models
import _bench as bench
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CLIENTS, BAD_CLIENTS = 32, 2
ANSWERS, QUICK_ANSWERS = 100_000, 4_000
QUIET_ANSWERS = 20_000
DRAIN_S, TIMEOUT_S = 5.0, 5.0
BAD = ("hangs", "crashes", "eats")


def main() -> None:
    """Measure, and print."""
    given = bench.arguments(__doc__ or "", repeats=1)
    wanted = QUICK_ANSWERS if given.quick else ANSWERS
    report = bench.Report("serve_neighbours", "the p99 of a healthy model beside bad ones", quick=given.quick)
    with bench.workplace() as folder, _server(folder) as (port, process):
        bodies = [(f"/api/v1/model/{name}/predict", b'{"data": [[1.0]]}', _JSON) for name in BAD]
        bodies += _bombs()
        for path in ("/api/v1/model/fine/predict", *(path for path, _, _ in bodies[: len(BAD)])):
            _load(port, path)
        quiet, wrong = asyncio.run(_asked(port, min(wanted, QUIET_ANSWERS), []))
        noisy, more_wrong = asyncio.run(_asked(port, wanted, bodies))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=30) as reply:
            ready = reply.status == 200
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        ended_s = time.monotonic() - began
    report.figure("quiet, p99", [_p99(quiet)], "ms")
    report.figure("beside bad models, p99", [_p99(noisy)], "ms")
    report.figure("answers", [len(noisy)], "answers")
    report.figure("SIGTERM to the end", [ended_s], "s")
    report.ratio("p99 beside bad models / quiet", [_p99(noisy)], [_p99(quiet)], at_most=3.0)
    report.ratio("SIGTERM to the end / (drain + 2 s)", [ended_s], [DRAIN_S + 2], at_most=1.0)
    report.limit("wrong answers", [wrong + more_wrong], "answers", at_most=0)
    report.limit("/readyz is not 200", [float(not ready)], "times", at_most=0)
    report.finish()


_JSON = "application/json"


async def _asked(port: int, wanted: int, bodies: list[tuple[str, bytes, str]]) -> tuple[list[float], int]:
    """Seconds of each answer of the healthy model, and how many were wrong; others send `bodies`."""
    random = np.random.default_rng(0)
    rows = [random.normal(size=3).round(4) for _ in range(256)]
    seconds: list[float] = []
    wrong = 0

    async def client(number: int) -> None:
        nonlocal wrong
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        turn = number
        while len(seconds) < wanted:
            row = rows[turn % len(rows)]
            turn += CLIENTS
            began = time.perf_counter()
            writer.write(
                _request("/api/v1/model/fine/predict", json.dumps({"data": [row.tolist()]}).encode())
            )
            status, answer = await _reply(reader)
            seconds.append(time.perf_counter() - began)
            expected = row @ [1.0, 2.0, 3.0]
            right = status == 200 and abs(float(np.ravel(json.loads(answer)["result"])[0]) - expected) < 1e-9
            wrong += not right
        writer.close()

    async def bad(path: str, body: bytes, kind: str) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(_request(path, body, kind))
                await _reply(reader)
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

    others = [asyncio.create_task(bad(*body)) for body in bodies for _ in range(BAD_CLIENTS)]
    await asyncio.gather(*(client(i) for i in range(CLIENTS)))
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return seconds, wrong


def _request(path: str, body: bytes, kind: str = _JSON) -> bytes:
    method = "POST" if path.endswith("invocations") else "PUT"
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def _reply(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(None, 1)[0])
    return int(head.split(None, 2)[1]), await reader.readexactly(length)


def _bombs() -> list[tuple[str, bytes, str]]:
    sink = io.BytesIO()
    same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000_000, np.int32)), ["x" * 50])
    pq.write_table(pa.table({"a": same}), sink, compression="zstd")
    wide = ",".join(f"c{i}" for i in range(120_000)).encode() + b"\n1\n"
    deep = b'{"inputs": ' + b"[" * 400_000 + b"]" * 400_000 + b"}"
    path = "/models/fine/invocations"
    return [
        (path, sink.getvalue(), "application/vnd.apache.parquet"),
        (path, wide, "text/csv"),
        (path, deep, _JSON),
    ]


@contextmanager
def _server(folder: Path) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    from sklearn.linear_model import LinearRegression

    from kindler import Omega

    x = np.random.default_rng(0).normal(size=(20, 3))
    om = Omega(folder / "store")
    om.models.put(LinearRegression(fit_intercept=False).fit(x, x @ [1.0, 2.0, 3.0]), "fine")
    for name in BAD:
        om.models.put(getattr(_bad_models, name), name, kind="function", trusted=True)
    om.close()
    command = [sys.executable, "-m", "kindler.cli", "serve", "--store", str(folder / "store"), "--port", "0"]
    limits = ["--timeout-s", str(TIMEOUT_S), "--drain-s", str(DRAIN_S), "--model-memory-bytes", str(1 << 30)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *limits, "--trusted"], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline().rpartition(":")[2]), process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _load(port: int, path: str) -> None:
    body = json.dumps({"data": [[0.0, 0.0, 0.0]]}).encode()
    until = time.monotonic() + 120
    while time.monotonic() < until:
        request: Any = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", body, {"content-type": _JSON}, method="PUT"
        )
        try:
            urllib.request.urlopen(request, timeout=60).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"{path} does not answer")


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))] * 1e3


if __name__ == "__main__":
    main()
