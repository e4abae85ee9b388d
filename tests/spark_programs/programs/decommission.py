"""Runs that lose machines with notice: `python decommission.py MASTER FOLDER` prints what came of them.

One run is left alone. In another a worker of Spark gets SIGPWR, on which Spark decommissions its executor,
while a third executor has nothing to do. In a third run the notice is in a file on the machine, which is that
of all executors: Spark replaces them.
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


class GivesNotice(kindler.callbacks.Callback):
    """Tells the Spark worker that this runs on to go, or writes a file; then steps are slow until heard."""

    def __init__(self, folder: Path, file: Path | None = None) -> None:
        self.folder, self.file = folder, file

    def on_step_end(self, run: Any) -> None:
        marker, attempts = self.folder / "told", self.folder / "attempts"
        if run.rank != 1 or run.step < FALL or len(attempts.read_text().split()) > 1:
            return
        if self.file is not None:
            self.file.touch()
        elif not marker.exists():
            marker.write_text(os.environ["KINDLER_TASK_GPUS"])
            os.kill(_executor().ppid(), signal.SIGPWR)
        threading.Event().wait(2.0)


def _executor() -> psutil.Process:
    parents = psutil.Process().parents()
    return next(each for each in parents if "CoarseGrainedExecutorBackend" in " ".join(each.cmdline()))


def executors(spark: Any) -> list[str]:
    """The ids of those that are there."""
    listed = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    return [str(listed.apply(number).id()) for number in range(listed.size())]


def main(master: str, work: str) -> None:
    # Executors are on 127.0.0.1 to Spark, and workers must be so to the driver.
    conf = {"spark.decommission.enabled": "true", "spark.driver.host": "127.0.0.1"}
    # As many partitions, which decide the order of rows, however many executors are there yet.
    conf["spark.default.parallelism"] = "3"
    spark = kindler.init(master, conf={**ONE_GPU_A_TASK, **conf})
    noticed, filed, file = Path(work, "noticed"), Path(work, "filed"), Path(work, "notice")
    told = {
        "alone": train(spark, Path(work, "alone")),
        "noticed": train(spark, noticed, GivesNotice(noticed)),
        "gpu": (noticed / "told").read_text(),
        "before": executors(spark),
        "filed": train(spark, filed, GivesNotice(filed, file), notice=str(file)),
        "after": executors(spark),
    }
    print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
