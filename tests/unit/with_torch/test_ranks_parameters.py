"""Parameters that come, go or are used by one rank only: several ranks stay what one process is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gang import GangWorker, attach, run_ranks
from torch import nn

from kindler.errors import ConfigError
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from tests.unit.with_torch.rows import Array, batch, share

pytestmark = pytest.mark.torch

Weights = dict[str, torch.Tensor]
STEPS, CUT = 4, (5, 11)


def _data(step: int) -> tuple[Array, Array]:
    draw = np.random.default_rng(step)
    return draw.standard_normal((16, 4), dtype=np.float32), draw.standard_normal((16, 1), dtype=np.float32)


class Layers(nn.Module):
    """A frozen layer, a tied pair, a branch that some rows reach, a complex filter, one never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.third.weight = self.second.weight
        self.last = nn.Linear(4, 1)
        self.branch = nn.Linear(4, 1)
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        hidden = hidden * (self.filter * self.filter.conj()).real
        output = self.last(hidden)
        chosen = x[:, 0] > 2.0  # in rows of the second rank only, if at all
        if bool(chosen.any()):
            output = output + torch.where(chosen[:, None], self.branch(hidden), 0.0)
        return output


class Scaled(nn.Module):
    """A loss that learns, and counts."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return ((outputs - targets) ** 2).mean() * torch.exp(-self.scale) + self.scale


Change = Callable[[nn.Module, torch.optim.Optimizer], None]


def _unfreeze(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.first.requires_grad_(True)


def _freeze(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.second.requires_grad_(False)


def _add(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(7)
    model.last = nn.Linear(4, 1)
    optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.01})


def _replace(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(8)
    old, model.last = model.last, nn.Linear(4, 1)
    gone = {id(parameter) for parameter in old.parameters()}
    held = optimizer.param_groups[0]
    held["params"] = [*(p for p in held["params"] if id(p) not in gone), *model.last.parameters()]


CHANGES: dict[str, Change | None] = {
    "nothing": None,
    "unfrozen": _unfreeze,
    "frozen": _freeze,
    "added": _add,
    "replaced": _replace,
}


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def _plain(change: Change | None, learns: bool) -> Weights:
    """The loop that one process would run."""
    model, loss = Layers(), Scaled() if learns else nn.MSELoss()
    optimizer = _optimizer([*model.parameters(), *loss.parameters()])
    for step in range(STEPS):
        if step == 2 and change is not None:
            change(model, optimizer)
        x, y = (torch.from_numpy(part) for part in _data(step))
        optimizer.zero_grad()
        loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *loss.parameters()], 1.0)
        optimizer.step()
    return {**model.state_dict(), **{f"loss:{name}": p for name, p in loss.named_parameters()}}


def _trained(
    worker: GangWorker | None,
    change: Change | None,
    learns: bool,
    passes: int = 1,
    strategy: str = "allreduce",
) -> Weights:
    # Of the first rank's values only: attaching gives them to the others.
    loss = Scaled(1.0 if worker is None or worker.rank == 0 else 5.0) if learns else nn.MSELoss()
    spec = TorchSpec(
        model=Layers,
        optimizer=lambda model: _optimizer([*model.parameters(), *loss.parameters()]),
        loss=loss,
        clip_norm=1.0,
        accumulation_steps=passes,
    )
    replica = TorchReplica(spec, device="cpu", rank=worker.rank if worker else 0)
    joined = attach(replica, worker, strategy=strategy) if worker else None
    replica.begin_epoch(0)
    for step in range(STEPS):
        if step == 2 and change is not None:
            change(replica.model, replica.optimizer)
        rows = share(*_data(step), CUT, worker.rank) if worker else batch(*_data(step))
        replica.train_step(rows)
    replica.merge_buffers()
    if joined is not None:
        joined.close()
    found = {f"loss:{name}": p.detach() for name, p in loss.named_parameters()}
    return {**replica.model.state_dict(), **found}


def _all(worker: GangWorker, strategy: str) -> dict[tuple[str, bool, int], Weights]:
    cases = [(name, learns, 1) for name in CHANGES for learns in (False, True)]
    cases.append(("unfrozen", True, 3))
    return {
        (name, learns, n): _trained(worker, CHANGES[name], learns, n, strategy) for name, learns, n in cases
    }


@pytest.fixture(scope="module", params=["allreduce", "zero1"])
def trained(request: Any) -> list[Any]:
    """Every case, trained by one gang: starting processes is what takes time here."""
    return run_ranks(2, _all, request.param)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_parameters_that_change_in_mid_run_are_those_of_one_process(
    name: str, learns: bool, trained: list[Any]
) -> None:
    expected = _plain(CHANGES[name], learns)

    for result in (trained[0][name, learns, 1], trained[1][name, learns, 1]):
        assert result.keys() == expected.keys()
        for key, wanted in expected.items():
            torch.testing.assert_close(result[key], wanted.detach(), atol=2e-6, rtol=1e-5)
            assert torch.equal(result[key], trained[0][name, learns, 1][key])


@pytest.mark.parametrize("name", CHANGES)
def test_one_worker_follows_them_too(name: str) -> None:
    found, expected = _trained(None, CHANGES[name], learns=True), _plain(CHANGES[name], learns=True)

    for key, wanted in expected.items():
        torch.testing.assert_close(found[key], wanted.detach(), atol=2e-6, rtol=1e-5)


def test_gradients_of_the_step_in_which_a_layer_is_unfrozen_accumulate(trained: list[Any]) -> None:
    expected = _plain(_unfreeze, learns=True)

    for key, wanted in expected.items():
        torch.testing.assert_close(
            trained[0]["unfrozen", True, 3][key], wanted.detach(), atol=2e-6, rtol=1e-5
        )


def _differing(worker: GangWorker, change: str) -> str:
    spec = TorchSpec(model=Layers, optimizer=functools.partial(torch.optim.SGD, lr=0.1), loss=nn.MSELoss())
    replica = TorchReplica(spec, device="cpu", rank=worker.rank)
    attach(replica, worker)
    model: Any = replica.model
    if change == "alone" and worker.rank == 1:
        model.first.requires_grad_(True)
    elif change == "otherwise":
        (model.first.weight if worker.rank else model.first.bias).requires_grad_(True)
    elif change == "drawn":
        torch.manual_seed(worker.rank)
        replica.optimizer.add_param_group({"params": [nn.Parameter(torch.randn(2))]})
    try:
        replica.train_step(share(*_data(0), CUT, worker.rank))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("alone", "has started to train more parameters.*others have not.*on all of them alike"),
        ("otherwise", "have started to train different parameters.*on all of them alike"),
        ("drawn", "has different values on different workers.*manual_seed"),
    ],
)
def test_a_change_that_is_not_the_same_on_all_workers_is_refused_at_once(change: str, complaint: str) -> None:
    found = run_ranks(2, _differing, change)

    assert bool(found[0]) is (change != "alone"), "who changed nothing has nothing to complain about"
    with pytest.raises(ConfigError, match=f"(?s){complaint}"):
        raise ConfigError(found[1])


def _fitted(change: Change | None) -> TorchReplica:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return _optimizer([p for p in model.parameters() if p.requires_grad])

    replica = TorchReplica(TorchSpec(model=Layers, optimizer=optimizer, loss=Scaled()), device="cpu")
    if change is not None:
        replica.train_step(batch(*_data(0)))
        change(replica.model, replica.optimizer)
        replica.train_step(batch(*_data(1)))
    return replica


def _unfreeze_and_add(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.first.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.01})


def test_a_state_brings_back_what_was_unfrozen_and_added() -> None:
    straight, resumed = _fitted(_unfreeze_and_add), _fitted(None)
    resumed.load_state(straight.state())
    for replica in (straight, resumed):
        replica.train_step(batch(*_data(2)))

    assert [len(group["params"]) for group in resumed.optimizer.param_groups] == [9, 2]
    for mine, its in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert mine.requires_grad is its.requires_grad
        assert torch.equal(mine, its)


def test_layers_unfrozen_after_a_state_was_made_join_the_optimizer_that_goes_on() -> None:
    replica = _fitted(_freeze)  # any change: two steps
    unfrozen = Layers()
    unfrozen.first.requires_grad_(True)
    optimizer = _optimizer([p for p in unfrozen.parameters() if p.requires_grad])
    again = TorchReplica(TorchSpec(model=unfrozen, optimizer=optimizer, loss=Scaled()), device="cpu")
    again.load_state(replica.state())
    again.restore_requires_grad()
    before = unfrozen.first.weight.detach().clone()
    again.train_step(batch(*_data(2)))

    assert not torch.equal(unfrozen.first.weight, before)
    assert unfrozen.second.weight.requires_grad, "the user's own model says so"


def test_the_losss_parameters_are_in_the_state() -> None:
    replica = _fitted(_freeze)
    loss = Scaled()
    spec = TorchSpec(model=Layers, optimizer=torch.optim.SGD, loss=loss)
    loss.scale.data.fill_(9.0)
    other = TorchReplica(spec, device="cpu")
    other.load_state(_without_optimizer(replica.state()))

    assert loss.scale.item() == replica.loss.function.scale.item() != 9.0
    assert loss.calls.item() == 2


def _without_optimizer(state: bytes) -> bytes:
    from kindler.frameworks.torch.state import dump, parse

    return dump({**parse(state), "optimizer": None})
