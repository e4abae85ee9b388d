"""Every option of `fit`, for steps of the user's own and LightningModules: it has its effect or is refused.

What a run shows with an option, it must not show without: each fact is also false of a run that has none.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Checkpoints, Columns, Epochs, Estimator, RunSettings
from kindler.callbacks import Callback
from kindler.errors import ConfigError
from tests.whole import whole_only

lightning: Any = pytest.importorskip("lightning")

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("inherits_lightning", "no_workers_left")]

ROWS = 24
RANDOM = np.random.default_rng(0)
DATA: dict[str, Any] = {
    "x": np.arange(ROWS, dtype=np.float32) / ROWS,
    "y": np.arange(ROWS) % 2,
    "a": RANDOM.normal(size=(ROWS, 4)).astype(np.float32),
    "b": np.arange(ROWS, dtype=np.float32),
    "z": RANDOM.normal(size=ROWS).astype(np.float32),
    "w": np.full(ROWS, 3.0, np.float32),
}
HOLED = {**DATA, "a": np.where(np.arange(ROWS)[:, None] == 3, np.float32("nan"), DATA["a"])}


def shown(file: str, batch: Mapping[str, torch.Tensor], loss: torch.Tensor) -> None:
    """File what a step has seen."""
    told = {
        "columns": {name: [list(t.shape), str(t.dtype)] for name, t in batch.items()},
        "first": {name: float(t.reshape(len(t), -1)[0, 0]) for name, t in batch.items()},
        "loss": float(loss.detach()),
    }
    with Path(file).open("a") as lines:
        lines.write(json.dumps(told) + "\n")


def losses(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One for each row; of any columns, the last of which is the label."""
    *features, label = (t.float().reshape(len(t), -1).sum(1) for t in batch.values())
    return (model(torch.stack(features).sum(0)[:, None]).squeeze(1) - label).square()


def train_step(run: Any, batch: Any) -> torch.Tensor:
    rows = losses(run.model, batch)
    if run.sample_weight is not None:
        rows = rows * run.sample_weight
    shown(run.config["file"], batch, rows.mean())
    return rows.mean()


