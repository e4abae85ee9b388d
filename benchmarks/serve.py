"""How many requests a second does the server answer, and how late is the latest, beside two other servers?

MLServer and LitServe have environments of their own under benchmarks/.envs, made on the first run. All serve
the same model from the same file, with the same versions of the packages that compute, on the same machine,
to the same client, one row a request: a small network of scikit-learn's (784 to 128 to 10), or, with
`--mobilenet`, a Keras network of MobileNetV2's shape for images of 96 x 96 x 3, on TensorFlow everywhere and
as one compiled function in the peers too.

Rows travel as JSON, the one form that all three read over HTTP: the Open Inference Protocol V2 for Kindler
and MLServer, LitServe's own for LitServe. Kindler's binary tensors are shown beside that, and not judged.
Kindler's models run in processes of their own, as they come; without isolation is shown beside that.
Peers run with and without their own batching (64, 2 ms) and, MLServer, with and without a process for the
model; of all these ways the one with the most requests a second counts.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import _bench as bench
import numpy as np

HERE = Path(__file__).parent
ENVS = HERE / ".envs"
PROGRAMS = HERE / "serve_peers"
PEERS = {
    # With a later uvloop its worker processes do not start.
    "mlserver": ["mlserver==1.7.1", "mlserver-sklearn==1.7.1", "uvloop==0.21.0"],
    "litserve": ["litserve==0.2.19"],
}
COMPUTES = ("numpy", "scikit-learn", "tensorflow", "keras")
CLIENTS = (1, 16, 64)
WIDTH = 784
_RUNTIMES = {".joblib": "mlserver_sklearn.SKLearnModel", ".keras": "peer_mlserver.KerasModel"}


def main() -> None:
    """Measure, and print."""
    given = bench.arguments(__doc__ or "", repeats=3, mobilenet="serve a network of MobileNetV2's shape")
    seconds = 1.0 if given.quick else 4.0
    name = "serve_mobilenet" if given.mobilenet else "serve"
    report = bench.Report(name, "requests a second and the 99th percentile of latency", quick=given.quick)
    with bench.workplace() as folder:
        model = a_mobilenet(folder) if given.mobilenet else a_small_network(folder)
        ways = {
            "kindler": kindler(folder),
            "kindler, binary": kindler(folder, binary=True),
            "kindler, no isolation": kindler(folder, "--isolation", "none"),
        }
        for count in (1, 2) if given.mobilenet else ():
            ways[f"kindler, {count} processes"] = kindler(folder, "--processes", str(count))
        ways |= peers(model, folder)
        measured: dict[tuple[str, int], list[dict[str, float]]] = {}
        for _ in range(given.repeats):
            for name, way in ways.items():
                with way as where:
                    for clients in CLIENTS:
                        found = load(where, clients, seconds)
                        measured.setdefault((name, clients), []).append(found)
                        print(f"  {name}, {clients} clients: {found}", flush=True)
    for (name, clients), rounds in measured.items():
        report.figure(f"{name}, {clients} clients", [r["rate"] for r in rounds], "requests/s")
        report.figure(f"{name}, {clients} clients, p99", [r["p99_ms"] for r in rounds], "ms")
    for clients in CLIENTS:
        ours = measured["kindler", clients]
        best = max(
            (n for n, c in measured if not n.startswith("kindler") and c == clients),
            key=lambda n: rate(measured[n, clients]),
        )
        theirs = measured[best, clients]
        wanted = 2.0 if clients == 64 else None
        report.ratio(
            f"kindler / best peer ({best}), {clients} clients",
            [r["rate"] for r in ours],
            [r["rate"] for r in theirs],
            at_least=wanted,
        )
        report.ratio(
            f"p99 of kindler / that peer, {clients} clients",
            [r["p99_ms"] for r in ours],
            [r["p99_ms"] for r in theirs],
            at_most=1.0 if clients == 64 else None,
        )
    if given.mobilenet:
        two, one = (measured[f"kindler, {count} processes", 64] for count in (2, 1))
        report.ratio(
            "2 processes / 1 process, 64 clients",
            [r["rate"] for r in two],
            [r["rate"] for r in one],
            at_least=1.3,
        )
    report.finish(failures=sum(r["failures"] for rounds in measured.values() for r in rounds))


def peers(model: Path, folder: Path) -> dict[str, _Way]:
    """Every way to run a peer that might be its best."""
    mlserver_env, litserve_env = environment("mlserver"), environment("litserve")
    found = {}
    for batch in (1, 64):
        told = "batches" if batch > 1 else "no batches"
        found[f"mlserver, {told}"] = mlserver(mlserver_env, model, batch, folder)
        found[f"mlserver, {told}, a worker"] = mlserver(mlserver_env, model, batch, folder, workers=1)
        found[f"litserve, {told}"] = litserve(litserve_env, model, batch)
    return found


def rate(rounds: list[dict[str, float]]) -> float:
    """The middle of the rounds."""
    return sorted(r["rate"] for r in rounds)[len(rounds) // 2]


def a_small_network(folder: Path) -> Path:
    """scikit-learn's, in a store and as the peers take it."""
    import joblib
    from sklearn.neural_network import MLPRegressor

    x = np.random.default_rng(0).random((64, WIDTH))
    warnings.simplefilter("ignore")  # that it was not trained to the end
    model = MLPRegressor(hidden_layer_sizes=(128,), max_iter=1).fit(x, x[:, :10])
    del model._optimizer  # of training; skops does not know it to be harmless
    joblib.dump(model, folder / "model.joblib")
    _store(folder, model)
    _bodies(folder, np.round(x[:1], 4))
    return folder / "model.joblib"


