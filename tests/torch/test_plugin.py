"""A framework and a sync that another distribution adds: both keep the contracts, and train with the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gang import PRELOAD
from torch import nn

from kindler import Checkpoints, Device, Estimator
from kindler.callbacks import Callback
from kindler.errors import ConfigError
from kindler.frameworks.registry import FRAMEWORKS
from kindler.strategies import Strategy
from kindler.testing.replicas import ReplicaCase, ReplicaContract
from kindler.testing.syncs import SyncContract

pytestmark = pytest.mark.torch

PLUGIN = str(Path(__file__).parents[1] / "plugin")
if PLUGIN not in sys.path:  # as if it were installed: the folder has its code and its dist-info
    sys.path.append(PLUGIN)


def _points(rows: int = 48) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(3)
    x = random.normal(size=(rows, 4)).astype(np.float32)
    y = x @ random.normal(size=(4, 1)) + 0.5 + random.normal(scale=0.1, size=(rows, 1))
    return {"x": x, "y": y.astype(np.float32)}


def _plane() -> Any:
    from toy_framework import Plane

    return Plane(4)


class TestToyFramework(ReplicaContract):
    framework = "toy"
    preload = PRELOAD

    @pytest.fixture
    def case(self) -> ReplicaCase:
        points = _points()
        batches = [((points["x"][n : n + 12],), (points["y"][n : n + 12],)) for n in (0, 12, 24)]
        spec = FRAMEWORKS.load("toy").make_spec(model=_plane(), lr=0.05, momentum=0.9)
        return ReplicaCase(spec=spec, batches=batches)


class TestToyFrameworkWithTheToySync(TestToyFramework):
    sync = "gather"


class TestToySync(SyncContract):
    sync = "gather"
    preload = PRELOAD


def _toy(workers: int) -> Estimator:
    return Estimator.from_framework("toy", model=_plane(), lr=0.05, momentum=0.5, workers=workers)


def test_an_optimizer_that_nobody_can_divide_is_refused_before_workers_start() -> None:
    with pytest.raises(ConfigError, match=r"strategy='zero1': only the optimizer of a PyTorch model"):
        _toy(2).fit(_points(), strategy="zero1", verbose=0)


def test_the_toy_framework_trains_evaluates_predicts_and_saves(tmp_path: Path) -> None:
    data, trained = _points(), []
    for workers in (1, 2):
        est = _toy(workers)
        history = est.fit(data, epochs=3, batch_size=16, validation_data=data, verbose=0)
        trained.append([est.get_model().weights, est.get_model().bias])
    assert history["val_mae"][-1] < history["val_mae"][0]
    figures = est.evaluate(data, verbose=0)
    est.save(tmp_path / "toy.estimator")
    again = Estimator.load(tmp_path / "toy.estimator", trusted=True)

    for mine, wanted in zip(trained[1], trained[0], strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-5)
    assert figures["loss"] == pytest.approx(history["val_loss"][-1], rel=1e-6)
    np.testing.assert_array_equal(again.predict(data["x"]), est.predict(data["x"]))


def test_torch_trains_with_the_toy_sync_as_one_process_does() -> None:
    data, trained = _points(), []
    for workers, strategy in ((1, "allreduce"), (2, "gather"), (2, "allreduce")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        model[1].eval()  # statistics of a worker's own rows would differ by workers
        est = Estimator.from_torch(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
            loss=nn.MSELoss(),
            workers=workers,
        )
        est.fit(data, epochs=2, batch_size=16, verbose=0, strategy=strategy)
        trained.append([p.detach().numpy() for p in est.get_model().parameters()])

    for others in trained[1:]:
        for mine, wanted in zip(others, trained[0], strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-5)


class Asks(Callback):
    """Wants a checkpoint after every step."""

    def on_step_end(self, run: Any) -> None:
        run.save_checkpoint()


def test_a_sync_that_is_not_in_step_meets_only_at_the_ends_of_epochs(tmp_path: Path) -> None:
    est = Estimator.from_framework("toy", model=_plane(), workers=2)
    history = est.fit(
        _points(),
        epochs=2,
        batch_size=16,
        strategy="apart",
        callbacks=[Asks()],
        checkpoint=Checkpoints(tmp_path, every=1),
        verbose=0,
    )

    kept = sorted(path.name.partition("-epoch-")[2] for path in tmp_path.glob("checkpoint-*"))
    assert history["loss"][1] < history["loss"][0]
    assert kept == ["00001-step-000000003.kindler", "00002-step-000000006.kindler"]


def test_what_a_framework_cannot_take_is_refused_by_itself() -> None:
    with pytest.raises(ConfigError, match=r"takes model, lr and momentum; received \['depth'\]"):
        Estimator.from_framework("toy", model=_plane(), depth=3)
    with pytest.raises(ConfigError, match=r"Device\(precision='bf16'\) does not apply to 'toy' models"):
        Estimator.from_framework("toy", model=_plane(), device=Device(precision="bf16"))


def test_an_unknown_sync_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown strategy 'gatherr'\. Did you mean 'gather'\?"):
        _toy(2).fit(_points(), strategy="gatherr")


@pytest.mark.parametrize("workers", [1, 2])
def test_options_that_a_sync_does_not_have_are_refused_before_workers_start(workers: int) -> None:
    model = nn.Linear(2, 1)
    est = Estimator.from_torch(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=nn.MSELoss(), workers=workers
    )
    rows = np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32)

    with pytest.raises(ConfigError, match="not options of strategy='allreduce'"):
        est.fit(rows, strategy=Strategy("allreduce", every=2), verbose=0)
