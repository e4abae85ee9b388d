"""Weights of rows against a loss that is written by hand: the sum of weighted losses, divided by the rows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kindler import Columns, Estimator
from kindler.errors import ConfigError
from tests.unit.with_torch.rows import Array

pytestmark = pytest.mark.torch

STEPS, ROWS = 3, 12
CLASS_WEIGHT = {0: 0.5, 2: 3.0}  # the others weigh 1
Tensor = torch.Tensor


def _cross(outputs: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (w * F.cross_entropy(outputs, y.long(), reduction="none")).sum() / len(y)


def _data(step: int, classes: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(step)
    labels = rng.integers(0, classes, ROWS).astype(np.float32)
    return (
        rng.normal(size=(ROWS, 4)).astype(np.float32),
        labels,
        rng.uniform(0, 2, (ROWS, 1)).astype(np.float32),
    )


def _model(outputs: int) -> nn.Module:
    torch.manual_seed(outputs)
    return nn.Linear(4, outputs)


def _estimator(workers: int, **options: Any) -> Estimator:
    return Estimator.from_torch(
        model=functools.partial(_model, 3),
        optimizer=functools.partial(torch.optim.SGD, lr=0.05),
        **{"loss": nn.CrossEntropyLoss(), **options},
        workers=workers,
        engine="local",
    )


def test_fit_weighs_classes_in_training_and_the_column_in_validation_too() -> None:
    x, y, w = _data(0, 3)
    data = {"x": x, "y": y.astype(np.int64), "w": w[:, 0]}
    rows = {}
    for workers in (1, 2):
        estimator = _estimator(workers)
        history = estimator.fit(
            data,
            batch_size=ROWS,
            columns=Columns(class_weight=CLASS_WEIGHT, weight_col="w"),
            validation_data=data,
            verbose=0,
        )
        rows[workers] = history[0]
    with torch.no_grad():
        first = _model(3)(torch.from_numpy(x))
        by_class = torch.tensor([CLASS_WEIGHT.get(int(label), 1.0) for label in y])
        loss = _cross(first, torch.from_numpy(y), torch.from_numpy(w[:, 0]) * by_class)
        trained = estimator.get_model()(torch.from_numpy(x))
        judged = _cross(trained, torch.from_numpy(y), torch.from_numpy(w[:, 0]))
    assert rows[1]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert rows[1]["val_loss"] == pytest.approx(judged.item(), rel=1e-5)
    assert rows[2]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-6)
    assert rows[2]["val_loss"] == pytest.approx(rows[1]["val_loss"], rel=1e-6)


def _one_number(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square().mean()


def test_what_cannot_be_weighed_is_refused_with_the_reason() -> None:
    x, y, _ = _data(0, 3)
    with pytest.raises(ConfigError, match=r"class_weight: the loss AdaptiveLogSoftmax.* has no reduction"):
        _estimator(1, loss=nn.AdaptiveLogSoftmaxWithLoss(4, 3, [2])).fit(
            (x, y), columns=Columns(class_weight={0: 2.0})
        )
    with pytest.raises(ConfigError, match=r"finite weights of at least 0; received 1: nan"):
        _estimator(1).fit((x, y), columns=Columns(class_weight={1: float("nan")}))
    with pytest.raises(ConfigError, match=r"finite weights of at least 0; received 'cat': 2"):
        _estimator(1).fit((x, y), columns=Columns(class_weight={"cat": 2}))
    with pytest.raises(ConfigError, match=r"class_weight must be a dict .* received 'balanced'"):
        _estimator(1).fit((x, y), columns=Columns(class_weight="balanced"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"class_weight needs one label column; received \['a', 'b'\]"):
        _estimator(1).fit(
            {"x": x, "a": y, "b": y}, label_cols=["a", "b"], columns=Columns(class_weight={0: 2.0})
        )
    with pytest.raises(
        ConfigError, match=r"(?s)_one_number\(\) returned a single number for 12 rows.*reduction"
    ):
        _estimator(1, loss=_one_number).fit((x, y), columns=Columns(class_weight={0: 2.0}), verbose=0)
