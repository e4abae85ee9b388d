"""A small classification problem on which a gang's every step can be checked against a single process.

The model notes which rows it sees; a callback files them by rank and step; the reference then trains
one plain torch model on the union of all ranks' rows, step by step.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kindler import Estimator
from kindler.callbacks import Callback

CLASSES = 3
WIDTH = 4


def problem(rows: int) -> dict[str, np.ndarray]:
    """Rows with an id, features and a label that depends on them."""
    random = np.random.default_rng(7)
    x = random.normal(size=(rows, WIDTH)).astype(np.float32)
    noise = random.normal(scale=0.3, size=(rows, CLASSES))
    y = (x @ random.normal(size=(WIDTH, CLASSES)) + noise).argmax(1)
    y[:CLASSES] = np.arange(CLASSES)[: len(y)]  # every class is there, or AUC has no value
    return {"id": np.arange(rows), "x": x, "y": y}


class Noted(nn.Module):
    """A classifier that remembers the ids of the rows it was called with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.seen: list[int] = []

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += ids.tolist()
        return self.layers(x)


class Note(Callback):
    """Writes each rank's rows of each step into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_step_end(self, run: Any) -> None:
        with Path(self.folder, f"rank-{run.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"epoch": run.epoch, "step": run.step, "ids": run.model.seen}) + "\n")
        run.model.seen = []


def metrics() -> dict[str, Any]:
    import torchmetrics  # not above: workers import this module, and seldom need what it imports in turn

    return {
        "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES),
        "auc": torchmetrics.AUROC(task="multiclass", num_classes=CLASSES),
        "f1": torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average="macro"),
    }


def estimator(**options: Any) -> Estimator:
    model = Noted()
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        metrics=metrics(),
        **options,
    )


def await_file(folder: Path, pattern: str, timeout_s: float = 60) -> None:
    """Until a file of that name is there; nothing else says that it was written."""
    deadline = time.monotonic() + timeout_s
    while not list(folder.glob(pattern)):
        assert time.monotonic() < deadline, f"no {pattern} in {folder}"
        time.sleep(0.01)


def steps(folder: Path) -> dict[tuple[int, int], list[int]]:
    """(epoch, step) -> the ids that all ranks together were given."""
    union: dict[tuple[int, int], list[int]] = defaultdict(list)
    for file in sorted(folder.glob("rank-*.jsonl")):
        for line in file.read_text().splitlines():
            noted = json.loads(line)
            union[noted["epoch"], noted["step"]] += noted["ids"]
    return dict(sorted(union.items()))


def assert_each_row_once_per_epoch(folder: Path, rows: int, epochs: int) -> None:
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for (epoch, _), ids in steps(folder).items():
        counts[epoch].update(ids)
    assert {e: dict(c) for e, c in counts.items()} == {
        e: dict.fromkeys(range(rows), 1) for e in range(1, epochs + 1)
    }


def reference(folder: Path, data: dict[str, np.ndarray]) -> nn.Module:
    """A plain loop over the same global batches."""
    model = Noted()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
    for ids in steps(folder).values():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.layers(x[ids]), y[ids]).backward()
        optimizer.step()
    return model


def assert_same_weights(trained: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, ours), theirs in zip(trained.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=tolerance), (name, ours, theirs)


def single_process_figures(model: nn.Module, data: dict[str, np.ndarray]) -> dict[str, float]:
    """Loss and metrics of all rows at once."""
    x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
    with torch.no_grad():
        outputs = model.eval().layers(x)  # type: ignore[operator, union-attr]
    figures = {name: float(metric(outputs, y)) for name, metric in metrics().items()}
    return {"loss": float(nn.functional.cross_entropy(outputs, y)), **figures, "num_samples": len(y)}


COLUMNS = {"feature_cols": ["id", "x"], "label_cols": "y"}


def weights(est: Estimator) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in est.get_model().parameters()]


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def assert_one_two_and_three_workers_train_alike(
    data: Any, rows: int, folder: Path, *, shuffle: bool, **options: Any
) -> None:
    """The same batches, in their order the rows' own without shuffling, and the same weights."""
    trained = []
    for workers in (1, 2, 3):
        notes = folder / str(workers)
        notes.mkdir()
        est = estimator(workers=workers, seed=4)
        callbacks = [Note(notes)]
        est.fit(
            data,
            epochs=2,
            batch_size=20,
            shuffle=shuffle,
            callbacks=callbacks,
            verbose=0,
            **COLUMNS,
            **options,
        )
        trained.append((weights(est), {step: sorted(ids) for step, ids in steps(notes).items()}))

    assert_close(trained[1][0], trained[0][0])
    assert_close(trained[2][0], trained[0][0])
    assert trained[0][1] == trained[1][1] == trained[2][1]
    if not shuffle:
        ids = [i for (epoch, _), batch in trained[0][1].items() if epoch == 1 for i in batch]
        assert ids == list(range(rows)), "consecutive rows"


class Breaks(Callback):
    """Raises after a step, once the checkpoint of an earlier one is written."""

    def __init__(self, step: int, folder: Path, kept: int) -> None:
        self.step, self.folder, self.kept = step, str(folder), kept

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step and run.rank == 1:
            await_file(Path(self.folder), f"checkpoint-*-step-{self.kept:09d}.kindler")
            raise RuntimeError("the power is gone")


def clusters(rows: int, order: str) -> dict[str, np.ndarray]:
    """Three classes around centres of their own, sorted by class or in turns."""
    random = np.random.default_rng(5)
    y = np.sort(np.arange(rows) % 3) if order == "sorted" else np.arange(rows) % 3
    x = random.normal(size=(3, 6))[y] * 1.2 + random.normal(size=(rows, 6))
    return {"x": x.astype(np.float32), "y": y}


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def accuracy(data: Any, validation: Any, workers: int, **options: Any) -> tuple[float, nn.Module]:
    """Of a model with BatchNorm on validation rows, and the model."""
    est = Estimator.from_torch(
        model=normalised,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        workers=workers,
    )
    history = est.fit(data, epochs=3, batch_size=48, validation_data=validation, verbose=0, **options)
    return history["val_accuracy"][-1], est.get_model()
