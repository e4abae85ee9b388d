"""How many requests a second over gRPC, beside the same rows as JSON over HTTP, and what do they cost?

One server answers both, one row a request: with a small network of scikit-learn's (784 to 128 to 10), and
with one whose rows have the size of an image of 96 x 96 x 3. The clients are those that people have, in a
process of its own: grpcio's asynchronous one with one channel for all, and aiohttp. It shares the machine's
cores with the server; beside that, a client of HTTP on plain sockets, which costs next to nothing. The CPU
time of the server, with the processes of its models, is counted for each request.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _bench as bench
import numpy as np
import psutil

CLIENTS = (1, 16, 64)
WIDTHS = {"small": (784, 128), "image": (96 * 96 * 3, 8)}
WAYS = {"HTTP JSON": "_http_load.py", "HTTP JSON, sockets": "_serve_load.py", "gRPC": "_grpc_load.py"}
LEAST = {"small": 1.0, "image": 1.5}  # of gRPC / HTTP JSON, with most clients


def main() -> None:
    """Measure, and print."""
    given = bench.arguments(__doc__ or "", repeats=3)
    seconds = 1.0 if given.quick else 4.0
    report = bench.Report("serve_grpc", "requests a second over gRPC and JSON over HTTP", quick=given.quick)
    rates: dict[tuple[str, str, int], list[float]] = {}
    costs: dict[tuple[str, str, int], list[float]] = {}
    with bench.workplace() as folder:
        bodies = stored(folder)
        with server(folder) as (where, pid):
            for _ in range(given.repeats):
                for model in WIDTHS:
                    for clients in CLIENTS:
                        for way in WAYS:
                            body = bodies[model, "grpc" if way == "gRPC" else "http"]
                            rate, cost = asked(way, model, where, body, clients, seconds, pid)
                            rates.setdefault((model, way, clients), []).append(rate)
                            costs.setdefault((model, way, clients), []).append(cost)
                            told = f"{rate:.0f}/s, {cost * 1e6:.0f} us of the server's CPU each"
                            print(f"  {model}, {way}, {clients} clients: {told}", flush=True)
    for (model, way, clients), found in rates.items():
        report.figure(f"{model}, {way}, {clients} clients", found, "requests/s")
        if clients == max(CLIENTS):
            spent = [cost * 1e6 for cost in costs[model, way, clients]]
            report.figure(f"{model}, {way}, {clients} clients, the server's CPU", spent, "us/request")
    for model in WIDTHS:
        for clients in CLIENTS:
            for way in ("HTTP JSON", "HTTP JSON, sockets"):
                pair = rates[model, "gRPC", clients], rates[model, way, clients]
                least = LEAST[model] if way == "HTTP JSON" and clients == max(CLIENTS) else None
                report.ratio(f"{model}: gRPC / {way}, {clients} clients", *pair, at_least=least)
    report.finish()


def stored(folder: Path) -> dict[tuple[str, str], Path]:
    """Store the networks; a body for each of them and each protocol."""
    from sklearn.neural_network import MLPRegressor

    from kindler import Store

    random = np.random.default_rng(0)
    warnings.simplefilter("ignore")  # that they are not trained to the end
    om = Store(folder / "store")
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
def server(folder: Path) -> Iterator[tuple[dict[str, str], int]]:
    """The addresses of a server, and the number of its process."""
    command = [sys.executable, "-m", "kindler.cli", "serve", "--store", str(folder / "store"), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--grpc-port", "0", "--log-level", "error"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline().split()[-1] for _ in range(2)]
        yield {"http": lines[0].removeprefix("http://"), "grpc": lines[1]}, process.pid
    finally:
        process.terminate()
        process.wait(60)


def asked(
    way: str, model: str, where: dict[str, str], body: Path, clients: int, seconds: float, pid: int
) -> tuple[float, float]:
    """Requests a second that were answered, and seconds of the server's CPU for each."""
    program = str(Path(__file__).with_name(WAYS[way]))
    host, _, port = where["grpc" if way == "gRPC" else "http"].partition(":")
    rest = [str(body), str(clients), str(seconds)]
    path = f"/v2/models/{model}/infer"
    before = {
        "gRPC": [program, "grpcio", host, port],
        "HTTP JSON": [program, host, port, path],
        "HTTP JSON, sockets": [program, host, port, "POST", path],
    }
    load = [*before[way], *rest]
    spent_s = cpu_s(pid)
    done = subprocess.run([sys.executable, *load], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    assert not found["failures"], found
    return float(found["rate"]), (cpu_s(pid) - spent_s) / found["asked"]


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process and its descendants have taken."""
    server = psutil.Process(pid)
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return float(sum(spent.user + spent.system for spent in times))


if __name__ == "__main__":
    main()
