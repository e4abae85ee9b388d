"""Each worker owns a slice of the parameters: the result is that of one process, the state is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gang import PRELOAD
from interrupted import Falls, assert_same, attempts, figures, fit, shaky, weights
from torch import nn

from kindler import Checkpoints, Device, Estimator, Optimization
from kindler.callbacks import Callback, EarlyStopping, ModelCheckpoint
from kindler.errors import ConfigError
from kindler.frameworks.registry import FRAMEWORKS
from kindler.strategies import FSDP, Strategy
from kindler.testing.replicas import ReplicaCase, ReplicaContract
from kindler.testing.syncs import SyncContract
from tests.unit.with_torch.rows import Array

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]


class TestSharded(SyncContract):
    sync = "zero1"
    preload = PRELOAD


class TestTorch(ReplicaContract):
    framework = "torch"
    sync = "zero1"
    preload = PRELOAD

    @pytest.fixture
    def case(self) -> ReplicaCase:
        random = np.random.default_rng(0)
        batches = [
            ((random.normal(size=(12, 4)).astype(np.float32),), (random.integers(0, 3, 12),))
            for _ in range(3)
        ]
        spec = FRAMEWORKS.load("torch").make_spec(
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


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (
        _Signs,
        {},
        "strategy='zero1': it is unknown whether the work of optimizer _Signs can be divided: each worker",
    ),
    (torch.optim.Adafactor, {"divide": "elements"}, "Adafactor updates a parameter as a whole"),
    (torch.optim.LBFGS, {}, "LBFGS evaluates the model several times"),
    (torch.optim.Adam, {"divide": "rows"}, "divide must be one of 'elements', 'parameters', or None"),
    (torch.optim.Adam, {"shards": 2}, "not options of strategy='zero1'"),
    (torch.optim.Adam, {"one_copy": 1}, "one_copy must be True or False"),
    (torch.optim.Adam, {"modules": "first"}, "modules must be a list of module names"),
    (
        torch.optim.Adafactor,
        {"modules": []},
        "strategy='fsdp': optimizer Adafactor updates a parameter",
    ),
]


@pytest.mark.parametrize(("optimizer", "options", "complaint"), REFUSED)
def test_what_cannot_be_divided_is_refused_before_workers_start(
    optimizer: Any, options: dict[str, Any], complaint: str
) -> None:
    strategy = Strategy("fsdp" if options.get("modules") is not None else "zero1", **options)

    def fitted() -> None:
        est = Estimator.from_torch(model=Mixed, optimizer=optimizer, loss=nn.MSELoss(), workers=2)
        est.fit(_data(0), strategy=strategy, verbose=0)

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


def _estimator() -> Estimator:
    model = Mixed()
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        loss=nn.MSELoss(),
        workers=2,
        device=Device(precision="bf16"),
        optimization=Optimization(accumulation_steps=2, clip_norm=0.5),
    )


def test_a_run_has_the_result_of_all_reduce_and_a_checkpoint_of_it_goes_on_with_any_sync(
    tmp_path: Path,
) -> None:
    x, y = _data(7)
    data = (np.tile(x, (3, 1)), np.tile(y, (3, 1)))
    runs: dict[str, tuple[Estimator, Any]] = {}
    for strategy in ("zero1", "allreduce"):
        est = _estimator()
        watch = [_Watch(tmp_path / strategy), ModelCheckpoint(tmp_path / f"{strategy}-kept")]
        history = est.fit(
            data, epochs=2, batch_size=20, validation_data=data, callbacks=watch, strategy=strategy, verbose=0
        )
        runs[strategy] = est, history

    for name in ("loss", "val_loss", "num_samples"):
        assert runs["zero1"][1][name] == pytest.approx(runs["allreduce"][1][name], rel=1e-5)
    expected = weights(runs["allreduce"][0])
    for name, found in weights(runs["zero1"][0]).items():
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=1e-5, err_msg=name)
    trained = sum(p.numel() * p.element_size() for p in Mixed().parameters() if p.requires_grad) - 4 * 12
    assert runs["zero1"][1]["optimizer_bytes"][-1] == pytest.approx(trained, rel=0.15), "of 2 moments"
    on = []
    for strategy, file in (("allreduce", "zero1"), ("zero1", "allreduce-kept")):
        est = _estimator()
        est.load_checkpoint(tmp_path / file)
        est.fit(data, epochs=1, batch_size=20, strategy=strategy, verbose=0)
        on.append(weights(est))
    for name, found in on[0].items():
        np.testing.assert_allclose(found, on[1][name], rtol=0, atol=1e-5, err_msg=name)


def test_fsdp_has_the_result_of_all_reduce_and_its_checkpoints_go_on_with_any_sync(tmp_path: Path) -> None:
    def estimator() -> Estimator:
        return Estimator.from_torch(
            model=lambda: nn.Sequential(
                nn.Linear(4, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1)
            ),
            optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
            loss=nn.MSELoss(),
            workers=2,
            optimization=Optimization(clip_norm=0.5),
        )

    x, y = _data(7)
    options: dict[str, Any] = {"batch_size": 8, "validation_data": (x[:5], y[:5]), "verbose": 0}
    plain, full, again = estimator(), estimator(), estimator()
    expected = plain.fit((x, y), epochs=2, **options)
    stopping = [
        EarlyStopping("loss", patience=9, restore_best_weights=True),
        ModelCheckpoint(tmp_path / "kept"),
    ]
    history = full.fit(
        (x, y),
        epochs=2,
        strategy=FSDP(modules=["0"]),
        callbacks=stopping,
        checkpoint=Checkpoints(tmp_path / "run", every=1),
        **options,
    )
    again.load_checkpoint(tmp_path / "kept")

    for name in ("loss", "val_loss", "num_samples"):
        assert history[name] == pytest.approx(expected[name], rel=1e-5)
    whole = 2 * 4 * sum(p.numel() for p in plain.get_model().parameters())
    assert whole / 2 <= history["optimizer_bytes"][-1] <= 0.65 * whole
    for est, strategy in ((full, "allreduce"), (again, "fsdp")):
        wanted = weights(plain)
        for name, found in weights(est).items():
            np.testing.assert_allclose(found, wanted[name], rtol=0, atol=1e-5, err_msg=name)
        est.fit((x, y), epochs=1, strategy=strategy, **options)
    plain.fit((x, y), epochs=1, **options)
    for est in (full, again):
        for name, found in weights(est).items():
            np.testing.assert_allclose(found, weights(plain)[name], rtol=0, atol=1e-5, err_msg=name)


def test_a_run_that_lost_its_workers_in_mid_epoch_ends_as_if_it_had_not(tmp_path: Path) -> None:
    alone = shaky()
    expected = figures(fit(alone, strategy="zero1"))
    folder = tmp_path / "run"
    est = shaky()

    falls = Falls(tmp_path, "die", checkpoints=folder, rank=None)
    history = fit(est, falls, folder=folder, strategy="zero1")

    assert attempts(tmp_path) == [2, 2]
    assert figures(history) == expected
    assert_same(est, weights(alone))
    again = shaky(workers=1)
    # A checkpoint of it, at its end.
    assert fit(again, folder=folder, resume=True)["epoch"] == [1, 2, 3]
    assert_same(again, weights(alone))


class _Asks(Callback):
    """Wants the whole state where nobody has it."""

    def on_step_end(self, run: Any) -> None:
        run.write_checkpoint("nowhere")


def test_a_state_that_nobody_has_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"(?s)divided between the workers.*run\.save_checkpoint\(\)"):
        _estimator().fit(_data(0), batch_size=8, callbacks=[_Asks()], strategy="zero1", verbose=0)
