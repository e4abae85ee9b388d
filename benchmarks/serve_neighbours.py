"""What does a healthy model notice of neighbours that hang, crash and eat memory, and of bombs?

One server with a linear model whose answers are known, and three models that behave badly. 32 clients ask the
healthy one, first alone, then while another process asks the bad ones without a pause, and sends bodies of
every format that would become gigabytes or take long to read: Parquet, Arrow, CSV, JSON, binary tensors,
packed ones, messages of gRPC. Every answer of the healthy model is compared with what it must be.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import signal
import struct
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
import _grpc_load
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
    report = bench.Report("serve_neighbours", "a healthy model's p99 next to bad ones", quick=given.quick)
    with bench.workplace() as folder, _server(folder) as (port, grpc_port, process):
        for name in ("fine", *BAD):
            _load(port, f"/api/v1/model/{name}/predict")
        quiet, wrong = asyncio.run(_asked(port, min(wanted, QUIET_ANSWERS)))
        command = [sys.executable, __file__, "--neighbours", str(port), str(grpc_port)]
        others = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert others.stdout is not None
            assert others.stdout.readline()  # each of them has been answered once
            noisy, more_wrong = asyncio.run(_asked(port, wanted))
        finally:
            others.terminate()
            told = others.communicate()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=30) as reply:
            ready = reply.status == 200
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        ended_s = time.monotonic() - began
    report.figure("quiet, p99", [_p99(quiet)], "ms")
    report.figure("next to bad models, p99", [_p99(noisy)], "ms")
    report.figure("answers", [len(noisy)], "answers")
    report.figure("SIGTERM to the end", [ended_s], "s")
    report.ratio("p99 next to bad models / alone", [_p99(noisy)], [_p99(quiet)], at_most=3.0)
    report.ratio("SIGTERM to the end / (drain + 2 s)", [ended_s], [DRAIN_S + 2], at_most=1.0)
    report.limit("wrong answers", [wrong + more_wrong], "answers", at_most=0)
    report.limit("/readyz is not 200", [float(not ready)], "times", at_most=0)
    report.finish(neighbours=json.loads(told))


_JSON = "application/json"


async def _asked(port: int, wanted: int) -> tuple[list[float], int]:
    """Seconds of each answer of the healthy model, and how many were wrong."""
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

    await asyncio.gather(*(client(i) for i in range(CLIENTS)))
    return seconds, wrong


async def _neighbours(port: int, grpc_port: int) -> None:
    """Ask what is bad until stopped; prints a line when everything was asked, and counts at the end."""
    os.nice(10)  # elsewhere it would have a machine of its own
    counts: dict[str, list[int]] = {}
    asks = [(name, (f"/api/v1/model/{name}/predict", b'{"data": [[1.0]]}', _JSON, "")) for name in BAD]
    asks += list(_bombs().items())

    async def over_http(name: str, path: str, body: bytes, kind: str, header: str) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(_request(path, body, kind, header))
                status, _ = await _reply(reader)
                counts.setdefault(name, []).append(status)
                writer.close()
            except (OSError, asyncio.IncompleteReadError):
                counts.setdefault(name, []).append(0)

    async def over_grpc(name: str, message: bytes, encoding: str) -> None:
        while True:
            connection = _grpc_load.Connection("127.0.0.1", grpc_port, message, encoding)
            await connection.open()
            fine = await connection.ask()
            counts.setdefault(name, []).append(200 if fine else 400)
            connection.close()

    tasks = [over_http(name, *ask) for name, ask in asks for _ in range(BAD_CLIENTS)]
    tasks += [over_grpc(name, *bomb) for name, bomb in _messages().items() for _ in range(BAD_CLIENTS)]
    running = [asyncio.create_task(task) for task in tasks]
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    expected = len(asks) - 1 + len(_messages())  # a call that hangs is answered late
    while len(counts) < expected and not over.is_set():
        await asyncio.sleep(0.1)
    print("all were asked", flush=True)
    await over.wait()
    for one in running:
        one.cancel()
    shown = {name: {s: statuses.count(s) for s in sorted(set(statuses))} for name, statuses in counts.items()}
    print(json.dumps(shown), flush=True)


def _request(path: str, body: bytes, kind: str = _JSON, header: str = "") -> bytes:
    method = "GET" if not body else "POST" if path.endswith(("invocations", "infer")) else "PUT"
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\n"
    head += f"{header}\r\n" if header else ""
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def _reply(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(None, 1)[0])
    return int(head.split(None, 2)[1]), await reader.readexactly(length)


def _bombs() -> dict[str, tuple[str, bytes, str, str]]:
    """Path, body, content type and another header of each."""
    parquet, arrow = "application/vnd.apache.parquet", "application/vnd.apache.arrow.stream"
    path, infer = "/models/fine/invocations", "/v2/models/fine/infer"
    same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000_000, np.int32)), ["x" * 50])
    empty = pa.FixedSizeBinaryArray.from_buffers(pa.binary(0), 500_000, [None, pa.py_buffer(b"")])
    view = struct.pack("<i4sii", 100_000, b"xxxx", 0, 0)  # the same bytes, shown again and again
    shown = [None, pa.py_buffer(view * 20_000), pa.py_buffer(b"x" * 100_000)]
    views = pa.Array.from_buffers(pa.string_view(), 20_000, shown)
    texts = b"".join(struct.pack("<I", 1) + b"x" for _ in range(100_000))
    tensor = {"name": "x", "shape": [100_000], "datatype": "BYTES"}
    tensor["parameters"] = {"binary_data_size": len(texts)}
    told = json.dumps({"inputs": [tensor]}).encode()
    length = f"inference-header-content-length: {len(told)}"
    wide = ",".join(f"c{i}" for i in range(120_000)).encode() + b"\n1\n"
    return {
        "Parquet": (path, _parquet({"a": same}), parquet, ""),
        "Arrow, texts of no bytes": (path, _arrow({f"c{i}": empty for i in range(50)}), arrow, ""),
        "Arrow, views": (path, _arrow({"a": views}), arrow, ""),
        "CSV": (path, wide, "text/csv", ""),
        "JSON, deep": (path, b'{"inputs": ' + b"[" * 400_000 + b"]" * 400_000 + b"}", _JSON, ""),
        "JSON, packed": (
            path,
            gzip.compress(b'{"inputs": [' + b"1," * 25_000_000 + b"1]}"),
            _JSON,
            "content-encoding: gzip",
        ),
        "tensor, texts": (infer, told + texts, _JSON, length),
        "pattern": ("/api/v1/models?pattern=" + "*a" * 20, b"", _JSON, ""),
    }


def _messages() -> dict[str, tuple[bytes, str]]:
    """Messages of gRPC, and how each is compressed."""
    from kindler.serve.grpc_api.messages import message

    made = message("inference.ModelInferRequest")(model_name="fine")
    made.inputs.add(name="x", datatype="INT64", shape=[900_000]).contents.int64_contents.extend([1] * 900_000)
    values = made.SerializeToString()
    return {
        "gRPC, values": (values, ""),
        "gRPC, inputs": (values[:6] + b"\x2a\x00" * 450_000, ""),
        "gRPC, packed": (gzip.compress(b"\x3a" + b"\x00" * (60 << 20)), "gzip"),
    }


def _parquet(columns: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return sink.getvalue()


def _arrow(columns: dict[str, Any]) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table(columns)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@contextmanager
def _server(folder: Path) -> Iterator[tuple[int, int, subprocess.Popen[str]]]:
    from sklearn.linear_model import LinearRegression

    from kindler import Store

    x = np.random.default_rng(0).normal(size=(20, 3))
    om = Store(folder / "store")
    om.models.put(LinearRegression(fit_intercept=False).fit(x, x @ [1.0, 2.0, 3.0]), "fine")
    for name in BAD:
        om.models.put(getattr(_bad_models, name), name, kind="function", trusted=True)
    om.close()
    command = [sys.executable, "-m", "kindler.cli", "serve", "--store", str(folder / "store"), "--port", "0"]
    limits = ["--timeout-s", str(TIMEOUT_S), "--drain-s", str(DRAIN_S), "--model-memory-bytes", str(1 << 30)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *limits, "--trusted", "--grpc-port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        port, grpc_port = (int(process.stdout.readline().rpartition(":")[2]) for _ in range(2))
        yield port, grpc_port, process
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
    if sys.argv[1:2] == ["--neighbours"]:
        asyncio.run(_neighbours(int(sys.argv[2]), int(sys.argv[3])))
    else:
        main()
