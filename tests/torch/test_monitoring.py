"""What a run leaves for those who watch it: event files for TensorBoard, and summaries."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Estimator
from kindler.callbacks import Callback, TensorBoard
from kindler.errors import ConfigError, MissingExtraError, NotFittedError
from tests.events import scalars

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

X = np.linspace(0, 1, 84, dtype=np.float32).reshape(42, 2)
Y = X.sum(1)


def regression(**options: Any) -> Estimator:
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    options = {"workers": 2, "metrics": "mae", **options}
    return Estimator.from_torch(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=nn.MSELoss(), **options
    )


def alone(epochs: int, batch_size: int) -> list[float]:
    """The loss of every step as plain PyTorch has it."""
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(epochs):
        for start in range(0, len(X), batch_size):
            rows = slice(start, start + batch_size)
            loss = nn.functional.mse_loss(model(torch.from_numpy(X[rows]))[:, 0], torch.from_numpy(Y[rows]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_tensorboard_shows_every_step_and_every_epoch_of_all_fits(tmp_path: Path) -> None:
    est = regression()

    for _ in range(2):
        est.fit(
            (X, Y),
            epochs=2,
            batch_size=14,
            validation_data=(X, Y),
            callbacks=[TensorBoard(tmp_path)],
            shuffle=False,
            verbose=0,
        )

    train, validation = scalars(tmp_path / "train"), scalars(tmp_path / "validation")
    ends = [3, 6, 9, 12]
    assert train["loss"] == [(s, pytest.approx(v)) for s, v in zip(ends, est.history["loss"], strict=True)]
    assert train["mae"] == [(s, pytest.approx(v)) for s, v in zip(ends, est.history["mae"], strict=True)]
    assert [step for step, _ in train["rows_per_s"]] == ends
    assert train["lr"] == [(step, pytest.approx(0.1)) for step in range(1, 13)]
    assert [step for step, _ in train["batch_loss"]] == list(range(1, 13))
    assert sorted(validation) == ["loss", "mae"]
    assert [v for _, v in validation["loss"]] == pytest.approx(est.history["val_loss"])


def test_the_loss_of_a_step_is_that_of_all_its_rows_whatever_the_workers(tmp_path: Path) -> None:
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        est = regression(workers=workers)
        est.fit((X, Y), 2, 42, callbacks=[TensorBoard(folder)], shuffle=False, verbose=0)

        assert [v for _, v in scalars(folder / "train")["batch_loss"]] == pytest.approx(
            alone(2, 42), rel=1e-5
        )


def test_summaries_are_rows_of_step_value_and_time(tmp_path: Path) -> None:
    est = regression()
    with pytest.raises(NotFittedError):
        est.get_train_summary("Loss")

    est.fit((X, Y), 2, 14, validation_data=(X, Y), callbacks=[TensorBoard(tmp_path)], verbose=0)

    assert est.get_train_summary("Loss")[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert est.get_train_summary("LearningRate")[:, 1] == pytest.approx(0.1)
    assert est.get_train_summary("loss")[:, :2].tolist() == [
        [3, pytest.approx(est.history["loss"][0])],
        [6, pytest.approx(est.history["loss"][1])],
    ]
    assert est.get_validation_summary("MAE")[:, 1].tolist() == pytest.approx(est.history["val_mae"])
    assert (np.diff(est.get_train_summary("Loss")[:, 2]) >= 0).all()


def test_without_a_folder_there_are_summaries_of_epochs() -> None:
    est = regression()
    est.fit((X, Y), epochs=2, batch_size=14, verbose=0)
    est.fit((X, Y), batch_size=14, verbose=0)

    assert est.get_train_summary("Loss")[:, 0].tolist() == [3, 6, 9]
    assert est.get_train_summary("Throughput").shape == (3, 3)
    with pytest.raises(ConfigError, match=r"'batch_loss'; available: \['loss', 'mae', 'rows_per_s'\]"):
        est.get_train_summary("batch_loss")


class Fails(Callback):
    def on_epoch_end(self, run: Any, logs: dict[str, Any]) -> None:
        if run.epoch == 2:
            raise ValueError("enough")


def test_what_came_before_an_error_is_on_disk(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enough"):
        regression().fit((X, Y), 2, 14, callbacks=[TensorBoard(tmp_path), Fails()], verbose=0)

    train = scalars(tmp_path / "train")
    assert [step for step, _ in train["loss"]] == [3]
    assert [step for step, _ in train["batch_loss"]][:3] == [1, 2, 3]


def test_a_missing_package_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)

    with pytest.raises(MissingExtraError, match=r"kindler\[tensorboard\]"):
        TensorBoard(tmp_path)


def test_a_log_file_gets_one_line_per_epoch(capfd: pytest.CaptureFixture[str]) -> None:
    regression().fit((X, Y), epochs=2, batch_size=14)

    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == ["epoch 1 of 2", "epoch 2 of 2"]
    assert all(" · loss " in line and " · mae " in line and " rows/s" in line for line in lines[:-1])
    assert lines[-1].startswith("goodput ")
