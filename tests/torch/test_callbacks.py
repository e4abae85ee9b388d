"""The callbacks that come with Kindler, on real workers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator, RunSettings
from kindler.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from kindler.errors import ConfigError

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

X = np.linspace(0, 1, 64, dtype=np.float32).reshape(32, 2)
Y = X.sum(1)
# The better the model fits the data, the worse it does here: the first epoch is the best one.
WORSE = (X, -Y)


def regression(**options: Any) -> Estimator:
    def model(config: dict[str, Any]) -> nn.Module:
        made = nn.Linear(2, 1)
        nn.init.zeros_(made.weight)
        nn.init.zeros_(made.bias)
        return made

    def optimizer(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1)

    options = {"workers": 2, **options}
    return Estimator.from_torch(model=model, optimizer=optimizer, loss=nn.MSELoss(), **options)


class Noted(Callback):
    """Writes down which hooks were called, on every rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.calls: list[Any] = []

    def on_run_begin(self, run: Any) -> None:
        self.calls.append(["run_begin", run.rank, run.size, run.steps])

    def on_epoch_begin(self, run: Any) -> None:
        self.calls.append(["epoch_begin", run.epoch])

    def on_step_begin(self, run: Any) -> None:
        self.calls.append(["step_begin", run.step])

    def on_step_end(self, run: Any) -> None:
        self.calls.append(["step_end", run.step])

    def on_validation_begin(self, run: Any) -> None:
        self.calls.append(["validation_begin"])

    def on_validation_end(self, run: Any, logs: dict[str, Any]) -> None:
        self.calls.append(["validation_end", sorted(logs)])

    def on_epoch_end(self, run: Any, logs: dict[str, Any]) -> None:
        self.calls.append(["epoch_end", run.learning_rate, "val_loss" in logs])

    def on_run_end(self, run: Any) -> None:
        self.calls.append(["run_end"])
        Path(self.folder, f"calls-{run.rank}").write_text(json.dumps(self.calls))


def test_hooks_are_called_in_order_on_every_rank(tmp_path: Path) -> None:
    regression().fit((X, Y), batch_size=16, validation_data=(X, Y), callbacks=[Noted(tmp_path)], verbose=0)

    for rank in (0, 1):
        assert json.loads((tmp_path / f"calls-{rank}").read_text()) == [
            ["run_begin", rank, 2, 2],
            ["epoch_begin", 1],
            ["step_begin", 0],
            ["step_end", 1],
            ["step_begin", 1],
            ["step_end", 2],
            ["validation_begin"],
            ["validation_end", ["val_loss", "val_num_samples"]],
            ["epoch_end", 0.1, True],
            ["run_end"],
        ]


def test_early_stopping_ends_the_run_once_its_patience_is_spent() -> None:
    history = regression().fit(
        (X, Y),
        epochs=10,
        validation_data=WORSE,
        callbacks=[EarlyStopping("val_loss", patience=2)],
        verbose=0,
    )

    assert history["epoch"] == [1, 2, 3]


def test_a_run_that_gets_better_is_not_stopped() -> None:
    history = regression().fit(
        (X, Y), epochs=4, validation_data=(X, Y), callbacks=[EarlyStopping()], verbose=0
    )

    assert len(history) == 4


def test_the_best_weights_come_back_on_every_rank(tmp_path: Path) -> None:
    class Weights(Callback):
        def on_run_end(self, run: Any) -> None:
            Path(str(tmp_path), str(run.rank)).write_text(str(run.model.weight.tolist()))

    stopping = EarlyStopping(patience=3, restore_best_weights=True)
    best, est = regression(), regression()
    best.fit((X, Y), epochs=1, batch_size=8, verbose=0)
    est.fit((X, Y), epochs=9, batch_size=8, validation_data=WORSE, callbacks=[stopping, Weights()], verbose=0)

    assert len(est.history) == 4
    assert est.get_model().weight.tolist() == best.get_model().weight.tolist()
    told = [(tmp_path / str(rank)).read_text() for rank in (0, 1)]
    assert told == [str(best.get_model().weight.tolist())] * 2


def test_validation_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    callbacks = [EarlyStopping(), ModelCheckpoint(tmp_path / "a", "val_loss", save_best_only=True)]

    with pytest.raises(
        ConfigError, match=r"(?s)EarlyStopping\(monitor='val_loss'\) needs validation_data.*Model"
    ):
        regression().fit((X, Y), callbacks=callbacks)


def test_a_figure_that_is_not_there_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"monitor='val_auc'.*'val_loss'"):
        regression().fit((X, Y), validation_data=(X, Y), callbacks=[EarlyStopping("val_auc")], verbose=0)


def test_a_checkpoint_after_each_epoch_can_be_gone_on_from(tmp_path: Path) -> None:
    whole, part, rest = regression(), regression(), regression()
    whole.fit((X, Y), epochs=3, batch_size=8, verbose=0)
    callback = ModelCheckpoint(tmp_path / "{epoch:02d}-{loss:.3f}.ckpt")
    part.fit((X, Y), epochs=2, batch_size=8, callbacks=[callback], verbose=0)

    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"{row['epoch']:02d}-{row['loss']:.3f}.ckpt" for row in part.history]
    rest.load_checkpoint(tmp_path / files[-1])
    rest.fit((X, Y), epochs=1, batch_size=8, verbose=0)
    assert rest.get_model().weight.tolist() == whole.get_model().weight.tolist()
    assert rest.history["epoch"] == [3]


def test_only_the_best_epochs_weights_are_kept_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "best.pt"
    best, est = regression(), regression()
    best.fit((X, Y), epochs=1, batch_size=8, verbose=0)
    callback = ModelCheckpoint(path, monitor="val_loss", save_best_only=True, save_weights_only=True)
    est.fit((X, Y), epochs=3, batch_size=8, validation_data=WORSE, callbacks=[callback], verbose=0)

    assert torch.load(path)["weight"].tolist() == best.get_model().weight.tolist()
    assert regression().load_weights(path).get_model().weight.tolist() == best.get_model().weight.tolist()
    assert [p.name for p in path.parent.iterdir()] == ["best.pt"]


def test_the_learning_rate_of_each_epoch_is_in_the_history() -> None:
    est = regression(scheduler=lambda opt, config: torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5))

    history = est.fit((X, Y), epochs=3, callbacks=[LearningRateMonitor()], verbose=0)

    assert history["lr"] == pytest.approx([0.1, 0.05, 0.025])


def test_early_stopping_remembers_over_a_resume() -> None:
    first, second = EarlyStopping(patience=5), EarlyStopping(patience=5)
    first.best, first.best_epoch, first.wait = 0.25, 3, 2

    second.load_state_dict(json.loads(json.dumps(first.state_dict())))

    assert (second.best, second.best_epoch, second.wait) == (0.25, 3, 2)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: EarlyStopping("val_gain"), "val_gain"),
        (lambda: EarlyStopping(mode="up"), "up"),  # type: ignore[arg-type]
        (lambda: EarlyStopping(patience=-1), "patience"),
        (lambda: ModelCheckpoint("a.pt", save_best_only=True), "save_best_only"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(make: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


def test_nan_counts_as_no_better(tmp_path: Path) -> None:
    stopping = EarlyStopping("loss", patience=2)
    data = (np.full_like(X, math.inf), Y)

    with pytest.warns(RuntimeWarning, match="the loss is nan"):
        history = regression(settings=RunSettings(nan_loss="warn")).fit(
            data, epochs=9, callbacks=[stopping], columns=Columns(allow_nan=True), verbose=0
        )

    assert len(history) == 2
