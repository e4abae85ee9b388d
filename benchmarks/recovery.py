"""How long does a run stand still when a worker is lost, with notice and without?

Two local workers, a checkpoint every 10 steps; one worker sends itself a signal in the second epoch.
From then to the end of the next step that counts: noticing it, ending the other worker, the pause before the
retry after a loss, new processes, opening the data, loading the checkpoint, one step.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from _bench import CLASSES, WIDTH, Report, arguments, rounds, workplace

from kindler.callbacks import Callback

ROWS, BATCH = 8_192, 256

_witness = False


def main() -> None:
    given = arguments(__doc__, repeats=3)
    report = Report("recovery", "seconds from a signal to the next step in new workers", quick=given.quick)
    with workplace() as folder:
        measured = rounds(
            {
                "torch": lambda: lost(folder, on_torch),
                "torch, SIGTERM": lambda: lost(folder, on_torch, signal.SIGTERM),
                "keras on tensorflow": lambda: lost(folder, on_keras),
            },
            repeats=given.repeats,
            warm_up=False,
        )
    for name, values in measured.items():
        report.figure(name, values, "s")
    report.finish(rows=ROWS, batch_size=BATCH)


def lost(folder: Path, make: Any, number: int = signal.SIGKILL) -> float:
    """Seconds between the two marks that the workers leave."""
    import numpy as np

    from kindler import Checkpoints, RunSettings

    place = folder / f"run-{time.monotonic_ns()}"
    place.mkdir()
    (place / "signal").write_text(str(number))
    random = np.random.default_rng(0)
    data = {"x": random.random((ROWS, WIDTH), np.float32), "y": random.integers(0, CLASSES, ROWS)}
    options = {
        "workers": 2,
        "engine": "local",
        "settings": RunSettings(threads=1),
    }
    estimator, callback = make(str(place), options)
    estimator.fit(
        data,
        epochs=2,
        batch_size=BATCH,
        callbacks=[callback],
        checkpoint=Checkpoints(place / "checkpoints", every=10),
        verbose=0,
    )
    return float((place / "again").read_text()) - float((place / "killed").read_text())


def mark(folder: str, rank: int, epoch: int, step: int) -> None:
    """After a step: rank 1 gets its signal once, in epoch 2; the new rank 0's first step leaves its time."""
    global _witness
    killed, again = Path(folder, "killed"), Path(folder, "again")
    if not killed.exists():
        _witness = True  # this process was there before, and what it still does does not count
        if rank == 1 and epoch == 2 and step >= 15:
            killed.write_text(repr(time.time()))
            os.kill(os.getpid(), int(Path(folder, "signal").read_text()))
    elif rank == 0 and not _witness and not again.exists():
        again.write_text(repr(time.time()))


class Dies(Callback):
    """Marks steps of a torch model."""

    def __init__(self, folder: str) -> None:
        self.folder, self.first = folder, 0

    def on_epoch_begin(self, run: Any) -> None:
        self.first = run.step

    def on_step_end(self, run: Any) -> None:
        mark(self.folder, run.rank, run.epoch, run.step - self.first)


def on_torch(folder: str, options: dict[str, Any]) -> Any:
    import torch
    from _bench import mlp

    from kindler import Estimator

    model = mlp()
    adam = torch.optim.Adam(model.parameters())
    loss = torch.nn.CrossEntropyLoss()
    return Estimator.from_torch(model=model, optimizer=adam, loss=loss, **options), Dies(folder)


def on_keras(folder: str, options: dict[str, Any]) -> Any:
    os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="2")
    import keras

    from kindler import Estimator

    class KerasDies(keras.callbacks.Callback):
        def __init__(self, folder: str) -> None:
            super().__init__()
            self.folder = folder

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch + 1

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            mark(self.folder, self.params["rank"], self.epoch, batch + 1)

    return Estimator.from_keras(model=keras_mlp, **options), KerasDies(folder)


def keras_mlp(config: Any) -> Any:
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            layers.Input((WIDTH,)),
            layers.Dense(256, activation="relu"),
            layers.Dense(256, activation="relu"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


if __name__ == "__main__":
    main()
