"""Each worker owns a slice of the parameters: the result is that of one process, the state is divided."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gang import PRELOAD, GangWorker, attach, run_ranks
from interrupted import DATA, Falls, assert_same, attempts, figures, fit, shaky, weights
from rows import Array, batch, share
from torch import nn

from kindler import Callback, EarlyStopping, Estimator, ModelCheckpoint
from kindler.errors import ConfigError
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from kindler.frameworks.torch.state import parse
from kindler.testing.ranks import RankFailed
from kindler.testing.replicas import ReplicaCase, ReplicaContract
from kindler.testing.syncs import SyncContract

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


class TestSharded(SyncContract):
    sync = "sharded"
    preload = PRELOAD


class TestTorch(ReplicaContract):
    framework = "torch"
    sync = "sharded"
    preload = PRELOAD

    @pytest.fixture
    def case(self) -> ReplicaCase:
        random = np.random.default_rng(0)
        batches = [
            ((random.normal(size=(12, 4)).astype(np.float32),), (random.integers(0, 3, 12),))
            for _ in range(3)
        ]
        spec = TorchReplica.make_spec(
            model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
            optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
            loss=nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.5])),
            metrics=["accuracy"],
            clip_norm=1.0,
        )
        return ReplicaCase(spec=spec, batches=batches)


class TestFsdp(SyncContract):
    sync = "fsdp"
    preload = PRELOAD


class TestTorchByFsdp(TestTorch):
    sync = "fsdp"


class Mixed(nn.Module):
    """Memory laid out by columns, two dtypes, a number, a layer that no row reaches, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 7), nn.Linear(7, 1)
        self.first.weight.data = self.first.weight.data.t().contiguous().t()
        self.wide = nn.Linear(4, 7, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.never, self.still = nn.Linear(3, 3), nn.Linear(4, 7)
        self.still.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * self.scale + self.wide(x.double()).float() + self.still(x)
        return self.last(torch.tanh(hidden))


def _data(step: int) -> tuple[Array, Array]:
    draw = np.random.default_rng(step)
    return draw.standard_normal((16, 4), dtype=np.float32), draw.standard_normal((16, 1), dtype=np.float32)


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
        scheduler_creator=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
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
    sync = attach(replica, worker, sync="sharded", **options)
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
        attach(replica, worker, sync="sharded", one_copy=one_copy)
    for step in range(STEPS):
        replica.train_step(share(*_data(step), CUT, worker.rank) if worker else batch(*_data(step)))
    return replica.read()


def test_weights_that_the_model_itself_changes_are_those_that_move() -> None:
    expected = _moving(None)

    for found in run_ranks(2, _moving):
        for mine, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-6)
    with pytest.raises(RankFailed, match="share one copy of the parameters"):
        run_ranks(2, _moving, True)


class _Signs(torch.optim.Optimizer):
    """An optimizer of nobody's: moves by signs, and looks at one parameter at a time."""

    def __init__(self, params: Any, lr: float = 0.1, together: bool = False) -> None:
        super().__init__(params, {"lr": lr, "together": together})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("rows", torch.zeros(7))
                    parameter -= group["lr"] * parameter.grad.sign() * parameter.grad.abs().amax()


def _own_optimizer(worker: GangWorker, asked: str | None) -> Any:
    spec = TorchSpec(
        model=lambda: nn.Linear(4, 1), optimizer=lambda model: _Signs(model.parameters()), loss=nn.MSELoss()
    )
    replica = TorchReplica(spec, device="cpu", rank=worker.rank)
    try:
        sync = attach(replica, worker, sync="sharded", divide=asked)
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
    for asked, complaint in ((None, "can be divided is not known"), ("elements", "keeps 'rows' of shape")):
        for found in run_ranks(2, _own_optimizer, asked):
            assert complaint in found


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (_Signs, {}, "sync='sharded': whether the work of optimizer _Signs can be divided is not known"),
    (torch.optim.Adafactor, {"divide": "elements"}, "Adafactor moves a parameter by what the whole"),
    (torch.optim.LBFGS, {}, "LBFGS evaluates the model several times"),
    (torch.optim.Adam, {"divide": "rows"}, "divide is one of 'elements', 'parameters', or None"),
    (torch.optim.Adam, {"shards": 2}, "are not those of sync='sharded'"),
    (torch.optim.Adam, {"one_copy": 1}, "one_copy is True or False"),
    (torch.optim.Adam, {"modules": "first"}, "modules is a list of names of modules"),
    (torch.optim.Adafactor, {"modules": []}, "sync='fsdp': optimizer Adafactor moves a parameter by what"),
]


@pytest.mark.parametrize(("optimizer", "options", "complaint"), REFUSED)
def test_what_cannot_be_divided_is_refused_before_workers_start(
    optimizer: Any, options: dict[str, Any], complaint: str
) -> None:
    sync = "fsdp" if options.get("modules") is not None else "sharded"

    def fitted() -> None:
        est = Estimator.from_torch(model=Mixed, optimizer=optimizer, loss=nn.MSELoss(), workers=2)
        est.fit(_data(0), sync=sync, sync_options=options, verbose=0)

    with pytest.raises(ConfigError, match=complaint):
        fitted()


