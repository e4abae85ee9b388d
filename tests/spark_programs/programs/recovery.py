"""Runs that lose executors: `python recovery.py MASTER WORK_FOLDER` prints what came of them, as JSON.

One run is left alone. From another an executor is killed, which the cluster replaces; from a third the
executor together with the Spark worker that would replace it, and later a new Spark worker joins the cluster.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kindler
from kindler import cluster
from tests.spark_programs.cluster import ONE_GPU_A_TASK, worker
from tests.spark_programs.programs.elastic import executor

ROWS, BATCH, EPOCHS, STEPS, FALL, KEPT = 50, 8, 3, 7, 12, 9


class Shaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.seen: list[int] = []

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += ids.tolist()
        return self.layers(x)


class Note(kindler.callbacks.Callback):
    """Writes down which rows each rank has had, and how many ranks there were."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_run_begin(self, run: Any) -> None:
        if run.rank == 0:
            with Path(self.folder, "attempts").open("a") as file:
                file.write(f"{run.size}\n")

    def on_step_end(self, run: Any) -> None:
        with Path(self.folder, f"rank-{run.rank}.jsonl").open("a") as file:
            gpus = [os.environ.get(name) for name in ("KINDLER_TASK_GPUS", "CUDA_VISIBLE_DEVICES")]
            noted = {
                "gpus": gpus,
                "size": run.size,
                "epoch": run.epoch,
                "step": run.step,
                "ids": run.model.seen,
            }
            file.write(json.dumps(noted) + "\n")
        run.model.seen = []


class Await(kindler.callbacks.Callback):
    """A rank that is alone ends its epoch when the cluster has room for two again, and makes no other."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_step_end(self, run: Any) -> None:
        if run.size == 1:
            Path(self.folder, "alone").touch()
            await_file(Path(self.folder, "back"))
            if run.epoch == EPOCHS:
                threading.Event().wait(60)  # it is ended before that


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


class Kill(kindler.callbacks.Callback):
    """Once, when the checkpoint of step 9 is there, ends the executor of the second worker."""

    def __init__(self, folder: Path, *, worker_too: bool) -> None:
        self.folder, self.worker_too = str(folder), worker_too

    def on_step_end(self, run: Any) -> None:
        marker = Path(self.folder, "killed")
        if run.rank != 1 or run.step != FALL or marker.exists():
            return
        marker.touch()
        deadline = time.monotonic() + 60
        while not list(Path(self.folder, "run").glob(f"*-step-{KEPT:09d}.kindler")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        own = executor()
        if self.worker_too:
            os.kill(own.ppid(), signal.SIGKILL)
        os.kill(own.pid, signal.SIGKILL)
        threading.Event().wait()


def train(
    spark: Any, folder: Path, *callbacks: kindler.callbacks.Callback, wait_s: float = 60.0, **settings: Any
) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    said = Said()
    logging.getLogger("kindler.estimator.run").addHandler(said)
    rows = [(i, [i / ROWS, (i * 7 % 11) / 11], (i % 5) / 5) for i in range(ROWS)]
    frame = spark.createDataFrame(rows, "id long, x array<float>, y float")
    model = Shaky()
    est = kindler.Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=nn.MSELoss(),
        workers=2,
        settings=kindler.RunSettings(
            start_timeout_s=60.0, retry_backoff_s=0.1, executor_wait_s=wait_s, **settings
        ),
    )
    history = est.fit(
        frame,
        epochs=EPOCHS,
        batch_size=BATCH,
        feature_cols=["id", "x"],
        label_cols="y",
        callbacks=[Note(folder), *callbacks],
        checkpoint=kindler.Checkpoints(folder / "run", every=3),
        verbose=0,
    )
    noted = [
        json.loads(line) for file in folder.glob("rank-*.jsonl") for line in file.read_text().splitlines()
    ]
    return {
        "attempts": [int(line) for line in (folder / "attempts").read_text().split()],
        "loss": history["loss"],
        "rows": history["num_samples"],
        "weights": {k: v.tolist() for k, v in est.get_model().state_dict().items()},
        "noted": noted,
        "said": said.lines,
    }


class Said(logging.Handler):
    """What the log says of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def executors(spark: Any) -> int:
    return int(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) - 1  # the driver is one of them


def bring_back(spark: Any, master: str, folder: Path, stack: ExitStack) -> None:
    """Start a Spark worker in place of one that was killed, and wait for its executor."""
    stack.enter_context(worker(master, folder))
    deadline = time.monotonic() + 240
    while executors(spark) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (folder / "back").touch()


def too_many(spark: Any) -> list[str]:
    """What clusters of three nodes are told, though they would wait for a day."""

    def program(args: Any, ctx: Any) -> None:
        raise AssertionError("it was started")

    told = []
    for options in ({"workers": 2, "ps": 1, "input_mode": "spark"}, {"workers": 3, "chief": False}):
        try:
            cluster.run(program, {}, spark=spark, start_timeout_s=86400, **options)
        except kindler.errors.ConfigError as exc:
            told.append(str(exc))
    return told


def main(master: str, work: str) -> None:
    spark = kindler.init(master, conf=ONE_GPU_A_TASK)
    place = Path(work)
    replaced, grown = place / "replaced", place / "grown"
    told = {
        "alone": train(spark, place / "alone"),
        "replaced": train(spark, replaced, Kill(replaced, worker_too=False)),
    }
    grown.mkdir()
    with ExitStack() as stack:

        def watch() -> None:
            await_file(grown / "alone")
            bring_back(spark, master, grown, stack)

        watching = threading.Thread(target=watch)
        watching.start()
        told["grown"] = train(spark, grown, Kill(grown, worker_too=True), Await(grown), wait_s=2.0)
        watching.join()
        told["too many"] = too_many(spark)
        print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
