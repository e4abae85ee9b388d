"""Rounds and asynchronous training on executors that Spark allocates as it needs them, and that are killed.

`python elastic.py MASTER WORK_FOLDER` prints what came of the runs, as JSON.
"""

from __future__ import annotations

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
from kindler.errors import ConfigError

ROWS, FOLDERS = 80, "SPARK_EXECUTOR_DIRS"


class Kill(kindler.Callback):
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


def train(spark: Any, folder: Path, *, sync: str, kill: bool) -> dict[str, Any]:
    folder.mkdir()
    said, log = Said(), logging.getLogger("kindler.estimator.fit")
    log.addHandler(said)
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 3))
    rows = [(row.tolist(), float(row @ [1.0, -2.0, 0.5])) for row in x]
    # Not repartitioned: in which order the rows of a shuffle arrive is chance.
    frame = spark.createDataFrame(rows, "x array<float>, y float")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    est = kindler.Estimator.from_torch(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05), loss=nn.MSELoss(), workers=2
    )
    history = est.fit(
        frame,
        epochs=3,
        batch_size=8,
        feature_cols="x",
        label_cols="y",
        shapes={"y": (1,)},
        callbacks=[Kill(folder)] if kill else [],
        sync=sync,
        sync_options={"every_steps": 3} if sync == "rounds" else {},
        verbose=0,
    )
    log.removeHandler(said)
    return {
        "killed": (folder / "killed").exists(),
        "loss": history["loss"],
        "rows": history["num_samples"],
        "lost": history["lost_workers"] if sync == "async" else None,
        "weights": {name: value.tolist() for name, value in est.get_model().state_dict().items()},
        "said": said.lines,
    }


def refusal(spark: Any) -> str:
    model = nn.Linear(3, 1)
    est = kindler.Estimator.from_torch(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.MSELoss(), workers=2
    )
    frame = spark.range(4).selectExpr("array(float(id), float(0), float(1)) AS x", "float(id) AS y")
    try:
        est.fit(frame, feature_cols="x", label_cols="y", verbose=0)
    except ConfigError as exc:
        return str(exc)
    return ""


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
        "refusal": refusal(spark),
        "undisturbed": train(spark, place / "undisturbed", sync="rounds", kill=False),
        "killed": train(spark, place / "killed", sync="rounds", kill=True),
        "async": train(spark, place / "async", sync="async", kill=True),
    }
    print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