def a_mobilenet(folder: Path) -> Path:
    """Keras's, with random weights, for images of 96 by 96."""
    os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    import keras

    body = keras.applications.MobileNetV2(input_shape=(96, 96, 3), include_top=False, weights=None)
    top = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(5)]
    model = keras.Sequential([keras.layers.Input((96, 96, 3)), body, *top])
    model.save(folder / "model.keras")
    _store(folder, model)
    _bodies(folder, np.random.default_rng(0).integers(0, 256, (1, 96, 96, 3)))
    return folder / "model.keras"


def _store(folder: Path, model: Any) -> None:
    from kindler import Store

    om = Store(folder / "store")
    om.models.put(model, "net")
    om.close()


def _bodies(folder: Path, rows: np.ndarray[Any, Any]) -> None:
    kind, dtype = ("FP32", "<f4") if rows.ndim > 2 else ("FP64", "<f8")
    flat = rows.ravel().tolist()
    tensor: dict[str, Any] = {"name": "x", "shape": list(rows.shape), "datatype": kind}
    (folder / "v2.json").write_text(json.dumps({"inputs": [{**tensor, "data": flat}]}))
    (folder / "litserve.json").write_text(json.dumps({"input": flat, "shape": list(rows.shape[1:])}))
    content = rows.astype(dtype).tobytes()
    tensor["parameters"] = {"binary_data_size": len(content)}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    (folder / "v2.bin").write_bytes(head + content)
    (folder / "v2.length").write_text(str(len(head)))


class _Way:
    """A server that can be started again and again."""

    def __init__(self, command: list[str], path: str, body: Path, port: int, head: int = 0) -> None:
        self._command = command
        self.path, self.body, self.port = path, body, port
        self.headers = {"content-type": "application/json"}
        if head:
            self.headers = {"inference-header-content-length": str(head)}
        self._context: Any = None

    def __enter__(self) -> _Way:
        self._context = self._running()
        self._context.__enter__()
        return self

    def __exit__(self, *told: Any) -> None:
        self._context.__exit__(*told)

    @contextmanager
    def _running(self) -> Iterator[None]:
        environ = dict(os.environ)
        if ".envs" in self._command[0]:
            environ["PYTHONPATH"] = str(PROGRAMS)  # and nothing else of ours
        log = self.body.with_name(f"{self.port}.log")
        with log.open("wb") as written:
            process = subprocess.Popen(
                self._command, env=environ, stdout=written, stderr=written, start_new_session=True
            )
        try:
            self._wait(process, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                pass
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers outlive some servers
            process.wait()

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + 120
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{self.path}",
            self.body.read_bytes(),
            self.headers,
        )
        while True:
            try:
                urllib.request.urlopen(request, timeout=10).close()
                return
            except OSError as exc:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{self._command}: {log.read_text()[-2000:]}") from exc
                time.sleep(0.2)


def kindler(folder: Path, *options: str, binary: bool = False) -> _Way:
    """Kindler's server, as it comes, or with options."""
    port = free_port()
    told = ["--store", str(folder / "store"), "--port", str(port), *options]
    command = [sys.executable, "-m", "kindler.cli", "serve", *told]
    if binary:
        head = int((folder / "v2.length").read_text())
        return _Way(command, "/v2/models/net/infer", folder / "v2.bin", port, head)
    return _Way(command, "/v2/models/net/infer", folder / "v2.json", port)


def mlserver(env: Path, model: Path, batch: int, folder: Path, workers: int = 0) -> _Way:
    """MLServer with its runtime for scikit-learn, or with one for Keras."""
    port = free_port()
    home = folder / f"mlserver-{batch}-{workers}"
    home.mkdir()
    settings: dict[str, Any] = {
        "name": "net",
        "implementation": _RUNTIMES[model.suffix],
        "parameters": {"uri": str(model)},
    }
    if batch > 1:
        settings |= {"max_batch_size": batch, "max_batch_time": 0.002}
    (home / "model-settings.json").write_text(json.dumps(settings))
    server = {
        "host": "127.0.0.1",
        "http_port": port,
        "grpc_port": free_port(),
        "metrics_port": free_port(),
        "debug": False,
        "parallel_workers": workers,
    }
    (home / "settings.json").write_text(json.dumps(server))
    return _Way(
        [str(env / "bin" / "mlserver"), "start", str(home)], "/v2/models/net/infer", folder / "v2.json", port
    )


def litserve(env: Path, model: Path, batch: int) -> _Way:
    """LitServe with a program of a few lines."""
    port = free_port()
    command = [
        str(env / "bin" / "python"),
        str(PROGRAMS / "peer_litserve.py"),
        str(model),
        str(port),
        str(batch),
    ]
    return _Way(command, "/predict", model.parent / "litserve.json", port)


def environment(peer: str) -> Path:
    """The peer's own packages, installed if they are not, and those that compute as they are here."""
    env = ENVS / peer
    wanted = [*PEERS[peer], "joblib", *(f"{name}=={version(name)}" for name in COMPUTES)]
    made = env / ".made"
    if not made.exists() or made.read_text().split() != wanted:
        print(f"  installing {peer} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(env)], check=True)
        pip = [str(env / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *wanted], check=True)
        made.write_text("\n".join(wanted))
    return env


def load(way: _Way, clients: int, seconds: float) -> dict[str, float]:
    """What the clients saw."""
    told = ["127.0.0.1", str(way.port), "POST", way.path, str(way.body), str(clients), str(seconds)]
    told += [f"{name}: {value}" for name, value in way.headers.items()]
    done = subprocess.run(
        [sys.executable, str(HERE / "_serve_load.py"), *told], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
