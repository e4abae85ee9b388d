"""A run that is interrupted in the middle of an epoch, and the same run left alone, to compare with.

The model has all that differs between ranks within an epoch: dropout, BatchNorm, metrics with states.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kindler import Checkpoints, Estimator, Optimization, RunSettings
from kindler.callbacks import Callback
from tests.exact import CLASSES, WIDTH, Note, await_file, problem

ROWS, BATCH, EPOCHS = 50, 8, 3
STEPS = 7  # of an epoch
FALL = 12  # the step, the fifth of epoch 2, after which something happens
KEPT = 9  # the last step before it that has a checkpoint
DATA = problem(ROWS)
AT_ONCE = RunSettings(retry_backoff_s=0.01)


class Shaky(nn.Module):
    """Its every step depends on randomness and on what its buffers have seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, CLASSES)
        )
        self.seen: list[int] = []

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += ids.tolist()
        return self.layers(x)


def decay(optimizer: Any, config: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


def shaky(model: Shaky | None = None, optimizer: Any = torch.optim.Adam, **options: Any) -> Estimator:
    import torchmetrics  # workers import this module, and what it imports in turn takes seconds

    model = model or Shaky()
    return Estimator.from_torch(
        model=model,
        optimizer=optimizer(model.parameters(), lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        metrics={"accuracy": "accuracy", "auc": torchmetrics.AUROC(task="multiclass", num_classes=CLASSES)},
        scheduler=decay,
        optimization=Optimization(scheduler_step="step"),
        **{"workers": 2, "settings": AT_ONCE, **options},
    )


def fit(est: Estimator, *callbacks: Callback, folder: Path | None = None, **options: Any) -> Any:
    """Train; with a folder, there is a checkpoint of every third step in it."""
    return est.fit(
        **{
            "data": DATA,
            "epochs": EPOCHS,
            "batch_size": BATCH,
            "feature_cols": ["id", "x"],
            "label_cols": "y",
            "validation_data": DATA,
            "callbacks": list(callbacks),
            "checkpoint": folder and Checkpoints(folder, every=3),
            "verbose": 0,
            **options,
        },
    )


class Falls(Callback):
    """Once, on one rank (None: on each), after one step, when the checkpoint before it is written, something
    happens."""

    def __init__(
        self,
        folder: Path,
        what: str,
        *,
        checkpoints: Path | None = None,
        rank: int | None = 1,
        always: bool = False,
    ) -> None:
        self.folder, self.what, self.rank, self.always = str(folder), what, rank, always
        self.checkpoints = checkpoints and str(checkpoints)
        self.driver = os.getpid()

    def on_run_begin(self, run: Any) -> None:
        if run.rank == 0:
            with Path(self.folder, "attempts").open("a") as file:
                file.write(f"{run.size}\n")

    def on_step_end(self, run: Any) -> None:
        marker = Path(self.folder, f"fell-{run.rank}")
        if (
            run.rank != (run.rank if self.rank is None else self.rank)
            or run.step != FALL
            or (marker.exists() and not self.always)
        ):
            return
        marker.touch()
        if self.checkpoints is not None:
            await_file(Path(self.checkpoints), f"checkpoint-*-step-{KEPT:09d}.kindler")
        getattr(self, self.what)()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self) -> None:
        raise ValueError("boom")

    def kill_driver(self) -> None:
        os.kill(self.driver, signal.SIGKILL)
        threading.Event().wait()  # this process ends with its driver


class Dies(Callback):
    """Each of these ranks dies once, in this hook and after this many steps; also notes who trains."""

    def __init__(self, folder: Path, *ranks: int, hook: str = "on_step_end", step: int = FALL) -> None:
        self.folder, self.ranks, self.hook, self.step = str(folder), ranks, hook, step

    def on_run_begin(self, run: Any) -> None:
        with Path(self.folder, f"processes-{run.rank}").open("a") as file:
            file.write(f"{os.getpid()}\n")
        self._now("on_run_begin", run)

    def on_epoch_begin(self, run: Any) -> None:
        self._now("on_epoch_begin", run)

    def on_step_begin(self, run: Any) -> None:
        self._now("on_step_begin", run)

    def on_step_end(self, run: Any) -> None:
        self._now("on_step_end", run)

    def on_validation_begin(self, run: Any) -> None:
        self._now("on_validation_begin", run)

    def on_epoch_end(self, run: Any, logs: dict[str, Any]) -> None:
        self._now("on_epoch_end", run)

    def on_run_end(self, run: Any) -> None:
        self._now("on_run_end", run)

    def _now(self, hook: str, run: Any) -> None:
        marker = Path(self.folder, f"died-{run.rank}")
        if hook == self.hook and run.rank in self.ranks and run.step == self.step and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def processes(folder: Path) -> list[int]:
    """How many processes each rank had."""
    return [len(set(file.read_text().split())) for file in sorted(folder.glob("processes-*"))]


def attempts(folder: Path) -> list[int]:
    """The worker count of each attempt."""
    return [int(line) for line in (folder / "attempts").read_text().split()]


def times_trained(folder: Path) -> dict[int, int]:
    """Step -> how often a rank has made it, at most."""
    most: Counter[int] = Counter()
    for file in folder.glob("rank-*.jsonl"):
        made = Counter(json.loads(line)["step"] for line in file.read_text().splitlines())
        for step, count in made.items():
            most[step] = max(most[step], count)
    return dict(most)


def figures(history: Any) -> list[dict[str, Any]]:
    """The history without what a clock decides."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "rows_per_s")} for row in history]


def weights(est: Estimator) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in est.get_model().state_dict().items()}


def assert_same(est: Estimator, expected: dict[str, np.ndarray]) -> None:
    found = weights(est)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def notes(folder: Path) -> Note:
    folder.mkdir(exist_ok=True)
    return Note(folder)
