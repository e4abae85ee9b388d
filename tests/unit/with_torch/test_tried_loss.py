"""Losses and steps of users' own are tried on the first rows, and leave nothing of it behind."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gang import GangWorker, attach, run_ranks
from torch import nn
from torch.nn import functional as F

from kindler.errors import ConfigError
from kindler.frameworks.torch.loss import LossRule
from kindler.frameworks.torch.losses import LossList
from kindler.frameworks.torch.spec import StepSpec
from kindler.frameworks.torch.step_replica import StepReplica
from kindler.frameworks.torch.trials import TriedLoss
from tests.unit.with_torch.rows import share

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
X, Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
Loss = Callable[..., torch.Tensor]


def tried(loss: Any, outputs: Any = X, rows: int = 20, labels: torch.Tensor = Y, **options: Any) -> TriedLoss:
    rule = loss if isinstance(loss, LossRule) else LossRule(loss)
    trial = TriedLoss(rule, CPU, accumulates=False)
    trial(outputs, (labels,), rows, options.get("weights"))
    return trial


class Centres(nn.Module):
    """Has centres that it learns, moves some others, counts its calls, and changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.ones(3, 4))
        self.register_buffer("moving", torch.zeros(4))
        self.calls = 0

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.moving += outputs.mean(0)
        outputs.clamp_(-1, 1)
        return (outputs - self.centres[target]).square().sum(1).mean()


class Summing(nn.Module):
    reduction = "sum"

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return outputs.square().sum()


class Weighted(nn.CrossEntropyLoss):
    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return super().forward(*given)


