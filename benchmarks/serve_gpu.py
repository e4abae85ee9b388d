"""How many images and texts a second does the server answer on a GPU, beside a loop over the same batches?

ResNet-50 (one uint8 image a request) and BERT-base (128 tokens), in bfloat16, with random weights: a real
`kindler serve`, and clients in other processes with one connection each, over HTTP (binary tensors) and gRPC.
The loop by hand has as many rows in a batch as there are clients, in pinned memory, and the model as eager
PyTorch in bfloat16. Then answers are compared with those of their rows alone. `--cpu` is small and shows only
that it works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _bench as bench
import numpy as np
from _gpu_load import http_body

HERE = Path(__file__).parent
CLIENTS = (1, 16, 64)
PROCESSES = {1: 1, 16: 4, 64: 4}
WARM_S = 0.5
LEAST = {("resnet", 16): 2_500.0, ("resnet", 64): 4_000.0}
LATEST_MS = {("resnet", 16): 10.0, ("resnet", 64): 25.0}
ROWS, FEW_ROWS = 192, 24


def main() -> None:
    given = bench.arguments(
        __doc__ or "", repeats=3, cpu="small models on the CPU", resnet="only this", bert="only this"
    )
    seconds = 1.0 if given.quick or given.cpu else 2.5
    answers = 100 if given.quick or given.cpu else 20_000
    given.repeats = 1 if given.cpu else given.repeats
    chosen = [name for name in ("resnet", "bert") if getattr(given, name)] or ["resnet", "bert"]
    report = bench.Report("serve_gpu", "requests a second on one GPU", quick=given.quick or given.cpu)
    with bench.workplace() as folder:
        rows = {name: stored(folder, name, small=given.cpu) for name in chosen}
        with server(folder, "cpu" if given.cpu else "cuda") as where:
            for name in chosen:
                measure(report, name, where, rows[name], folder, given, seconds, answers)
    report.finish()


def measure(
    report: bench.Report,
    name: str,
    where: dict[str, str],
    rows: dict[str, Any],
    folder: Path,
    given: Any,
    seconds: float,
    answers: int,
) -> None:
    started = time.perf_counter()
    get(where["http"], f"/v2/models/{name}/ready")
    ready_s = time.perf_counter() - started
    body, length = http_body({key: array[:1] for key, array in rows.items()})
    started = time.perf_counter()
    post(where["http"], name, body, length)
    first_ms = 1e3 * (time.perf_counter() - started)
    loaded = next(m for m in json.loads(get(where["http"], "/api/v1/stats"))["loaded"] if m["name"] == name)
    tell(
        f"{name}: ready after {ready_s:.1f} s, first answer after {first_ms:.1f} ms, {loaded['device']},"
        f" joined: {loaded['batches_join']}, {loaded['device_bytes'] >> 20} MiB, {loaded['batches']}"
    )
    report.figure(f"{name}, ready", [ready_s], "s")
    report.limit(f"{name}, first answer", [first_ms], "ms", at_most=50.0)
    expected = np.concatenate(
        [alone(where["http"], name, rows, i) for i in range(len(rows[next(iter(rows))]))]
    )
    path = folder / f"{name}.npz"
    np.savez(path, expected=expected, **rows)
    loop = Loop(name, small=given.cpu)
    rates: dict[tuple[str, int], list[float]] = {}
    late: dict[tuple[str, int], list[float]] = {}
    for _ in range(given.repeats):
        for clients in CLIENTS:
            rates.setdefault(("by hand", clients), []).append(loop.rate(rows, clients, seconds))
            tell(f"{name}, by hand, batches of {clients}: {rates['by hand', clients][-1]:.0f}/s")
            for protocol in ("http", "grpc"):
                rate, p50, p99 = load(protocol, where[protocol], name, path, clients, seconds)
                rates.setdefault((protocol, clients), []).append(rate)
                late.setdefault((protocol, clients), []).append(p99)
                tell(
                    f"{name}, {protocol}, {clients} clients: {rate:.0f}/s, p50 {p50:.2f} ms, p99 {p99:.2f} ms"
                )
    for (way, clients), found in rates.items():
        report.figure(f"{name}, {way}, {clients} clients", found, "rows/s")
    for (protocol, clients), found in late.items():
        most = LATEST_MS.get((name, clients))
        if most is None:
            report.figure(f"{name}, {protocol}, {clients} clients, p99", found, "ms")
        else:
            report.limit(f"{name}, {protocol}, {clients} clients, p99", found, "ms", at_most=most)
    for clients in CLIENTS:
        by_hand, http = rates["by hand", clients], rates["http", clients]
        enough = sorted(http)[len(http) // 2] >= LEAST.get((name, clients), float("inf"))
        report.ratio(
            f"{name}: HTTP / by hand, {clients} clients",
            http,
            by_hand,
            at_least=0.7 if clients > 1 and not enough else None,
        )
        report.ratio(
            f"{name}: gRPC / HTTP, {clients} clients",
            rates["grpc", clients],
            http,
            at_least=1.0 if clients > 1 else None,
        )
    for protocol in ("http", "grpc"):
        worst, mixed = compared(protocol, where[protocol], name, path, answers)
        tell(
            f"{name}, {protocol}: {answers} answers, {mixed} mixed up, the worst {worst:.5f} from the model"
            " alone"
        )
        report.limit(f"{name}, {protocol}: answers mixed up", [mixed], "of all", at_most=0)
        most = loaded["batches"]["tolerance"]
        report.limit(f"{name}, {protocol}: from the model alone", [worst], "of the largest", at_most=most)


def stored(folder: Path, name: str, *, small: bool) -> dict[str, Any]:
    """Store a model as it is to be served; rows of its inputs."""
    import _gpu_models

    from kindler import Store

    store, count = Store(folder / "store"), FEW_ROWS if small else ROWS
    if name == "resnet":
        rows = {"image": _gpu_models.images(count, small)}
        model, init = _gpu_models.resnet(small)
        declared = {"image": {"dtype": "uint8", "shape": list(rows["image"].shape[1:])}}
        options: dict[str, Any] = {"init": init}
    else:
        ids = _gpu_models.texts(count)
        rows = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        model, options = _gpu_models.bert(small), {}
        declared = {key: {"dtype": "int64", "shape": [_gpu_models.TOKENS]} for key in rows}
    store.models.put(model, name, attributes={"precision": "bf16", "inputs": declared}, **options)
    store.close()
    return rows


class Loop:
    """The loop that one would write, in this process."""

    def __init__(self, name: str, *, small: bool) -> None:
        import _gpu_models
        import torch

        self._torch, self._device = torch, torch.device("cpu" if small else "cuda")
        model = _gpu_models.resnet(small)[0] if name == "resnet" else _gpu_models.bert(small)
        self._model = model.to(self._device, torch.bfloat16)
        if name == "resnet":
            self._model = self._model.to(memory_format=torch.channels_last)
            torch.backends.cudnn.benchmark = True

    def rate(self, rows: dict[str, Any], size: int, seconds: float) -> float:
        torch, count = self._torch, 0
        here = {key: torch.from_numpy(np.ascontiguousarray(array[:size])) for key, array in rows.items()}
        if self._device.type == "cuda":
            here = {key: tensor.pin_memory() for key, tensor in here.items()}
        with torch.inference_mode():
            for _ in range(5):
                self._call(here)
            end = (started := time.perf_counter()) + seconds
            while time.perf_counter() < end:
                self._call(here)
                count += size
        return count / (time.perf_counter() - started)

    def _call(self, here: dict[str, Any]) -> Any:
        there = {key: tensor.to(self._device, non_blocking=True) for key, tensor in here.items()}
        outputs = self._model(**there)
        return getattr(outputs, "logits", outputs).float().cpu().numpy()


@contextmanager
def server(folder: Path, device: str) -> Iterator[dict[str, str]]:
    """The addresses of a server."""
    command = [sys.executable, "-m", "kindler.cli", "serve", "--store", str(folder / "store"), "--port", "0"]
    command += [
        "--grpc-port",
        "0",
        "--trusted",
        "--device",
        device,
        "--timeout-s",
        "300",
        *os.environ.get("SERVE", "").split(),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline().split()[-1] for _ in range(2)]
        yield {"http": lines[0].removeprefix("http://"), "grpc": lines[1]}
    finally:
        process.terminate()
        process.wait(60)


def get(where: str, path: str) -> bytes:
    content: bytes = urllib.request.urlopen(f"http://{where}{path}", timeout=300).read()
    return content


def post(where: str, name: str, body: bytes, length: int) -> tuple[bytes, int]:
    headers = {"inference-header-content-length": str(length), "content-type": "application/octet-stream"}
    asked = urllib.request.Request(f"http://{where}/v2/models/{name}/infer", body, headers)
    with urllib.request.urlopen(asked, timeout=300) as reply:
        return reply.read(), int(reply.headers["inference-header-content-length"])


def alone(where: str, name: str, rows: dict[str, Any], number: int) -> Any:
    """What the server answers while nobody else asks."""
    body, length = http_body({key: array[number : number + 1] for key, array in rows.items()})
    content, skip = post(where, name, body, length)
    return np.frombuffer(content[skip:], np.float32)[None]


def load(
    protocol: str, where: str, name: str, path: Path, clients: int, seconds: float
) -> tuple[float, float, float]:
    """Requests a second, and latencies in milliseconds: while all processes of clients ask."""
    found = asked(protocol, where, name, path, clients, seconds + WARM_S)
    first, last = max(one["when"][0] for one in found), min(one["when"][-1] for one in found)
    first = min(first + WARM_S, last - seconds / 2)
    took = sorted(
        seconds
        for one in found
        for when, seconds in zip(one["when"], one["took"], strict=True)
        if first <= when <= last
    )
    p50, p99 = (1e3 * took[min(len(took) - 1, int(share * len(took)))] for share in (0.5, 0.99))
    return len(took) / (last - first), p50, p99


def compared(protocol: str, where: str, name: str, path: Path, answers: int) -> tuple[float, int]:
    count = PROCESSES[64]
    found = asked(protocol, where, name, path, 64, 0, str(-(-answers // count)))
    return max(one["worst"] for one in found), sum(one["mixed"] for one in found)


def asked(protocol: str, where: str, name: str, path: Path, clients: int, seconds: float, *check: str) -> Any:
    count = PROCESSES[clients]
    program = [sys.executable, str(HERE / "_gpu_load.py"), protocol, where, name, str(path)]
    processes = [
        subprocess.Popen(
            [*program, str(clients // count), str(seconds), str(number * 47), *check],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    told = [process.communicate(timeout=300)[0] for process in processes]
    return [json.loads(text) for text in told]


def tell(line: str) -> None:
    print(f"  [{time.strftime('%H:%M:%S')}] {line}", flush=True)


if __name__ == "__main__":
    main()
