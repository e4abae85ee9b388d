"""Runs that lose workers on a cluster: `python replaced.py MASTER FOLDER KIND` prints what came of them.

Each rank is lost twice: with its executor, with the Spark task that supervises it, or alone.
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

import psutil
import torch
from torch import nn

import kindler
from tests.spark_programs.programs.elastic import Said, executor

ROWS, BATCH, EPOCHS = 50, 8, 3
DEATHS = {3: (0, "executor"), 6: (1, "executor"), 12: (0, "task"), 17: (1, "worker")}


class Shaky(nn.Module):
    """Its every step depends on randomness and on what its buffers have seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.seen: list[int] = []

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += ids.tolist()
        return self.layers(x)


class Dies(kindler.callbacks.Callback):
    """Notes the processes and the steps of each rank, which is lost after some of them."""

    def __init__(self, folder: Path, deaths: dict[int, tuple[int, str]]) -> None:
        self.folder, self.deaths = str(folder), deaths

    def on_run_begin(self, run: Any) -> None:
        self._note(run, "processes", os.getpid())

    def on_step_end(self, run: Any) -> None:
        self._note(run, "steps", [run.step, run.model.seen])
        run.model.seen = []
        rank, what = self.deaths.get(run.step, (None, ""))
        if rank == run.rank:
            for process in getattr(self, what)():
                process.send_signal(signal.SIGKILL)
            threading.Event().wait()  # until this process is ended, too

    def _note(self, run: Any, what: str, value: Any) -> None:
        with Path(self.folder, f"{what}-{run.rank}").open("a") as file:
            file.write(json.dumps(value) + "\n")

    def executor(self) -> list[psutil.Process]:
        return [executor()]

    def worker(self) -> list[psutil.Process]:
        return [psutil.Process()]

    def task(self) -> list[psutil.Process]:
        """Spark's Python processes of this executor."""
        children = executor().children()
        daemons = [process for process in children if "pyspark.daemon" in process.cmdline()]
        return [task for one in daemons for task in one.children() if task.cmdline() == one.cmdline()]


def train(folder: Path, data: Any, deaths: dict[int, tuple[int, str]]) -> dict[str, Any]:
    folder.mkdir()
    said, log = Said(), logging.getLogger("kindler.estimator.run")
    log.addHandler(said)
    model = Shaky()
    est = kindler.Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=nn.MSELoss(),
        workers=2,
        settings=kindler.RunSettings(max_failures=len(DEATHS)),
    )
    history = est.fit(
        data,
        epochs=EPOCHS,
        batch_size=BATCH,
        feature_cols=["id", "x"],
        label_cols="y",
        callbacks=[Dies(folder, deaths)],
        verbose=0,
    )
    log.removeHandler(said)
    return {
        "loss": history["loss"],
        "weights": {name: value.tolist() for name, value in est.get_model().state_dict().items()},
        "processes": [noted(folder, f"processes-{rank}") for rank in (0, 1)],
        "steps": [noted(folder, f"steps-{rank}") for rank in (0, 1)],
        "said": said.lines,
    }


def noted(folder: Path, name: str) -> list[Any]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def main(master: str, work: str, kind: str) -> None:
    spark = kindler.init(master, conf={"spark.sql.shuffle.partitions": "2"})
    place = Path(work)
    rows = [(i, [i / ROWS, (i * 7 % 11) / 11], (i % 5) / 5) for i in range(ROWS)]
    frame = spark.createDataFrame(rows, "id long, x array<float>, y float")
    if kind == "files":
        frame.write.parquet(str(place / "rows"))
        frame = spark.read.parquet(str(place / "rows"))
    told = {
        "alone": train(place / "alone", frame, {}),
        "disturbed": train(place / "disturbed", frame, DEATHS),
    }
    print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