def eval_step(run: Any, batch: Any) -> torch.Tensor:
    return losses(run.model, batch).mean()


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.file, self.layer = config["file"], zeros()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = losses(self.layer, batch).mean()
        shown(self.file, batch, loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return losses(self.layer, batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def zeros() -> nn.Module:
    layer = nn.Linear(1, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def made(kind: str, folder: Path, settings: RunSettings | None = None) -> Estimator:
    common: dict[str, Any] = {
        "config": {"file": str(folder / "steps.jsonl")},
        "workers": 1,
        "settings": settings,
    }
    folder.mkdir(exist_ok=True)
    (folder / "steps.jsonl").write_text("")
    if kind == "lightning":
        return Estimator.from_lightning(Module, batch="dict", **common)
    return Estimator.from_torch(
        model=lambda config: zeros(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-4),
        train_step=train_step,
        eval_step=eval_step,
        **common,
    )


class Run:
    """A fit that writes checkpoints, and what can be seen of it."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        capsys: Any,
        data: Any = DATA,
        settings: RunSettings | None = None,
        **options: Any,
    ) -> None:
        capsys.readouterr()
        self.history = made(kind, folder, settings).fit(data, **{"checkpoint": folder / "run", **options})
        self.output = "".join(capsys.readouterr())
        self.steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        # The steps that have a checkpoint.
        self.kept = sorted(int(p.stem.rpartition("-")[2]) for p in (folder / "run").glob("checkpoint-*"))
        self.marked = (folder / "marked").exists()

    @property
    def columns(self) -> dict[str, Any]:
        """Shape and dtype of each column that the first step has seen."""
        found: dict[str, Any] = self.steps[0]["columns"]
        return found

    @property
    def features(self) -> list[int]:
        """The shape of the first of them."""
        shape: list[int] = next(iter(self.columns.values()))[0]
        return shape


class Marks(Callback):
    def __init__(self, folder: Path) -> None:
        self.file = str(folder / "marked")

    def on_run_end(self, run: Any) -> None:
        Path(self.file).touch()


Facts = dict[str, Callable[[Run], bool]]
FIRST: Facts = {
    "epochs": lambda run: run.history["epoch"] == [1, 2, 3, 4],
    "batch_size": lambda run: run.features[0] == 4,
    "feature_cols": lambda run: list(run.columns)[:2] == ["b", "a"],
    "label_cols": lambda run: list(run.columns)[-1] == "z",
    "shapes": lambda run: run.columns.get("a", [[]])[0][1:] == [2, 2],
    "dtypes": lambda run: run.columns.get("z", [[], ""])[1] == "torch.float64",
    "shuffle": lambda run: [step["first"].get("b") for step in run.steps[:3]] == [0.0, 4.0, 8.0],
    "steps_per_epoch": lambda run: run.history["steps"][0] == 3,
    "max_steps": lambda run: sum(run.history["steps"]) == len(run.steps) == 10,
    "validation_data": lambda run: any("val_loss" in row for row in run.history),
    "validation_freq": lambda run: ["val_loss" in row for row in run.history] == [True, False, False, False],
    "callbacks": lambda run: run.marked,
    "keep": lambda run: run.kept[-1] == 10 and not {6, 9} & {*run.kept},
    "best": lambda run: run.kept[:-1] == [3],
    "verbose": lambda run: not run.output,
}
AGAIN: Facts = {"resume": lambda run: len(run.steps) == 2 and run.history["steps"] == [3, 3, 3, 1, 2]}
SECOND: Facts = {
    "stack_features": lambda run: run.features[1:] == [5],
    "allow_nan": lambda run: any(np.isnan(step["loss"]) for step in run.steps),
    "nan_loss": lambda run: [row.get("skipped_steps") for row in run.history] == [1, 1],
    "initial_epoch": lambda run: run.history["epoch"] == [6, 7],
    "stop_when": lambda run: run.history["steps"][1:] == [1],
    "every": lambda run: run.kept == [1, 2, 3],
    "validation_split": lambda run: run.history[0].get("val_num_samples") == ROWS / 4,
}
WEIGHED: Facts = {
    "class_weight": lambda run: run.steps[0]["loss"] == pytest.approx(0.5 * 2 * 3),
    "weight_col": lambda run: run.steps[0]["loss"] == pytest.approx(0.5 * 2 * 3),
}
WEIGHTS = Columns(class_weight={1: 2.0}, weight_col="w")
SIDEWAYS: Any = "sideways"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "strategy": ({"strategy": "async"}, "updates the parameters itself"),
    # How Spark's rows come is decided before any framework.
    "ingest": ({"columns": Columns(ingest=SIDEWAYS)}, "ingest must be"),
}


def given(options: Mapping[str, Any]) -> set[str]:
    """The arguments that have a value, and of groups the fields; each run has a folder."""
    names: set[str] = set()
    for name, value in options.items():
        found = fields(value) if is_dataclass(value) else ()
        names |= {field.name for field in found if getattr(value, field.name) != field.default} or {name}
    return names - {"folder"}


@pytest.mark.parametrize("kind", ["torch_step", pytest.param("lightning", marks=whole_only)])
def test_every_option_of_fit_has_its_effect_or_is_refused(kind: str, tmp_path: Path, capsys: Any) -> None:
    first: dict[str, Any] = {
        "epochs": Epochs(4, steps_per_epoch=3, validation_freq=[1]),
        "batch_size": 4,
        "feature_cols": ["b", "a"],
        "label_cols": "z",
        "columns": Columns(shapes={"a": (2, 2)}, dtypes={"z": "float64"}),
        "shuffle": False,
        "max_steps": 10,
        "validation_data": DATA,
        "callbacks": [Marks(tmp_path / "first")],
        "checkpoint": Checkpoints(tmp_path / "first" / "run", keep=1, best="val_loss"),
        "verbose": 0,
    }
    assert given(first) == FIRST.keys()
    second: dict[str, Any] = {
        "epochs": Epochs(7, initial_epoch=5, stop_when=lambda progress: progress.step >= 3),
        "columns": Columns(stack_features=True, allow_nan=True),
        "checkpoint": Checkpoints(tmp_path / "second" / "run", every=1),
        "validation_split": 0.25,
    }
    assert given(second) - {"epochs"} == SECOND.keys() - {"nan_loss"}
    besides = {
        "feature_cols": ["b", "a"],
        "label_cols": "z",
        "batch_size": 12,
        "shuffle": False,
        "verbose": 0,
    }
    skip = RunSettings(nan_loss="skip")

    without = Run(kind, tmp_path / "without", capsys)
    holds(FIRST, Run(kind, tmp_path / "first", capsys, **first), without)
    again = {**first, "epochs": replace(first["epochs"], epochs=5), "max_steps": 12}
    holds(AGAIN, Run(kind, tmp_path / "first", capsys, **again, resume=True), without)
    with pytest.warns(RuntimeWarning, match="The step is skipped"):
        prepared = Run(kind, tmp_path / "second", capsys, HOLED, skip, **second, **besides)
    holds(SECOND, prepared, without)
    if kind == "torch_step":
        holds(WEIGHED, Run(kind, tmp_path / "weighed", capsys, columns=WEIGHTS, verbose=0), without)
    else:
        for name in WEIGHED:
            weighed = Columns(**{name: getattr(WEIGHTS, name)})
            with pytest.raises(ConfigError, match=f"{name}: a LightningModule computes"):
                made(kind, tmp_path / "refused").fit(DATA, columns=weighed)
    for options, match in REFUSED.values():
        with pytest.raises(ConfigError, match=match):
            made(kind, tmp_path / "refused").fit(DATA, **options)

    arguments = inspect.signature(Estimator.fit).parameters.keys() - {"self", "data", "columns", "checkpoint"}
    inside = {field.name for group in (Epochs, Columns, Checkpoints) for field in fields(group)} - {"folder"}
    tested = FIRST.keys() | AGAIN.keys() | SECOND.keys() | WEIGHED.keys() | REFUSED.keys()
    assert arguments | inside == tested - {"nan_loss"}


def holds(facts: Facts, run: Run, without: Run) -> None:
    for name, fact in facts.items():
        assert fact(run), (name, run.history, run.steps[:2], run.kept)
        assert not fact(without), f"{name}: so it is without the option"
