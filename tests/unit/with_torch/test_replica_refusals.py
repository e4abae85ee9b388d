"""What would end in an error of torch's is refused in words, as early as it can be known."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kindler import Estimator
from kindler.errors import ConfigError
from kindler.estimator.groups import grouped
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec, check
from tests.unit.with_torch.rows import batch

pytestmark = pytest.mark.torch

X = np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32)
Y = X.sum(axis=1, keepdims=True)
SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Picky(torch.optim.SGD):
    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, lr=rate)


class Reversed(torch.optim.SGD):
    def __init__(self, rate: float, params: Any) -> None:
        super().__init__(params, lr=rate)


class Named(torch.optim.SGD):
    def __init__(self, *, params: Any, rate: float = 0.1) -> None:
        super().__init__(params, lr=rate)


class NotOne:
    def __init__(self, params: Any) -> None:
        self.params = params


def _complaints(**options: Any) -> list[str]:
    given = {"model": nn.Linear(4, 1), "optimizer": SGD, "loss": nn.MSELoss(), **options}
    return check(TorchSpec(**given))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"optimizer": torch.optim.LBFGS}, "LBFGS evaluates the model several times per step"),
        ({"optimizer": functools.partial(torch.optim.LBFGS, lr=1)}, "LBFGS evaluates the model"),
        ({"model": nn.LazyLinear(2)}, "lazy layers"),
        ({"optimizer": Picky}, "Picky needs 'rate' in addition to the parameters"),
        ({"optimizer": Reversed}, "Reversed needs 'rate' in addition to the parameters"),
        ({"optimizer": NotOne}, "the class NotOne, which is not a torch.optim.Optimizer"),
        (
            {"scheduler": ReduceLROnPlateau, "scheduler_step": "step"},
            "needs a metric of each epoch",
        ),
        (
            {
                "scheduler": functools.partial(ReduceLROnPlateau, patience=2),
                "scheduler_step": "step",
            },
            "needs a metric of each epoch",
        ),
    ],
)
def test_what_cannot_train_is_refused_before_a_worker_starts(options: Any, complaint: str) -> None:
    [found] = _complaints(**options)

    assert complaint in found
    given = {"model": nn.Linear(4, 1), "optimizer": SGD, "loss": nn.MSELoss(), **grouped(options)}
    with pytest.raises(ConfigError, match=complaint):
        Estimator.from_torch(**given, workers=2)


def test_an_optimizer_instance_that_needs_a_closure_is_refused() -> None:
    model = nn.Linear(4, 1)

    [found] = _complaints(model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    assert "LBFGS" in found


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, "LBFGS evaluates the model"),
        (
            {"scheduler": lambda o: ReduceLROnPlateau(o, patience=1), "scheduler_step": "step"},
            "needs a metric of each epoch",
        ),
        (
            {"scheduler": lambda o: ReduceLROnPlateau(o, mode="max")},
            "receives the training loss of each epoch",
        ),
        ({"loss": lambda outputs, smoothing=0.1: nn.MSELoss()}, "must return a tensor, it returned MSELoss"),
    ],
)
def test_what_only_a_creator_knows_is_refused_before_the_first_step_ends(
    options: Any, complaint: str
) -> None:
    given = {"model": nn.Linear(4, 1), "optimizer": SGD, "loss": nn.MSELoss(), **options}

    with pytest.raises(ConfigError, match=complaint):
        TorchReplica(TorchSpec(**given), device="cpu").train_step(batch(X, Y))


def _any_number(*tensors: torch.Tensor) -> torch.Tensor:
    outputs, targets = tensors
    return ((outputs - targets) ** 2).mean()


def _with_a_default(outputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
    assert targets is not None
    return ((outputs - targets) ** 2).mean()


class Method:
    def loss(self, *tensors: torch.Tensor) -> torch.Tensor:
        return _any_number(*tensors)


@pytest.mark.parametrize(
    "loss",
    [
        _any_number,
        _with_a_default,
        Method().loss,
        functools.partial(_any_number),
        lambda: nn.MSELoss(reduction="mean"),
        lambda config: nn.MSELoss(),
        lambda config, reduction="mean": nn.MSELoss(reduction=reduction),
        lambda reduction="mean", scale=2: nn.MSELoss(reduction=reduction),
    ],
)
def test_a_loss_and_what_makes_one_are_told_apart(loss: Any) -> None:
    replica = TorchReplica(TorchSpec(model=nn.Linear(4, 1), loss=loss, metrics=[_any_number]), device="cpu")
    replica.eval_step(batch(X, Y))
    found = replica.merge_tallies([replica.take_tallies()])

    expected = nn.functional.mse_loss(torch.from_numpy(replica.predict((X,))[0]), torch.from_numpy(Y))
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert found["_any_number"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    "optimizer", [functools.partial(Reversed, 0.1), Named, functools.partial(Picky, rate=0.1)]
)
def test_an_optimizers_class_may_have_its_parameters_anywhere(optimizer: Any) -> None:
    assert _complaints(optimizer=optimizer) == []
    replica = TorchReplica(
        TorchSpec(model=nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=optimizer), device="cpu"
    )
    before = replica.predict((X,))[0]
    replica.train_step(batch(X, Y))

    assert not np.array_equal(replica.predict((X,))[0], before)


def test_a_momentum_that_comes_late_is_that_of_plain_sgd() -> None:
    model, plain = (nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    other = optimizer(plain.parameters(), foreach=False)
    model[0].requires_grad_(False)
    plain[0].requires_grad_(False)
    replica = TorchReplica(TorchSpec(model=model, loss=nn.MSELoss(), optimizer=optimizer), device="cpu")
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
            plain[0].requires_grad_(True)
        replica.train_step(batch(X, Y))
        other.zero_grad()
        nn.functional.mse_loss(plain(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
        other.step()

    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)


class Watched(nn.Module):
    """Notes in which mode its parts were called; a part of it keeps another at rest by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.last = nn.Dropout(0.0), nn.Dropout(0.0), nn.Dropout(0.0), nn.Linear(4, 1)
        self.seen: list[str] = []

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.c.training = False
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = [self, self.a, self.b, self.c]
        self.seen.append("".join("t" if module.training else "e" for module in modes))
        return self.last(x)


