"""Weights of rows and classes in steps of replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gang import GangWorker, attach, run_ranks
from torch import nn
from torch.nn import functional as F

from kindler.errors import ConfigError
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from tests.torch.test_row_weights import CLASS_WEIGHT, ROWS, STEPS, Tensor, _cross, _data, _model
from tests.unit.with_torch.rows import Array, Rows

pytestmark = pytest.mark.torch

OWN_WEIGHT = torch.tensor([0.2, 1.0, 3.5])
Reference = Callable[[Tensor, Tensor, Tensor], Tensor]


class Own(nn.Module):
    """A loss of the user's own that respects its reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        each = (outputs - targets)[:, 0].abs().pow(1.5)
        return each if self.reduction == "none" else each.mean()


def _with_argument(outputs: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
    each = (outputs - targets)[:, 0].square()
    return each if reduction == "none" else each.mean()


def _by_row(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets)[:, 0].square()


def _ignoring(outputs: Tensor, y: Tensor, w: Tensor) -> Tensor:
    kept = y != 1
    return (w * F.cross_entropy(outputs, y.long(), reduction="none") * kept).sum() / kept.sum()


def _own_weights(outputs: Tensor, y: Tensor, w: Tensor) -> Tensor:
    own = OWN_WEIGHT[y.long()]
    return (w * own * F.cross_entropy(outputs, y.long(), reduction="none")).sum() / own.sum()


def _values(outputs: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (w * (outputs[:, 0] - y).square()).sum() / len(y)


def _binary(outputs: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (w * F.binary_cross_entropy_with_logits(outputs[:, 0], y, reduction="none")).sum() / len(y)


# The loss, how many outputs and classes, and what it must compute.
LOSSES: dict[str, tuple[Callable[[], Any], int, int, Reference]] = {
    "cross-entropy": (nn.CrossEntropyLoss, 3, 3, _cross),
    "function": (lambda: F.cross_entropy, 3, 3, _cross),
    "ignored": (lambda: nn.CrossEntropyLoss(ignore_index=1), 3, 3, _ignoring),
    "weights-of-its-own": (lambda: nn.CrossEntropyLoss(weight=OWN_WEIGHT), 3, 3, _own_weights),
    "mse": (nn.MSELoss, 1, 3, _values),
    "binary": (nn.BCEWithLogitsLoss, 1, 2, _binary),
    "summed": (lambda: nn.MSELoss(reduction="sum"), 1, 3, lambda o, y, w: _values(o, y, w) * len(y)),
    "own-module": (Own, 1, 3, lambda o, y, w: (w * (o[:, 0] - y).abs().pow(1.5)).mean()),
    "own-argument": (lambda: _with_argument, 1, 3, _values),
    "own-rows": (lambda: _by_row, 1, 3, _values),
}


def _spec(name: str, accumulation_steps: int = 1) -> TorchSpec:
    make, outputs, _, _ = LOSSES[name]
    return TorchSpec(
        model=functools.partial(_model, outputs),
        optimizer=functools.partial(torch.optim.SGD, lr=0.05),
        loss=make(),
        accumulation_steps=accumulation_steps,
    )


def _train(worker: GangWorker, counts: Sequence[int]) -> dict[str, tuple[list[Array], float]]:
    found = {}
    for name in LOSSES:
        replica = TorchReplica(_spec(name, accumulation_steps=2), device="cpu", rank=worker.rank)
        replica.weigh_rows(CLASS_WEIGHT, column=True)
        sync = attach(replica, worker)
        replica.begin_epoch(1)
        start = sum(counts[: worker.rank])
        part = slice(start, start + counts[worker.rank])
        for step in range(STEPS):
            x, y, w = (array[part] for array in _data(step, LOSSES[name][2]))
            sync.step(replica, Rows((x,), (y, w), len(x), ROWS))
        loss = replica.merge_tallies(worker.all_gather(replica.take_tallies()))["loss"]
        found[name] = (replica.read(), loss)
        sync.close()
    return found


def _expected(name: str) -> tuple[list[Array], float]:
    _, outputs, classes, reference = LOSSES[name]
    model = _model(outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        x, y, w = (torch.from_numpy(array) for array in _data(step, classes))
        by_class = torch.tensor([CLASS_WEIGHT.get(int(label), 1.0) for label in y])
        loss = reference(model(x), y, w[:, 0] * by_class)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [p.detach().numpy() for p in model.parameters()], float(np.mean(losses))


@pytest.mark.parametrize(("size", "counts"), [(1, (12,)), (2, (4, 8)), (2, (12, 0))])
def test_every_kind_of_loss_is_weighed_as_by_hand(size: int, counts: Sequence[int]) -> None:
    for found in run_ranks(size, _train, counts):
        for name in LOSSES:
            weights, loss = found[name]
            wanted, mean = _expected(name)
            for array, other in zip(weights, wanted, strict=True):
                np.testing.assert_allclose(array, other, rtol=2e-5, atol=1e-6, err_msg=name)
            if name not in (
                "ignored",
                "weights-of-its-own",
                "summed",
            ):  # whose steps differ in what they divide by
                assert loss == pytest.approx(mean, rel=1e-5), name


def test_one_class_weight_needs_one_class_a_row() -> None:
    replica = TorchReplica(_spec("mse"), device="cpu")
    replica.weigh_rows({0: 2.0}, column=False)
    x = np.ones((2, 4), np.float32)
    with pytest.raises(ConfigError, match=r"class_weight needs one class per row; .* shape \(3,\)"):
        replica.train_step(Rows((x,), (np.ones((2, 3), np.float32),), 2, 2))


def test_labels_that_are_probabilities_of_classes_weigh_as_the_most_probable() -> None:
    x, y, _ = _data(0, 3)
    found = []
    for labels in (y, np.eye(3, dtype=np.float32)[y.astype(int)]):
        replica = TorchReplica(_spec("cross-entropy"), device="cpu")
        replica.weigh_rows(CLASS_WEIGHT, column=False)
        replica.train_step(Rows((x,), (labels,), ROWS, ROWS))
        found.append(replica.read()[0])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
