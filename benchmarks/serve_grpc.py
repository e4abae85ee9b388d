"""How many requests a second over gRPC, beside the same rows as JSON over HTTP?

One server answers both, one row a request: with a small network of scikit-learn's (784 to 128 to 10), and
with one whose rows have the size of an image of 96 x 96 x 3. The client is a process of its own: for HTTP on
plain sockets, for gRPC grpcio's own asynchronous client with a message that was made before.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _bench as bench
import numpy as np

CLIENTS = (1, 16, 64)
WIDTHS = {"small": (784, 128), "image": (96 * 96 * 3, 8)}
METHOD = "/inference.GRPCInferenceService/ModelInfer"


def main() -> None:
    """Measure, and print."""
    given = bench.arguments(__doc__ or "", repeats=3)
    seconds = 1.0 if given.quick else 4.0
    report = bench.Report("serve_grpc", "requests a second over gRPC and JSON over HTTP", quick=given.quick)
    measured: dict[tuple[str, str, int], list[float]] = {}
    with bench.workplace() as folder:
        bodies = stored(folder)
        with server(folder) as where:
            for _ in range(given.repeats):
                for (model, protocol), body in bodies.items():
                    for clients in CLIENTS:
                        rate = asked(protocol, model, where[protocol], body, clients, seconds)
                        measured.setdefault((model, protocol, clients), []).append(rate)
                        print(f"  {model}, {protocol}, {clients} clients: {rate:.0f}/s", flush=True)
    for (model, protocol, clients), rates in measured.items():
        report.figure(f"{model}, {protocol}, {clients} clients", rates, "requests/s")
    for model in WIDTHS:
        for clients in CLIENTS:
            wanted = 1.2 if clients == 64 else None
            pair = measured[model, "grpc", clients], measured[model, "http", clients]
            report.ratio(f"{model}: gRPC / HTTP JSON, {clients} clients", *pair, at_least=wanted)
    report.finish()


def stored(folder: Path) -> dict[tuple[str, str], Path]:
    """Store the networks; a body for each of them and each protocol."""
    from sklearn.neural_network import MLPRegressor

    from kindler import Omega

    random = np.random.default_rng(0)
    warnings.simplefilter("ignore")  # that they are not trained to the end
    om = Omega(folder / "store")
    bodies = {}
    for model, (width, hidden) in WIDTHS.items():
        x = random.random((64, width))
        made = MLPRegressor(hidden_layer_sizes=(hidden,), max_iter=1).fit(x, x[:, :10])
        del made._optimizer  # of training; skops does not know it to be harmless
        om.models.put(made, model)
        row = random.random((1, width), np.float32)
        for protocol, content in (("http", json_body(row)), ("grpc", grpc_body(model, row))):
            bodies[model, protocol] = folder / f"{model}.{protocol}"
            bodies[model, protocol].write_bytes(content)
    om.close()
    return bodies


def json_body(row: Any) -> bytes:
    """The row as JSON of the Open Inference Protocol."""
    tensor = {"name": "x", "shape": list(row.shape), "datatype": "FP32", "data": row.ravel().tolist()}
    return json.dumps({"inputs": [tensor]}).encode()


def grpc_body(model: str, row: Any) -> bytes:
    """The row as a message."""
    from kindler.serve.grpc_api.messages import message

    made = message("inference.ModelInferRequest")(model_name=model, raw_input_contents=[row.tobytes()])
    made.inputs.add(name="x", datatype="FP32", shape=row.shape)
    packed: bytes = made.SerializeToString()
    return packed


@contextmanager
def server(folder: Path) -> Iterator[dict[str, str]]:
    """The addresses of a server."""
    command = [sys.executable, "-m", "kindler.cli", "serve", "--store", str(folder / "store"), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--grpc-port", "0", "--log-level", "error"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline().split()[-1] for _ in range(2)]
        yield {"http": lines[0].removeprefix("http://"), "grpc": lines[1]}
    finally:
        process.terminate()
        process.wait(60)


def asked(protocol: str, model: str, where: str, body: Path, clients: int, seconds: float) -> float:
    """Requests a second that were answered."""
    if protocol == "http":
        host, _, port = where.partition(":")
        load = [str(Path(__file__).with_name("_serve_load.py")), host, port, "POST"]
        load.append(f"/v2/models/{model}/infer")
        command = [sys.executable, *load, str(body), str(clients), str(seconds)]
    else:
        command = [sys.executable, __file__, "--client", where, str(body), str(clients), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    found = json.loads(done.stdout)
    assert not found["failures"], found
    return float(found["rate"])


async def client(where: str, body: str, clients: int, seconds: float) -> None:
    """Ask over gRPC, and print what was measured."""
    import grpc

    content = Path(body).read_bytes()
    warm = time.perf_counter() + min(2.0, seconds / 2)
    end, answered, failures = warm + seconds, 0, 0

    async def one(channel: Any) -> None:
        nonlocal answered, failures
        call = channel.unary_unary(METHOD)
        while time.perf_counter() < end:
            try:
                await call(content)
                answered += time.perf_counter() > warm
            except grpc.RpcError:
                failures += 1

    async with grpc.aio.insecure_channel(where) as channel:
        await asyncio.gather(*(one(channel) for _ in range(clients)))
    print(json.dumps({"rate": answered / seconds, "failures": failures}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        asyncio.run(client(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])))
    else:
        main()
