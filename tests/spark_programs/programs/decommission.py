"""A run that loses a Spark worker with notice: `python decommission.py MASTER FOLDER` prints how it ends.

One run is left alone. In another a worker of Spark gets SIGPWR, on which Spark decommissions its executor,
while a third executor has nothing to do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

import kindler
from tests.spark_programs.cluster import ONE_GPU_A_TASK
from tests.spark_programs.programs.recovery import FALL, train


class Decommission(kindler.callbacks.Callback):
    """Tells the Spark worker that this runs on to go, and makes slow steps until the run has heard of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_step_end(self, run: Any) -> None:
        marker, attempts = Path(self.folder, "told"), Path(self.folder, "attempts")
        if run.rank != 1 or run.step < FALL or len(attempts.read_text().split()) > 1:
            return
        if not marker.exists():
            marker.write_text(os.environ["KINDLER_TASK_GPUS"])
            os.kill(_executor().ppid(), signal.SIGPWR)
        threading.Event().wait(2.0)


def _executor() -> psutil.Process:
    parents = psutil.Process().parents()
    return next(each for each in parents if "CoarseGrainedExecutorBackend" in " ".join(each.cmdline()))


def main(master: str, work: str) -> None:
    spark = kindler.init(master, conf={**ONE_GPU_A_TASK, "spark.decommission.enabled": "true"})
    noticed = Path(work, "noticed")
    told = {
        "alone": train(spark, Path(work, "alone")),
        "noticed": train(spark, noticed, Decommission(noticed)),
        "gpu": (noticed / "told").read_text(),
    }
    print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