def masked(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return outputs[target > 0].square().mean()


def with_divisor() -> Loss:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return masked(outputs, target)

    loss.loss_divisor = lambda outputs, target: int((target > 0).sum())  # type: ignore[attr-defined]
    return loss


def per_row(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, target.long(), reduction="none")


MEANS: dict[str, Callable[[], Any]] = {
    "rows": lambda: per_row,
    "mean": lambda: lambda outputs, target: per_row(outputs, target).mean(),
    "constant": lambda: lambda outputs, target: per_row(outputs, target).mean() + 7,
    "sum": Summing,
    "learns and changes": Centres,
    "random": lambda: lambda outputs, target: (outputs * torch.randn(len(outputs), 1)).mean(),
    "nan": lambda: lambda outputs, target: outputs.std() * float("nan"),
    "divisor": with_divisor,
    "partial": lambda: functools.partial(F.cross_entropy, weight=torch.tensor([1.0, 2.0, 3.0, 4.0])),
}
NO_MEANS: dict[str, Callable[[], Any]] = {
    "variance": lambda: lambda outputs, target: outputs.var(0).sum(),
    "a little variance": lambda: lambda o, t: per_row(o, t).mean() + 0.01 * o.var(0).sum(),
    "correlation": lambda: lambda outputs, target: 1 - torch.corrcoef(outputs[:, :2].T)[0, 1],
    "rows that know of others": lambda: lambda outputs, target: outputs.softmax(0).square().sum(1),
    "supervised contrast": lambda: lambda o, t: ((o @ o.T).log_softmax(1) * (t[:, None] == t)).mean(),
    "masked": lambda: masked,
    "class weights of its own": lambda: Weighted(weight=torch.tensor([0.1, 2.0, 3.0, 1.0])),
    "pairs of rows": lambda: lambda o, t: F.relu(o[: len(o) // 2 * 2].reshape(-1, 2, 4).diff(dim=1)).mean(),
    "norm": lambda: lambda outputs, target: outputs.norm(),
    "random": lambda: lambda o, t: (o @ o.T).logsumexp(1).mean() + 0.01 * torch.randn(()),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_means_and_sums_are_let_through(name: str, dtype: torch.dtype) -> None:
    tried(MEANS[name](), X.to(dtype))


@pytest.mark.parametrize("name", NO_MEANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_no_mean_over_rows_is_refused_with_the_numbers(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"(?s)of 20 rows together is .*7 and of 13 of them.*all_gather"):
        tried(NO_MEANS[name](), X.to(dtype))


def test_one_of_several_losses_is_refused_by_its_name_and_others_may_divide_by_something_else() -> None:
    losses = {"kind": nn.CrossEntropyLoss(ignore_index=1), "spread": NO_MEANS["variance"]()}
    rule = LossList(losses, {"kind": 1.0, "spread": 0.5}, named=True, labels=("kind", "spread"))
    trial = TriedLoss(rule, CPU, accumulates=False)

    with pytest.raises(ConfigError, match=r"loss\['spread'\] of 20 rows together"):
        trial({"kind": X, "spread": X}, (Y, Y), 20, None)


def test_outputs_may_be_dicts_with_parts_that_have_no_rows() -> None:
    outputs = {"made": (X, X * 2), "scale": torch.ones(()), "note": "a word"}

    tried(lambda o, t: (o["made"][0] * o["made"][1] * o["scale"]).mean(), outputs)
    with pytest.raises(ConfigError, match="rows together"):
        tried(lambda o, t: (o["made"][0] * o["made"][1]).std(), outputs)


def test_weighed_rows_are_tried_as_they_are_weighed() -> None:
    weights = torch.rand(20)

    tried(per_row, weights=weights)
    with pytest.raises(ConfigError, match="rows together"):
        tried(NO_MEANS["rows that know of others"](), weights=weights)


def test_a_trial_leaves_the_loss_the_outputs_and_all_random_numbers_as_they_were() -> None:
    loss, outputs = Centres(), X.clone()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    def draws(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (o * torch.rand(1) * random.random() * np.random.uniform()).mean()

    assert tried(loss, outputs).over
    tried(draws)
    assert loss.calls == 0
    assert not loss.moving.any()
    assert outputs.equal(X)
    assert torch.get_rng_state().equal(states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_losses_of_torch_are_known_and_those_of_others_are_not() -> None:
    known = [nn.CrossEntropyLoss(), nn.KLDivLoss(), F.mse_loss, functools.partial(F.nll_loss, ignore_index=0)]

    assert not any(LossRule(loss).unknown for loss in [*known, with_divisor()])
    assert all(LossRule(loss).unknown for loss in [Centres(), Weighted(), per_row])


def test_a_batch_of_one_row_and_one_of_nan_leave_the_next_to_be_tried() -> None:
    trial = TriedLoss(LossRule(NO_MEANS["variance"]()), CPU, accumulates=False)
    trial(X[:1], (Y[:1],), 1, None)
    trial(X * float("nan"), (Y,), 20, None)

    with pytest.raises(ConfigError, match="rows together"):
        trial(X, (Y,), 20, None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 4))
        self.register_buffer("centre", torch.zeros(4))
        self.seen: list[int] = []
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(x)
        return outputs


def plain(run: Any, batch: Any) -> torch.Tensor:
    run.model.seen.append(len(batch["x"]))
    run.model.steps += 1
    outputs = run.model(batch["x"])
    run.model.centre += outputs.detach().mean(0)
    return F.mse_loss(outputs[:, 0], batch["y"])


def noisy(run: Any, batch: Any) -> None:
    run.minimize((run.model(batch["x"] + torch.randn_like(batch["x"]))).square().mean())
    run.minimize(run.model(torch.randn(len(batch["x"]), 4)).mean())


def contrasts(run: Any, batch: Any) -> None:
    outputs = run.model(batch["x"])
    run.minimize(F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs))))


def second_contrasts(run: Any, batch: Any) -> None:
    run.minimize(run.model(batch["x"]).square().mean())
    contrasts(run, batch)


def believed(run: Any, batch: Any) -> None:
    run.minimize(run.model(batch["x"]).var(), weight=run.rows)


def told(worker: GangWorker) -> list[Any]:
    """What each step says when it is tried, and what the first leaves behind."""
    random_rows = np.random.default_rng(1)
    x, y = random_rows.normal(size=(40, 4)).astype("float32"), random_rows.normal(size=40).astype("float32")
    found: list[Any] = []
    for train_step in (plain, noisy, believed, contrasts, second_contrasts):
        spec = StepSpec(model=Net, optimizer=torch.optim.Adam, train_step=train_step)
        replica = StepReplica(spec, feature_names=("x",), label_names=("y",), rank=worker.rank)
        sync = attach(replica, worker)
        try:
            sync.step(replica, share(x, y, (25, 15), worker.rank))
            found.append("")
        except ConfigError as exc:
            found.append(str(exc))
        if train_step is plain:
            net: Any = replica.model
            counted = int(net.body[1].num_batches_tracked)
            found.append((net.seen, net.steps, counted, replica.counter.batches))
            found.append(net.body[2].training)
        sync.close()
    return found


def test_steps_are_tried_with_layers_at_rest_and_leave_nothing_behind() -> None:
    for rank, found in enumerate(run_ranks(2, told)):
        plain_one, left, training, noisy_one, believed_one, contrast, second = found
        assert (plain_one, noisy_one, believed_one) == ("", "", "")
        assert left == ([(25, 15)[rank]], 1, 1, 1)
        assert training
        assert contrast.startswith("the loss of the step of ")
        assert "run.backward(loss, weight=...)" in contrast
        assert second.startswith("loss 2 of the step of ")
