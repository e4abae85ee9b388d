"""Each rank owns a slice of the parameters: it moves as in one process, and the state is divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gang import GangWorker, attach, run_ranks
from torch import nn

from kindler.errors import ConfigError
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from kindler.frameworks.torch.state import parse
from kindler.testing.ranks import RankFailedError
from tests.torch.test_sharded import Mixed, _data, _Signs
from tests.unit.with_torch.rows import Array, batch, share

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {"weight_decay": 0.01},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}
STEPS, CUT, LATE = 3, (5, 11), (4, 0, 12)


def _spec(name: str, **options: Any) -> TorchSpec:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        rest = [
            p for module in (model.last, model.wide, model.never, model.still) for p in module.parameters()
        ]
        groups = [{"params": model.first.parameters(), "lr": 0.02}, {"params": [*rest, model.scale]}]
        return getattr(torch.optim, name)(groups, lr=0.05, **OPTIMIZERS[name])

    return TorchSpec(
        model=Mixed,
        optimizer=optimizer,
        loss=nn.MSELoss(),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
        scheduler_step="step",
        **{"clip_norm": 0.5, "clip_value": 0.4, **options},
    )


def _alone(
    name: str, steps: Sequence[int] = range(STEPS), state: bytes = b"", **options: Any
) -> TorchReplica:
    replica = TorchReplica(_spec(name, **options), device="cpu")
    if state:
        replica.load_state(state)
    for step in steps:
        replica.train_step(batch(*_data(step)))
    return replica


def _ranks(
    worker: GangWorker,
    name: str,
    steps: Sequence[int] = range(STEPS),
    state: bytes = b"",
    cut: Sequence[int] = CUT,
    **options: Any,
) -> tuple[list[Array], bytes, int]:
    """The parameters of this rank, the whole state where it is the first, and the bytes of its own part."""
    replica = TorchReplica(_spec(name), device="cpu", rank=worker.rank)
    if state:
        replica.load_state(state)
    sync = attach(replica, worker, strategy="zero1", **options)
    for step in steps:
        sync.step(replica, share(*_data(step), cut, worker.rank))
    whole = sync.whole(replica)
    told = whole.state() if worker.rank == 0 else b""
    sync.close()
    return replica.read(), told, replica.optimizer_bytes()


def _all_optimizers(worker: GangWorker) -> dict[str, Any]:
    return {name: _ranks(worker, name) for name in OPTIMIZERS}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    """For each rank what it has after some steps with each optimizer."""
    return run_ranks(2, _all_optimizers)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_move_as_whole_parameters_do(name: str, trained: list[dict[str, Any]]) -> None:
    alone = _alone(name)

    for rank in trained:
        for mine, wanted, first in zip(rank[name][0], alone.read(), trained[0][name][0], strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(mine, first)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_saved_state_is_the_ordinary_one_and_goes_on_in_one_process(
    name: str, trained: list[dict[str, Any]]
) -> None:
    alone, state = _alone(name), trained[0][name][1]
    found, wanted = parse(state)["optimizer"], alone.optimizer.state_dict()

    assert found["param_groups"] == wanted["param_groups"]
    assert list(found["state"]) == list(wanted["state"])
    for place, values in wanted["state"].items():
        assert list(found["state"][place]) == list(values)
        for key, value in values.items():
            torch.testing.assert_close(found["state"][place][key], value, rtol=1e-4, atol=1e-5)
    on = [_alone(name, range(STEPS, STEPS + 2), given) for given in (state, alone.state())]
    for mine, its in zip(on[0].read(), on[1].read(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-4)


def test_each_of_two_workers_has_half_of_the_optimizers_memory(trained: list[dict[str, Any]]) -> None:
    whole = _alone("Adam")
    state = whole.optimizer.state
    largest = sum(value.nbytes for values in state.values() for value in values.values() if value.dim())

    for rank in trained:
        counters, unused = 4 * len(state), 3 * 4 * 12  # which have a place in a slice, and no state
        assert largest / 2 - unused <= rank["Adam"][2] <= largest / 2 + unused + counters


def _hosts(worker: GangWorker, options: dict[str, Any]) -> Any:
    return _ranks(worker, "AdamW", cut=LATE, **options)


@pytest.mark.parametrize(
    ("hosts", "options"),
    [
        (None, {}),
        (None, {"one_copy": True}),
        (None, {"shared_memory": False}),
        (("a", "b", "a"), {"one_copy": True}),
        (("a", "b", "b"), {"divide": "parameters"}),
    ],
    ids=["one host", "one copy", "no shared memory", "two hosts", "two hosts, whole parameters"],
)
def test_slices_travel_between_hosts_too_and_a_worker_may_have_no_rows(
    hosts: Sequence[str] | None, options: dict[str, Any]
) -> None:
    found = run_ranks(3, _hosts, options, hosts=hosts)

    alone = _alone("AdamW")
    for parameters, _, _ in found:
        for mine, wanted, first in zip(parameters, alone.read(), found[0][0], strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(mine, first)
    state = parse(found[0][1])["optimizer"]["state"]
    assert list(state) == list(alone.optimizer.state_dict()["state"])


def _in_two_parts(worker: GangWorker) -> tuple[list[Array], list[Array]]:
    straight, _, _ = _ranks(worker, "Adam", range(4))
    _, state, _ = _ranks(worker, "Adam", range(2))
    state = worker.all_gather(state)[0]
    return straight, _ranks(worker, "Adam", range(2, 4), state)[0]


def test_a_state_continues_bit_by_bit() -> None:
    for straight, resumed in run_ranks(2, _in_two_parts):
        for mine, wanted in zip(resumed, straight, strict=True):
            np.testing.assert_array_equal(mine, wanted)


class _Halved(nn.Module):
    """Gives its weight other memory in each forward pass, as layers that limit their norm do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.layer.weight.data = torch.renorm(self.layer.weight.data, 2, 0, 0.3)
        return self.layer(x)


