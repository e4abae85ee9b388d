"""A Spark task that gets SIGTERM gives its run notice, which goes on in other tasks and repeats no step."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator, RunSettings
from kindler.callbacks import Callback

pytestmark = [pytest.mark.torch, pytest.mark.spark]

STEPS, FALL = 12, 4


class TerminatesTasks(Callback):
    """Sends SIGTERM to all tasks that have workers of a driver; then steps are slow until that is heard."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.driver = folder, os.getpid()

    def on_run_begin(self, run: Any) -> None:
        if run.rank == 0:
            with Path(self.folder, "attempts").open("a") as file:
                file.write(f"{run.size}\n")

    def on_step_end(self, run: Any) -> None:
        with Path(self.folder, f"steps-{run.rank}").open("a") as file:
            file.write(f"{run.step}\n")
        if run.rank != 0 or run.step < FALL or len(Path(self.folder, "attempts").read_text().split()) > 1:
            return
        for task in self._tasks() if run.step == FALL else ():
            task.send_signal(signal.SIGTERM)
        threading.Event().wait(1.0)

    def _tasks(self) -> list[psutil.Process]:
        driver = psutil.Process(self.driver)
        ports = {link.laddr.port for link in driver.net_connections("tcp")}
        return [
            process
            for process in driver.children(recursive=True)
            if process.name().startswith("python")  # and not Java
            and any(link.raddr and link.raddr.port in ports for link in process.net_connections("tcp"))
        ]


def trained(frame: Any, *callbacks: Callback) -> Estimator:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    estimator = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.MSELoss(),
        workers=2,
        settings=RunSettings(max_failures=0),
    )
    columns = Columns(stack_features=True)
    estimator.fit(frame, 1, 4, "x", "y", callbacks=list(callbacks), columns=columns, verbose=0)
    return estimator


def test_a_run_whose_tasks_get_sigterm_goes_on_in_others(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = spark.range(4 * STEPS).selectExpr("cast(id % 7 as float) as x", "cast(id % 5 as float) as y")
    alone = trained(rows)

    estimator = trained(rows, TerminatesTasks(tmp_path))

    assert (tmp_path / "attempts").read_text().split() == ["2", "2"]
    for rank in (0, 1):
        steps = (tmp_path / f"steps-{rank}").read_text().split()
        assert steps == [str(step) for step in range(1, STEPS + 1)]
    assert estimator.history["loss"] == alone.history["loss"]
    for one, other in zip(alone.get_model().parameters(), estimator.get_model().parameters(), strict=True):
        np.testing.assert_array_equal(one.detach().numpy(), other.detach().numpy())
    assert "was given notice (SIGTERM): the run was saved after step" in caplog.text