class _Watch(Callback):
    """Lowers the rate, and keeps what the whole state is at the end of an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def on_epoch_end(self, run: Any, logs: dict[str, Any]) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.9
        if run.rank == 0:
            run.write_checkpoint(self.path)


def _estimator(**options: Any) -> Estimator:
    model = Mixed()
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        loss=nn.MSELoss(),
        **{"workers": 2, "precision": "bf16", "accumulation_steps": 2, "clip_norm": 0.5, **options},
    )


def test_a_run_has_the_result_of_all_reduce_and_a_checkpoint_of_it_goes_on_with_any_sync(
    tmp_path: Path,
) -> None:
    x, y = _data(7)
    data = (np.tile(x, (3, 1)), np.tile(y, (3, 1)))
    runs: dict[str, tuple[Estimator, Any]] = {}
    for sync in ("sharded", "allreduce"):
        est = _estimator()
        watch = [_Watch(tmp_path / sync), ModelCheckpoint(tmp_path / f"{sync}-kept")]
        history = est.fit(
            data, epochs=2, batch_size=20, validation_data=data, callbacks=watch, sync=sync, verbose=0
        )
        runs[sync] = est, history

    for name in ("loss", "val_loss", "num_samples"):
        assert runs["sharded"][1][name] == pytest.approx(runs["allreduce"][1][name], rel=1e-5)
    expected = weights(runs["allreduce"][0])
    for name, found in weights(runs["sharded"][0]).items():
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=1e-5, err_msg=name)
    trained = sum(p.numel() * p.element_size() for p in Mixed().parameters() if p.requires_grad) - 4 * 12
    assert runs["sharded"][1]["optimizer_bytes"][-1] == pytest.approx(trained, rel=0.15), "of 2 moments"
    on = []
    for sync, file in (("allreduce", "sharded"), ("sharded", "allreduce-kept")):
        est = _estimator()
        est.load_checkpoint(tmp_path / file)
        est.fit(data, epochs=1, batch_size=20, sync=sync, verbose=0)
        on.append(weights(est))
    for name, found in on[0].items():
        np.testing.assert_allclose(found, on[1][name], rtol=0, atol=1e-5, err_msg=name)


def test_fsdp_has_the_result_of_all_reduce_and_its_checkpoints_go_on_with_any_sync(tmp_path: Path) -> None:
    def estimator(folder: Path | None = None) -> Estimator:
        return Estimator.from_torch(
            model=lambda: nn.Sequential(
                nn.Linear(4, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1)
            ),
            optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
            loss=nn.MSELoss(),
            workers=2,
            clip_norm=0.5,
            model_dir=folder,
        )

    x, y = _data(7)
    options: dict[str, Any] = {"batch_size": 8, "validation_data": (x[:5], y[:5]), "verbose": 0}
    plain, full, again = estimator(), estimator(tmp_path / "run"), estimator()
    expected = plain.fit((x, y), epochs=2, **options)
    stopping = [EarlyStopping("loss", patience=9, restore_best=True), ModelCheckpoint(tmp_path / "kept")]
    history = full.fit(
        (x, y),
        epochs=2,
        sync="fsdp",
        sync_options={"modules": ["0"]},
        callbacks=stopping,
        checkpoint_trigger=1,
        **options,
    )
    again.load_checkpoint(tmp_path / "kept")

    for name in ("loss", "val_loss", "num_samples"):
        assert history[name] == pytest.approx(expected[name], rel=1e-5)
    whole = 2 * 4 * sum(p.numel() for p in plain.get_model().parameters())
    assert whole / 2 <= history["optimizer_bytes"][-1] <= 0.65 * whole
    for est, sync in ((full, "allreduce"), (again, "fsdp")):
        wanted = weights(plain)
        for name, found in weights(est).items():
            np.testing.assert_allclose(found, wanted[name], rtol=0, atol=1e-5, err_msg=name)
        est.fit((x, y), epochs=1, sync=sync, **options)
    plain.fit((x, y), epochs=1, **options)
    for est in (full, again):
        for name, found in weights(est).items():
            np.testing.assert_allclose(found, weights(plain)[name], rtol=0, atol=1e-5, err_msg=name)


def test_a_run_that_lost_a_worker_in_mid_epoch_ends_as_if_it_had_not(tmp_path: Path) -> None:
    alone = shaky()
    expected = figures(fit(alone, sync="sharded"))
    folder = tmp_path / "run"
    est = shaky(folder)

    history = fit(est, Falls(tmp_path, "die", model_dir=folder), sync="sharded")

    assert attempts(tmp_path) == [2, 2]
    assert figures(history) == expected
    assert_same(est, weights(alone))
    again = shaky(folder, workers=1)  # a checkpoint of it, at its end
    assert fit(again, resume=True, data=DATA)["epoch"] == [1, 2, 3]
    assert_same(again, weights(alone))


class _Asks(Callback):
    """Wants the whole state where nobody has it."""

    def on_step_end(self, run: Any) -> None:
        run.write_checkpoint("nowhere")


def test_a_state_that_nobody_has_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"(?s)divided between the workers.*run\.save_checkpoint\(\)"):
        _estimator().fit(_data(0), batch_size=8, callbacks=[_Asks()], sync="sharded", verbose=0)