def _moving(worker: GangWorker | None, one_copy: bool = False) -> list[Array]:
    spec = TorchSpec(model=_Halved, optimizer=torch.optim.Adam, loss=nn.MSELoss())
    replica = TorchReplica(spec, device="cpu", rank=worker.rank if worker else 0)
    if worker is not None:
        attach(replica, worker, strategy="zero1", one_copy=one_copy)
    for step in range(STEPS):
        replica.train_step(share(*_data(step), CUT, worker.rank) if worker else batch(*_data(step)))
    return replica.read()


def test_weights_that_the_model_itself_changes_are_those_that_move() -> None:
    expected = _moving(None)

    for found in run_ranks(2, _moving):
        for mine, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-6)
    with pytest.raises(RankFailedError, match="share one copy of the parameters"):
        run_ranks(2, _moving, True)


def _own_optimizer(worker: GangWorker, asked: str | None) -> Any:
    spec = TorchSpec(
        model=lambda: nn.Linear(4, 1), optimizer=lambda model: _Signs(model.parameters()), loss=nn.MSELoss()
    )
    replica = TorchReplica(spec, device="cpu", rank=worker.rank)
    try:
        sync = attach(replica, worker, strategy="zero1", divide=asked)
        for step in range(STEPS):
            sync.step(replica, share(*_data(step), CUT, worker.rank))
        sync.whole(replica)
    except ConfigError as error:
        return str(error)
    return replica.read()


def test_an_optimizer_of_ones_own_is_divided_as_its_user_says() -> None:
    spec = TorchSpec(
        model=lambda: nn.Linear(4, 1), optimizer=lambda model: _Signs(model.parameters()), loss=nn.MSELoss()
    )
    alone = TorchReplica(spec, device="cpu")
    for step in range(STEPS):
        alone.train_step(batch(*_data(step)))

    for found in run_ranks(2, _own_optimizer, "parameters"):
        for mine, wanted in zip(found, alone.read(), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-6)
    for asked, complaint in ((None, "can be divided: each worker"), ("elements", "keeps 'rows' of shape")):
        for found in run_ranks(2, _own_optimizer, asked):
            assert complaint in found
