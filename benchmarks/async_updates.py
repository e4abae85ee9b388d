"""How many updates a second go through the parameter server, against a Flask server that pickles arrays?

Two workers push gradients of a network of 269,322 parameters as fast as they can; each push is answered with
the weights. Both servers apply them with the same torch replica and Adam. The Flask server is what SparkFlow
has: GET for the weights, POST for the gradients, both pickled. Then: how long after the call of `fit` is the
first update made, with warm processes?
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _bench import Report, arguments, mlp, rounds

from kindler import Estimator
from kindler.callbacks import Callback
from kindler.config import RunSettings
from kindler.engine import local
from kindler.engine.job import Job, RankSpec, equal_ranks
from kindler.sync.asynchronous import Asynchronous
from kindler.sync.parameter_server import ParameterServer

WORKERS = 2
BINARY = {"Content-Type": "application/octet-stream"}
AT_LEAST, HOPED, FIRST_UPDATE_S = 6.0, 10.0, 2.0


def main() -> None:
    given = arguments(__doc__, repeats=5)
    pushes = 40 if given.quick else 400
    posts = 10 if given.quick else 60
    report = Report(
        "async_updates",
        f"updates/s of {WORKERS} workers through the server, 269,322 parameters",
        quick=given.quick,
    )
    ways = {
        "kindler, memory": lambda: _kindler(pushes, shared_memory=True),
        "kindler, sockets": lambda: _kindler(pushes, shared_memory=False),
        "Flask and pickle": lambda: _flask(posts),
    }
    found = rounds(ways, repeats=given.repeats)
    for name, values in found.items():
        report.figure(name, values, "updates/s")
    report.ratio("kindler / Flask", found["kindler, memory"], found["Flask and pickle"], at_least=AT_LEAST)
    report.ratio("kindler over sockets / Flask", found["kindler, sockets"], found["Flask and pickle"])
    first = [_first_update() for _ in range(given.repeats + 1)][1:]
    report.limit("fit to first update, warm", first, "s", at_most=FIRST_UPDATE_S)
    report.finish(workers=WORKERS, parameters=269_322, hoped=HOPED)


def replica() -> Any:
    """The network with its optimizer."""
    import torch

    from kindler.frameworks.torch.replica import TorchReplica

    spec = TorchReplica.make_spec(model=mlp, optimizer=torch.optim.Adam, loss=torch.nn.CrossEntropyLoss())
    return TorchReplica(spec, device="cpu", threads=1)


def serve(worker: Any, pushes: bytes, shared_memory: bytes) -> Sequence[bytes]:
    """The server."""
    server = ParameterServer(replica(), lock=False, max_staleness=None)
    worker.answer_calls(server.serve, server.check)
    return []


def push(worker: Any, pushes: bytes, shared_memory: bytes) -> Sequence[bytes]:
    """A worker: as many updates as it is told, timed from when all are ready."""
    mine = replica()
    sync = Asynchronous(RunSettings(shared_memory=shared_memory == b"1"))
    sync.attach(mine, worker)
    sync.begin_epoch(mine)
    gradients = [np.full(array.shape, 1e-3, array.dtype) for array in mine.read()]
    worker.barrier()
    started = time.perf_counter()
    for _ in range(int(pushes)):
        sync._learn(gradients, 1.0)
    seconds = time.perf_counter() - started
    worker.barrier()
    sync.close()
    return [json.dumps(seconds).encode()]


def _kindler(pushes: int, *, shared_memory: bool) -> float:
    server = RankSpec(target="async_updates:serve", role="ps", ports=1, service=True, beside=True)
    job = Job(
        ranks=(*equal_ranks("async_updates:push", WORKERS), server),
        buffers=(str(pushes).encode(), b"1" if shared_memory else b"0"),
        preload=("torch",),
    )
    outcomes = local.run(job, listener=lambda event: None)
    seconds = max(json.loads(outcome.buffers[0]) for outcome in outcomes[:WORKERS])
    return WORKERS * pushes / seconds


def _flask(posts: int) -> float:
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    server = context.Process(target=_flask_server, args=(port,), daemon=True)
    server.start()
    try:
        _wait_for(port, server)
        together = context.Barrier(WORKERS)
        seconds = context.Queue()
        clients = [
            context.Process(target=_flask_worker, args=(port, posts, together, seconds), daemon=True)
            for _ in range(WORKERS)
        ]
        for client in clients:
            client.start()
        slowest = max(seconds.get(timeout=300) for _ in clients)
        for client in clients:
            client.join()
        return WORKERS * posts / slowest
    finally:
        server.terminate()
        server.join()


def _flask_server(port: int) -> None:
    import logging

    from flask import Flask, request

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    held, app, lock = replica(), Flask("parameters"), threading.Lock()

    @app.get("/parameters")
    def parameters() -> bytes:
        return pickle.dumps(held.read(), -1)

    @app.post("/update")
    def update() -> str:
        gradients = pickle.loads(request.data)
        with lock:  # an optimizer makes one step at a time
            held.apply(gradients)
        return "completed"

    app.run(host="127.0.0.1", port=port, threaded=True)


def _wait_for(port: int, server: Any) -> None:
    while server.is_alive():
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)  # Flask says nothing when it listens
    raise RuntimeError("the Flask server did not start.")


def _flask_worker(port: int, posts: int, together: Any, seconds: Any) -> None:
    url = f"http://127.0.0.1:{port}"
    together.wait()
    started = time.perf_counter()
    for _ in range(posts):
        with urllib.request.urlopen(f"{url}/parameters") as answer:
            weights = pickle.loads(answer.read())
        body = pickle.dumps([np.full(array.shape, 1e-3, array.dtype) for array in weights], -1)
        post = urllib.request.Request(f"{url}/update", data=body, headers=BINARY, method="POST")
        urllib.request.urlopen(post).close()
    seconds.put(time.perf_counter() - started)


class _Notes(Callback):
    """Writes down when the first step was made."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, run: Any) -> None:
        if not self.path.exists():
            self.path.write_text(str(time.time()))


def _first_update() -> float:
    """Seconds from the call of `fit` to the first update."""
    import torch

    model = mlp()
    estimator = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        loss=torch.nn.CrossEntropyLoss(),
        workers=WORKERS,
    )
    rows = np.zeros((64, 784), np.float32), np.zeros(64, np.int64)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "first"
        started = time.time()
        estimator.fit(rows, batch_size=32, callbacks=[_Notes(path)], strategy="async", verbose=0)
        return float(path.read_text()) - started


if __name__ == "__main__":
    main()
