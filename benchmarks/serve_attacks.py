"""What do clients over HTTP notice while somebody attacks the server over gRPC?

One server with its defaults, keys on. 8 clients ask a linear model over HTTP, first alone, then during each
attack of `_grpc_attacks.py`, which runs in a process of its own. Every answer is compared with what it must
be, and a call over gRPC with a key is made during each attack. A while after each attack, the memory and the
descriptors of the server are compared with what they were before the first. `ONLY=idle` in the environment
runs the attacks with that word only.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _bench as bench
import numpy as np
import psutil
from _grpc_attacks import ATTACKS

CLIENTS = 8
WIDE = 100_000  # numbers in a row of the large answer
METHOD = "/inference.GRPCInferenceService/ModelInfer"
SETTLE_S = 8.0  # the server looks every few seconds whether it has grown


def main() -> None:
    """Measure, and print."""
    given = bench.arguments(__doc__ or "", repeats=1)
    seconds = 5.0 if given.quick else 10.0
    report = bench.Report("serve_attacks", "the p99 of HTTP during attacks over gRPC", quick=given.quick)
    with bench.workplace() as folder, server(folder) as (port, grpc_port, key, process):
        body = folder / "body"
        body.write_bytes(message("wide", np.ones((10, 3))))
        grpc_call(grpc_port, key, body.read_bytes())  # it is loaded
        asyncio.run(asked(port, key, 2.0))
        quiet, wrong = asyncio.run(asked(port, key, seconds))
        time.sleep(SETTLE_S)
        before = state(process)
        report.figure("quiet, p99", [p99(quiet)], "ms")
        for name in (name for name in ATTACKS if os.environ.get("ONLY", "") in name):
            words = [name, str(grpc_port), str(seconds + 1), key, str(body)]
            attacker = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("_grpc_attacks.py")), *words],
                stdout=subprocess.PIPE,
                text=True,
            )
            time.sleep(0.5)
            times, more_wrong = asyncio.run(asked(port, key, seconds - 1))
            answered = grpc_call(grpc_port, key, message("fine", np.ones((1, 3))))
            peak = state(process)
            told = attacker.communicate()[0].strip()
            time.sleep(SETTLE_S)
            after = state(process)
            print(f"  {name}: {told}; then {peak} -> {after} of {before}", flush=True)
            wrong += more_wrong
            report.ratio(f"p99 during {name} / quiet", [p99(times)], [p99(quiet)], at_most=3.0)
            report.limit(f"memory after {name}", [(after[0] - before[0]) / 1e6], "MB", at_most=200)
            report.limit(f"descriptors after {name}", [float(after[1] - before[1])], "files", at_most=16)
            report.limit(f"calls with a key refused during {name}", [float(not answered)], "calls", at_most=0)
    report.limit("wrong answers over HTTP", [float(wrong)], "answers", at_most=0)
    report.finish()


def state(process: psutil.Process) -> tuple[int, int]:
    """Bytes and descriptors of the server."""
    return process.memory_info().rss, process.num_fds()


async def asked(port: int, key: str, seconds: float) -> tuple[list[float], int]:
    """Seconds of each answer, and how many were wrong."""
    times: list[float] = []
    wrong = 0
    end = time.perf_counter() + seconds
    body = json.dumps({"data": [[1.0, 2.0, 3.0]]}).encode()
    head = f"PUT /api/v1/model/fine/predict HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"

    async def client() -> None:
        nonlocal wrong
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            began = time.perf_counter()
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().partition(b"content-length:")[2].split(None, 1)[0])
            content = await reader.readexactly(length)
            times.append(time.perf_counter() - began)
            told = json.loads(content).get("result", [0.0])
            wrong += b" 200 " not in answer or abs(float(np.ravel(told)[0]) - 14.0) > 1e-9
        writer.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return times, wrong


def grpc_call(port: int, key: str, content: bytes) -> bool:
    """Whether a prediction over gRPC was answered."""
    import grpc

    with grpc.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]
    ) as made:
        try:
            made.unary_unary(METHOD)(content, metadata=[("authorization", f"Bearer {key}")], timeout=60)
        except grpc.RpcError as exc:
            print(f"  refused: {exc}", flush=True)
            return False
    return True


def message(model: str, rows: Any) -> bytes:
    """A request for a prediction."""
    from kindler.serve.grpc_api.messages import message

    made = message("inference.ModelInferRequest")(model_name=model, raw_input_contents=[rows.tobytes()])
    made.inputs.add(name="x", datatype="FP64", shape=rows.shape)
    made.parameters["batch"].bool_param = False
    packed: bytes = made.SerializeToString()
    return packed


@contextmanager
def server(folder: Path) -> Iterator[tuple[int, int, str, psutil.Process]]:
    """The ports of a server, a key that may predict, and its process."""
    from sklearn.linear_model import LinearRegression

    from kindler import Store
    from kindler.store.keys import Keys

    x = np.random.default_rng(0).normal(size=(20, 3))
    om = Store(folder / "store")
    om.models.put(LinearRegression(fit_intercept=False).fit(x, x @ [1.0, 2.0, 3.0]), "fine")
    om.models.put(LinearRegression(fit_intercept=False).fit(x, np.repeat(x[:, :1], WIDE, axis=1)), "wide")
    om.close()
    keys = Keys(str(folder / "store"))
    key = keys.add(["predict"])[1]
    keys.close()
    command = [sys.executable, "-m", "kindler.cli", "serve", "--store", str(folder / "store"), "--port", "0"]
    process = subprocess.Popen([*command, "--grpc-port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port, grpc_port = (int(process.stdout.readline().rpartition(":")[2]) for _ in range(2))
        yield port, grpc_port, key, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def p99(seconds: list[float]) -> float:
    """In milliseconds."""
    return sorted(seconds)[int(0.99 * len(seconds))] * 1e3


if __name__ == "__main__":
    main()