def test_modules_train_in_every_step_but_those_that_rested_from_the_start() -> None:
    model = Watched()
    model.b.eval()
    replica = TorchReplica(TorchSpec(model=model, loss=nn.MSELoss(), optimizer=SGD), device="cpu")
    rows = batch(X, Y)
    replica.train_step(rows)
    model.eval()  # a callback's own validation, not undone
    replica.train_step(rows)
    model.eval()
    model.train()  # undone, with the resting part in training mode now
    replica.train_step(rows)
    model.a.eval()
    replica.train_step(rows)
    replica.eval_step(rows)
    model.train()
    replica.eval_step(rows)
    replica.train_step(rows)

    assert model.seen == ["ttee", "ttee", "ttee", "ttee", "eeee", "eeee", "ttee"]


def test_a_model_in_evaluation_mode_as_a_whole_is_trained_as_a_whole() -> None:
    model = Watched().eval()
    replica = TorchReplica(TorchSpec(model=model, loss=nn.MSELoss(), optimizer=SGD), device="cpu")
    replica.train_step(batch(X, Y))

    assert model.seen == ["ttte"]


def test_what_a_callback_puts_to_rest_before_the_first_step_rests() -> None:
    model = Watched()
    replica = TorchReplica(TorchSpec(model=model, loss=nn.MSELoss(), optimizer=SGD), device="cpu")
    model.a.eval()  # on_run_begin
    for _ in range(2):
        replica.train_step(batch(X, Y))
        model.train()

    assert model.seen == ["tete", "tete"]


def test_graphs_without_a_gpu_are_refused_and_auto_trains_eagerly() -> None:
    options = {"model": nn.Linear(4, 1), "optimizer": SGD, "loss": nn.MSELoss()}
    wanting = TorchReplica(TorchSpec(**options, compile="graphs"), device="cpu")
    taking = TorchReplica(TorchSpec(**options, compile="auto"), device="cpu")

    with pytest.raises(ConfigError, match="cannot be recorded as a CUDA graph: the device is cpu"):
        wanting.train_step(batch(X, Y))
    taking.train_step(batch(X, Y))

    assert taking.mode == "eager: the device is cpu"
    assert _complaints(compile="fast") == [
        "compile must be None, 'auto', 'default', 'graphs' or 'reduce-overhead'; received 'fast'."
    ]
