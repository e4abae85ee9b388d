"""What users hand in for PyTorch: instances, classes, creators; checked, pickled, built."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler.errors import ConfigError
from kindler.frameworks.registry import FRAMEWORKS
from kindler.frameworks.torch.lightning_replica import LightningSpec
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec, check, loads, resolve_device
from kindler.frameworks.torch.spec import StepSpec
from tests.unit.with_torch.rows import batch

pytestmark = pytest.mark.torch

X = np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32)
Y = np.random.default_rng(1).standard_normal((8, 1), dtype=np.float32)


def _linear(config: dict[str, Any]) -> nn.Module:
    return nn.Linear(4, config.get("out", 1))


def _sgd(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=config["lr"])


class Head(nn.Module):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.last = nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


def test_a_spec_that_names_its_class_where_it_was_before_is_read() -> None:
    data = pickle.dumps(StepSpec(model=nn.Linear, train_step=print), protocol=0)
    moved = data.replace(b"frameworks.torch.spec\n", b"frameworks.torch.step_spec\n")

    assert moved != data
    assert loads(moved) == StepSpec(model=nn.Linear, train_step=print)

    data = pickle.dumps(LightningSpec(model=nn.Linear), protocol=0)
    moved = data.replace(b"frameworks.torch.lightning_replica\n", b"frameworks.torch.lightning_spec\n")
    assert moved != data
    assert loads(moved) == LightningSpec(model=nn.Linear)


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 1), _linear, Head, lambda: Head(1), functools.partial(Head, 1)]
)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, functools.partial(torch.optim.SGD, lr=0.1), _sgd])
@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), nn.MSELoss, lambda config: nn.MSELoss(), nn.functional.mse_loss]
)
def test_models_optimizers_and_losses_come_in_every_form(model: Any, optimizer: Any, loss: Any) -> None:
    spec = TorchSpec(model=model, optimizer=optimizer, loss=loss, config={"lr": 0.1})
    assert check(spec) == []
    replica = TorchReplica(loads(TorchReplica.dumps(spec)), device="cpu")
    before = replica.predict((X,))[0]
    replica.train_step(batch(X, Y))

    assert replica.predict((X,))[0].shape == (8, 1)
    assert not np.array_equal(before, replica.predict((X,))[0])


def test_an_optimizer_instance_keeps_its_models_parameters_through_pickling() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.from_numpy(X)).sum().backward()
    optimizer.step()
    replica = TorchReplica(
        loads(TorchReplica.dumps(TorchSpec(model=model, optimizer=optimizer, loss=nn.MSELoss()))),
        device="cpu",
    )

    held = [parameter for group in replica.optimizer.param_groups for parameter in group["params"]]
    assert all(mine is its for mine, its in zip(replica.model.parameters(), held, strict=True))
    assert replica.optimizer.state[held[0]]["step"].item() == 1
    assert replica.learning_rate() == 0.25


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (TorchSpec(model=3), "model must be a torch.nn.Module"),
        (
            TorchSpec(model=_linear, optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters())),
            "comes from a creator",
        ),
        (
            TorchSpec(model=nn.Linear(1, 1), optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters())),
            "2 of 2 parameters that are not the model's",
        ),
        (TorchSpec(model=_linear, optimizer="adam"), "optimizer must be"),
        (TorchSpec(model=_linear, scheduler=print), "needs an optimizer"),
        (TorchSpec(model=_linear, optimizer=_sgd, scheduler=1), "scheduler must be callable"),
        (TorchSpec(model=_linear, scheduler_step="day"), "scheduler_step must be"),  # type: ignore[arg-type]
        (TorchSpec(model=_linear, loss="mse"), "loss must be"),
        (TorchSpec(model=_linear, config=3), "config must be a dict"),  # type: ignore[arg-type]
        (TorchSpec(model=_linear, precision="fp8"), "precision must be"),  # type: ignore[arg-type]
        (TorchSpec(model=_linear, accumulation_steps=0), "accumulation_steps must be"),
        (TorchSpec(model=_linear, clip_norm=-1.0), "clip_norm must be"),
        (TorchSpec(model=_linear, inputs="list"), "inputs must be"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_work_is_said_before_anything_is_built(spec: TorchSpec, complaint: str) -> None:
    complaints = check(spec)

    assert len(complaints) == 1
    assert complaint in complaints[0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TorchSpec(model=lambda: 3, optimizer=_sgd), "must return a torch.nn.Module, it returned 3"),
        (TorchSpec(model=lambda: nn.LazyLinear(2)), "lazy layers"),
        (TorchSpec(model=_linear, loss=nn.MSELoss()), "needs an optimizer"),
        (TorchSpec(model=_linear, optimizer=_sgd, config={"lr": 1.0}), "need a loss"),
        (TorchSpec(model=_linear, optimizer=lambda m, c: 3, loss=nn.MSELoss()), "must return a torch.optim"),
        (
            TorchSpec(model=_linear, optimizer=torch.optim.SGD, loss=nn.MSELoss(), metrics=["f2"]),
            "unknown metric 'f2'",
        ),
        (
            TorchSpec(model=_linear, optimizer=torch.optim.SGD, loss=nn.MSELoss(), scheduler=lambda o, c: 3),
            "must return a learning-rate scheduler",
        ),
    ],
)
def test_what_a_creator_gets_wrong_is_said_with_what_would_work(spec: TorchSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchReplica(spec, device="cpu").train_step(batch(X, Y))


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.Adam, lr=0.01),
        functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        functools.partial(torch.optim.Adagrad, lr=0.01),
    ],
)
def test_the_fused_step_gives_what_the_plain_one_gives(optimizer: Any) -> None:
    spec = TorchSpec(model=Head, optimizer=optimizer, loss=nn.MSELoss())
    replica = TorchReplica(spec, device="cpu")
    torch.manual_seed(0)
    model = Head()
    plain = optimizer(model.parameters(), foreach=False)
    for _ in range(20):
        replica.train_step(batch(X, Y))
        plain.zero_grad()
        nn.functional.mse_loss(model(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
        plain.step()

    assert replica.optimizer.param_groups[0]["fused"] is True
    for mine, its in zip(replica.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)


def test_the_users_own_choice_of_implementation_is_kept() -> None:
    chosen = functools.partial(torch.optim.Adam, foreach=True)
    replica = TorchReplica(TorchSpec(model=Head, optimizer=chosen, loss=nn.MSELoss()), device="cpu")

    assert replica.optimizer.param_groups[0]["fused"] is None


def test_creators_see_the_plain_seed_on_every_rank_and_ranks_differ_afterwards() -> None:
    spec = TorchSpec(model=Head)
    first, draw_0 = TorchReplica(spec, device="cpu", rank=0, seed=5), torch.rand(1)
    second, draw_1 = TorchReplica(spec, device="cpu", rank=1, seed=5), torch.rand(1)

    assert torch.equal(first.model.last.weight, second.model.last.weight)
    assert draw_0 != draw_1


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="has 0 CUDA devices"):
        resolve_device("cuda:1")
    with pytest.raises(ConfigError, match="received 'gpu'"):
        resolve_device("gpu")


def _env() -> dict[str, str]:
    """A fresh process finds what this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_preloading_starts_no_thread_and_leaves_a_process_that_may_fork() -> None:
    code = (
        "import os, sys, numpy;"  # numpy's BLAS has threads of its own
        "before = len(os.listdir('/proc/self/task'));"
        "from kindler.frameworks.torch.replica import preload;"
        "preload();"
        "print(before, len(os.listdir('/proc/self/task')), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_env()
    )

    before, after, warm = done.stdout.split()
    assert (before, warm) == (after, "True")


def test_the_table_loads_the_replica() -> None:
    assert FRAMEWORKS.load("torch") is TorchReplica


def test_a_spec_that_was_pickled_with_the_names_of_then_is_read() -> None:
    fields = vars(TorchSpec(model=_linear, scheduler=print))
    then = {**fields, "scheduler_creator": fields["scheduler"]}
    del then["scheduler"]
    spec = TorchSpec.__new__(TorchSpec)
    spec.__setstate__(then)

    assert spec == TorchSpec(model=_linear, scheduler=print)
    assert pickle.loads(pickle.dumps(spec)) == spec
