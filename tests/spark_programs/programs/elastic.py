"""Training on executors that Spark allocates as it needs them, and that are killed.

`python elastic.py MASTER WORK_FOLDER` prints what came of the runs, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

import kindler
from kindler import Columns, cli
from kindler.strategies import LocalSGD

ROWS, FOLDERS = 80, "SPARK_EXECUTOR_DIRS"


class Kill(kindler.callbacks.Callback):
    """Once, in the second epoch, ends the executor of the second worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_step_end(self, run: Any) -> None:
        marker = Path(self.folder, "killed")
        if run.rank == 1 and run.epoch == 2 and not marker.exists():
            marker.touch()
            os.kill(executor().pid, signal.SIGKILL)
            threading.Event().wait()  # until this process is ended, too


def executor() -> psutil.Process:
    """The executor whose task this process works for: what it inherits is said in its environment."""
    for process in psutil.process_iter(["cmdline"]):
        runs = "org.apache.spark.executor.CoarseGrainedExecutorBackend" in (process.info["cmdline"] or [])
        if runs and process.environ().get(FOLDERS) == os.environ[FOLDERS]:
            return process
    raise LookupError(os.environ[FOLDERS])


class Said(logging.Handler):
    """What the log says of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(spark: Any, folder: Path, *, strategy: str, kill: bool) -> dict[str, Any]:
    folder.mkdir()
    said, log = Said(), logging.getLogger("kindler.estimator.run")
    log.addHandler(said)
    pairs = [(row.tolist(), float(label)) for row, label in zip(*rows(), strict=True)]
    # Not repartitioned: in which order the rows of a shuffle arrive is chance.
    frame = spark.createDataFrame(pairs, "x array<float>, y float")
    model = network(strategy)
    est = kindler.Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loss=nn.MSELoss(),
        workers=2,
    )
    history = est.fit(
        frame,
        epochs=3,
        batch_size=ROWS if strategy == "allreduce" else 8,
        feature_cols="x",
        label_cols="y",
        columns=Columns(shapes={"y": (1,)}),
        callbacks=[Kill(folder)] if kill else [],
        strategy=LocalSGD(every_steps=3) if strategy == "local_sgd" else strategy,
        checkpoint=str(folder / "checkpoints") if strategy == "allreduce" else None,
        verbose=0,
    )
    log.removeHandler(said)
    return {
        "killed": (folder / "killed").exists(),
        "loss": history["loss"],
        "rows": history["num_samples"],
        "lost": history["lost_workers"] if strategy == "async" else None,
        "weights": {name: value.tolist() for name, value in est.get_model().state_dict().items()},
        "said": said.lines,
    }


def network(strategy: str) -> nn.Sequential:
    """Without dropout for steps that one process can repeat."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 8), nn.Dropout(0.0 if strategy == "allreduce" else 0.1), nn.Linear(8, 1)
    )


def rows() -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    return x, (x @ [1.0, -2.0, 0.5]).astype(np.float32)


def one_process() -> list[list[float]]:
    """The first weights after three steps of all rows, without Kindler."""
    model = network("allreduce")
    adam, (x, y) = torch.optim.Adam(model.parameters(), lr=0.05), rows()
    for _ in range(3):
        adam.zero_grad()
        nn.functional.mse_loss(model(torch.tensor(x)), torch.tensor(y)[:, None]).backward()
        adam.step()
    found: list[list[float]] = model[0].weight.tolist()
    return found


def executors(spark: Any) -> int:
    return int(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) - 1  # the driver is one of them


def checked(master: str) -> list[dict[str, str]]:
    """What `kindler doctor --master` says of the cluster; it ends the session."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cli.main(["doctor", "--master", master, "--json"])
    return [check for check in json.loads(printed.getvalue()) if check["where"] != "here"]


def main(master: str, work: str) -> None:
    settings = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.maxExecutors": "2",
        "spark.dynamicAllocation.initialExecutors": "0",
        "spark.executor.cores": "1",
        "spark.sql.shuffle.partitions": "2",
    }
    spark = kindler.init(master, conf=settings)
    place = Path(work)
    told = {
        "executors at first": executors(spark),
        "one process": one_process(),
        "allreduce": train(spark, place / "allreduce", strategy="allreduce", kill=False),
        "allreduce killed": train(spark, place / "allreduce-killed", strategy="allreduce", kill=True),
        "undisturbed": train(spark, place / "undisturbed", strategy="local_sgd", kill=False),
        "killed": train(spark, place / "killed", strategy="local_sgd", kill=True),
        "async": train(spark, place / "async", strategy="async", kill=True),
    }
    told["checked"] = checked(master)
    print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
