"""What does watching drift cost a server?

Two servers of one store, with `--drift-rows` 500 and 0, answer the same client in turn: one row of 20 columns
per request, 16 at a time. Besides the rate, the CPU seconds of the server's own process per 1,000 requests
are measured, on which other programs of the machine have less influence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _bench import Report, arguments, rounds, workplace

COLUMNS, CLIENTS = 20, 16
ROOT = Path(__file__).parent


def main() -> None:
    given = arguments(__doc__, repeats=9)
    seconds = 1.0 if given.quick else 4.0
    report = Report(
        "serve_drift", "requests of a server that compares them with training data", quick=given.quick
    )
    with workplace() as folder, ExitStack() as stack:
        body = stored(folder)
        servers = {
            name: stack.enter_context(serving(folder, rows)) for name, rows in (("with", 500), ("without", 0))
        }
        cpu: dict[str, list[float]] = {name: [] for name in servers}

        def load(name: str) -> float:
            process, port = servers[name]
            before = cpu_seconds(process.pid)
            command = [sys.executable, str(ROOT / "_serve_load.py"), "127.0.0.1", str(port), "POST"]
            target = ["/v1/models/net:predict", str(body), str(CLIENTS), str(seconds)]
            told = json.loads(subprocess.check_output([*command, *target, "content-type: application/json"]))
            assert not told["failures"], told
            cpu[name].append((cpu_seconds(process.pid) - before) / told["asked"] * 1000)
            return float(told["rate"])

        rates = rounds({name: lambda name=name: load(name) for name in servers}, repeats=given.repeats)
        for name in servers:
            report.figure(f"{name}, rate", rates[name], "requests/s")
            report.figure(f"{name}, CPU", cpu[name][-given.repeats :], "s per 1,000")
        report.ratio("rate, with / without", rates["with"], rates["without"], at_least=0.97)
        last = [cpu[name][-given.repeats :] for name in ("with", "without")]
        report.ratio("CPU, with / without", *last, at_most=1.03)
    report.finish()


def stored(folder: Path) -> Path:
    import numpy as np
    import torch

    from kindler import Columns, Estimator, Store

    draw = np.random.default_rng(0)
    names = [f"c{i}" for i in range(COLUMNS)]
    data = {name: draw.normal(size=4000).astype("float32") for name in [*names, "label"]}
    estimator = Estimator.from_torch(
        model=torch.nn.Linear(COLUMNS, 1), optimizer=torch.optim.SGD, loss=torch.nn.MSELoss(), engine="local"
    )
    columns = Columns(stack_features=True)
    estimator.fit(
        data, feature_cols=names, label_cols="label", columns=columns, validation_data=data, verbose=0
    )
    with Store(folder / "store") as store:
        store.models.put(estimator, "net")
    body = folder / "body.json"
    body.write_text(json.dumps({"instances": [draw.normal(size=COLUMNS).tolist()]}))
    return body


@contextmanager
def serving(folder: Path, rows: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "kindler.cli", "serve", "--store", str(folder / "store"), "--port", "0"]
    options = ["--drift-rows", str(rows), "--processes", "1", "--log-level", "error"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline().strip().rpartition(":")[2])
    finally:
        process.terminate()
        process.wait(60)


def cpu_seconds(pid: int) -> float:
    fields: list[Any] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
