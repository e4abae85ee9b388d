"""Callbacks that file what each rank sees; workers import them from here."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from flavour import KERAS

from tests.listening import listeners

WORKER: dict[str, Any] = {"rank": None}  # what code of a model may know of the worker it runs on


class Files(KERAS.callbacks.Callback):
    """Files a line per epoch and rank, and the weights after each epoch."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    @property
    def name(self) -> str:
        return f"rank-{self.params['rank']}-of-{self.params['size']}"

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        rate = float(np.asarray(self.model.optimizer.learning_rate))
        line = {"epoch": epoch, "rate": rate, "logs": {k: float(v) for k, v in logs.items()}}
        with Path(self.folder, f"{self.name}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        np.savez(Path(self.folder, f"{self.name}-epoch-{epoch}.npz"), *self.model.get_weights())


class Listeners(KERAS.callbacks.Callback):
    """Files what the processes of the run listen on while its first epoch ends."""

    def __init__(self, root: int, path: Path) -> None:
        super().__init__()
        self.root, self.path = root, str(path)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.params["rank"] == 0:
            Path(self.path).write_text(json.dumps(listeners(self.root)))


def lines(folder: Path) -> list[list[dict[str, Any]]]:
    """For each rank, its lines."""
    return [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("rank-*.jsonl"))
    ]


def weights_after(folder: Path, epoch: int, rank: int = 0) -> list[np.ndarray]:
    (file,) = folder.glob(f"rank-{rank}-of-*-epoch-{epoch}.npz")
    return list(np.load(file).values())


class Tells(KERAS.callbacks.Callback):
    """Lets the model's own code know the rank."""

    def on_train_begin(self, logs: Any = None) -> None:
        WORKER["rank"] = self.params["rank"]


class Falls(KERAS.callbacks.Callback):
    """Fails once, on rank 1 (or the only one) after a step of an epoch: raises, or gets a signal."""

    def __init__(self, folder: Path, how: str, *, epoch: int = 1, batch: int = 2) -> None:
        super().__init__()
        self.marker, self.how, self.at = str(Path(folder, "fell")), how, (epoch, batch)
        self.now = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.now = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        last = self.params["size"] - 1
        if (self.now, batch) != self.at or self.params["rank"] != last or Path(self.marker).exists():
            return
        Path(self.marker).touch()
        if self.how == "raise":
            raise ValueError("boom")
        os.kill(os.getpid(), signal.SIGTERM if self.how == "terminate" else signal.SIGKILL)


class StopsOnRankOne(KERAS.callbacks.Callback):
    """Asks to stop in the middle of the second epoch, on one rank only."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.now = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.params["rank"] == 1 and (self.now, batch) == (1, 1):
            self.model.stop_training = True


class LocalStatistics(KERAS.callbacks.Callback):
    """Files what this rank's BatchNorm has seen, before and after the ranks agree."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def _file(self, when: str) -> None:
        layer = next(part for part in self.model.layers if "batch_norm" in part.name)
        kept = [
            np.asarray(KERAS.backend.get_value(v))
            if KERAS.__name__ == "tf_keras"
            else KERAS.ops.convert_to_numpy(v)
            for v in (layer.moving_mean, layer.moving_variance)
        ]
        np.savez(Path(self.folder, f"{when}-{self.params['rank']}.npz"), *kept)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._file("before")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._file("after")
