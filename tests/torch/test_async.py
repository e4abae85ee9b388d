"""Asynchronous training and rounds with PyTorch: what is learned, counted, bounded, and survived."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Estimator, Optimization
from kindler.callbacks import Callback
from kindler.errors import ConfigError, WorkerError, WorkerLostError
from kindler.strategies import AllReduce, Async, LocalSGD, Strategy

pytestmark = pytest.mark.torch

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def clouds() -> Arrays:
    """Two Gaussian clouds of 200 points each."""
    random = np.random.default_rng(0)
    x = np.concatenate([random.normal(0, 1, (200, 10)), random.normal(2, 1, (200, 10))])
    return x.astype(np.float32), np.repeat([0.0, 1.0], 200).astype(np.float32)[:, None]


def classifier(workers: int = 2, *, norm: bool = False) -> Estimator:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(10, 12), nn.BatchNorm1d(12)] if norm else [nn.Linear(10, 12)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 1))
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        loss=nn.BCEWithLogitsLoss(),
        metrics=["accuracy"],
        workers=workers,
    )


class Weight(nn.Module):
    """One weight, whatever the rows: the gradient of its mean output is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() + 0 * x[:, :1]


def its_output(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


def counter(workers: int, rate: float = 1.0, **options: Any) -> Estimator:
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return Estimator.from_torch(model=model, optimizer=optimizer, loss=its_output, workers=workers, **options)


def rows(count: int) -> Arrays:
    return np.zeros((count, 1), np.float32), np.zeros((count, 1), np.float32)


class At(Callback):
    """Does something on one worker after the first step of an epoch."""

    def __init__(self, epoch: int, rank: int, act: Callable[[], None]) -> None:
        self.epoch, self.rank, self.act = epoch, rank, act

    def on_step_end(self, run: Any) -> None:
        if (run.epoch, run.rank) == (self.epoch, self.rank):
            self.act()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_the_server() -> None:
    """The only process of the run that listens on a port, besides the driver."""
    listening = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            listening.add(f"socket:[{fields[9]}]")
    for child in siblings():
        if child != os.getpid() and listening & handles(child):
            os.kill(child, signal.SIGKILL)


def siblings() -> list[int]:
    """The processes that the same fork server has started."""
    parent = os.getppid()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
        except OSError:
            continue  # it has just ended
    return found


def handles(pid: int) -> set[str]:
    found = set()
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(handle))
        except OSError:
            continue
    return found


MODES = [Async(), Async(lock=True, shards=2), LocalSGD(), LocalSGD(every_steps=3), AllReduce()]


@pytest.mark.parametrize("strategy", MODES, ids=repr)
def test_two_clouds_are_told_apart_in_every_mode(strategy: Strategy) -> None:
    x, y = clouds()
    est = classifier()
    history = est.fit((x, y), epochs=6, batch_size=32, validation_data=(x, y), strategy=strategy, verbose=0)

    assert np.mean((est.predict(x) > 0) == y) >= 0.98
    assert history["num_samples"] == [400] * 6
    assert history["val_accuracy"][-1] == pytest.approx(np.mean((est.predict(x) > 0) == y))
    if strategy.name == "async":
        assert history["updates"] == history["steps"] == [26] * 6  # 13 steps of two workers
        parameters = sum(p.numel() for p in est.get_model().parameters())
        assert min(history["sync_bytes"]) >= 2 * 4 * parameters * 26
        assert max(history["staleness_max"]) >= 0
        state = est.get_model().state_dict()
        assert all(torch.isfinite(value).all() for value in state.values())
    elif strategy.name == "local_sgd":
        assert history["rounds"] == [5 if strategy.options["every_steps"] else 1] * 6


@pytest.mark.parametrize("strategy", [Async(lock=True), Async(shards=2)], ids=["locked", "hogwild"])
def test_every_push_of_four_workers_is_applied_exactly_once(strategy: Strategy) -> None:
    est = counter(4)
    [row] = est.fit(rows(1000), epochs=1, batch_size=4, strategy=strategy, verbose=0)

    assert row["updates"] == row["steps"] == 1000
    assert est.get_model().weight.tolist() == [-1000.0] * 3


def test_the_mean_of_several_batches_is_one_push() -> None:
    est = counter(2)
    [row] = est.fit(rows(60), batch_size=4, strategy=Async(push_every=4), verbose=0)

    assert row["updates"] == 2 * 4  # 15 batches of each worker: three pushes of four, and one of three
    assert est.get_model().weight.tolist() == [-8.0] * 3


@pytest.mark.parametrize("bound", [0, 2])
def test_no_gradient_is_staler_than_the_bound(bound: int) -> None:
    history = counter(4).fit(
        rows(160), epochs=2, batch_size=4, strategy=Async(max_staleness=bound), verbose=0
    )

    assert history["updates"] == [160, 160]
    assert max(history["staleness_max"]) <= bound


def test_training_ends_after_exactly_max_steps_updates() -> None:
    est = counter(3)
    history = est.fit(rows(90), max_steps=50, batch_size=3, strategy="async", verbose=0)

    assert history["updates"] == [50]
    assert est.get_model().weight.tolist() == [-50.0] * 3


def test_rounds_take_the_mean_of_weights_by_rows() -> None:
    est = counter(2)
    [row] = est.fit(rows(7), batch_size=4, shuffle=False, strategy="local_sgd", verbose=0)

    assert (row["rounds"], row["steps"]) == (1, 2)
    assert est.get_model().weight.tolist() == [-2.0] * 3


class Rates(Callback):
    """Files the rate of each worker after its last step."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        Path(self.folder, str(run.rank)).write_text(str(run.optimizer.param_groups[0]["lr"]))


def test_workers_without_rows_in_a_step_keep_up_with_the_schedule_in_rounds(tmp_path: Path) -> None:
    est = counter(2, scheduler=halves_by_step, optimization=Optimization(scheduler_step="step"))
    est.fit(
        rows(7), batch_size=1, shuffle=False, strategy="local_sgd", callbacks=[Rates(tmp_path)], verbose=0
    )

    assert [(tmp_path / name).read_text() for name in "01"] == [str(2.0**-7)] * 2


def halves_by_step(optimizer: Any, config: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


class Halves(Callback):
    """Halves the rate after each epoch."""

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] /= 2


def test_a_rate_that_a_callback_changes_and_a_schedule_reach_the_server() -> None:
    options: dict[str, Any] = {"epochs": 3, "batch_size": 2, "strategy": "async", "verbose": 0}
    est = counter(2)
    est.fit(rows(4), callbacks=[Halves()], **options)
    model = Weight()
    scheduled = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loss=its_output,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        workers=2,
    )
    scheduled.fit(rows(4), **options)

    assert est.get_model().weight.tolist() == [-(4 + 2 + 1)] * 3
    assert scheduled.get_model().weight.tolist() == [-(4 + 2 + 1)] * 3


def test_a_checkpoint_has_the_servers_weights_and_optimizer_and_a_run_resumes_from_it(tmp_path: Path) -> None:
    x, y = clouds()
    est, again = classifier(norm=True), classifier(norm=True)
    first = est.fit((x, y), epochs=2, batch_size=64, strategy="async", checkpoint=tmp_path, verbose=0)
    again.load_checkpoint(Estimator.latest_checkpoint(tmp_path))
    history = again.fit((x, y), epochs=1, batch_size=64, strategy="async", verbose=0)

    np.testing.assert_array_equal(est.predict(x), classifier_of(tmp_path / "none", est).predict(x))
    assert [row["steps"] for row in (*first, *history)] == [14] * 3
    moments = again._live.replica.optimizer.state_dict()["state"]
    assert {int(entry["step"]) for entry in moments.values()} == {42}


def classifier_of(folder: Path, est: Estimator) -> Estimator:
    """A new estimator with the weights of another."""
    est.save(f"{folder}.pt")
    fresh = classifier(norm=True)
    fresh.load_weights(f"{folder}.pt")
    return fresh


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_finish_when_a_worker_dies_and_the_report_says_so(
    rank: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    x, y = clouds()
    est = classifier(3, norm=True)
    dying = [At(2, rank, die)]
    history = est.fit((x, y), 3, 48, callbacks=dying, strategy="async", checkpoint=tmp_path, verbose=1)

    assert history["lost_workers"] == [0, 1, 1]
    assert history["num_samples"][0] == 400
    assert history["num_samples"][2] in (266, 267)
    assert np.mean((est.predict(x) > 0) == y) >= 0.98
    assert f"worker {rank} on" in (said := capfd.readouterr().out)
    assert "the others continue without it" in said
    assert Estimator.latest_checkpoint(tmp_path) is not None


class DieOnce(Callback):
    """Each of the ranks named dies once, after the third step of the second epoch."""

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        self.folder, self.ranks = str(folder), ranks

    def on_run_begin(self, run: Any) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def on_step_end(self, run: Any) -> None:
        self.seen += 1
        marker = Path(self.folder, f"dead-{run.rank}")
        if run.epoch == 2 and run.step % 7 == 3 and run.rank in self.ranks and not marker.exists():
            marker.touch()
            die()

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        assert self.seen == 7 * run.epoch, "no step is missing, and none was made twice"


def dropping() -> Estimator:
    """A model with all that a replacement could get wrong: statistics, momentum, randomness."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(12, 1))
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        loss=nn.BCEWithLogitsLoss(),
        metrics=["accuracy"],
        workers=2,
    )


def test_rounds_in_which_workers_were_killed_end_as_those_in_which_they_lived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = clouds()
    told = []
    for name, ranks in (("alone", ()), ("disturbed", (0, 1))):
        folder = tmp_path / name
        folder.mkdir()
        est = dropping()
        history = est.fit(
            (x, y),
            epochs=3,
            batch_size=64,
            validation_data=(x[::4], y[::4]),
            callbacks=[DieOnce(folder, ranks)],
            strategy=LocalSGD(every_steps=2),
            checkpoint=folder / "run",
            verbose=0,
        )
        timed = {"seconds", "rows_per_s"}
        rows = [{name: value for name, value in row.items() if name not in timed} for row in history]
        told.append((rows, est.predict(x), sorted(file.name for file in (folder / "run").iterdir())))

    assert sorted(file.name for file in (tmp_path / "disturbed").glob("dead-*")) == ["dead-0", "dead-1"]
    (rows, predictions, checkpoints), (other_rows, other_predictions, other_checkpoints) = told
    assert other_rows == rows
    assert [row["rounds"] for row in rows] == [4] * 3
    np.testing.assert_array_equal(other_predictions, predictions)
    assert other_checkpoints == checkpoints
    assert "another one takes its place" in caplog.text


def test_a_dead_server_ends_the_run_with_its_newest_checkpoint(tmp_path: Path) -> None:
    est, again = counter(2), counter(2)
    options: dict[str, Any] = {"epochs": 3, "batch_size": 4, "strategy": "async", "verbose": 0}

    with pytest.raises(
        WorkerLostError, match=r"the parameter server.*newest checkpoint is .*epoch-00001-"
    ) as caught:
        est.fit(rows(40), callbacks=[At(2, 0, kill_the_server)], checkpoint=tmp_path, **options)

    assert caught.value.role == "ps"
    history = again.fit(rows(40), checkpoint=tmp_path, resume=True, **options)
    assert history["epoch"] == [1, 2, 3]
    assert again.get_model().weight.tolist() == [-60.0] * 3


class Refuses(torch.optim.SGD):
    """An optimizer that fails at its third step."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Refuses.count += 1
        if Refuses.count == 3:
            raise ArithmeticError("the third update does not work")
        super().step(closure)


def test_an_update_that_fails_fails_the_run_with_its_own_error() -> None:
    model = Weight()
    est = Estimator.from_torch(
        model=model, optimizer=Refuses(model.parameters(), lr=1.0), loss=its_output, workers=2
    )

    with pytest.raises(ArithmeticError, match="the third update does not work") as caught:
        est.fit(rows(40), batch_size=4, strategy="async", verbose=0)
    assert isinstance(caught.value, WorkerError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_staleness": -1}, "max_staleness must be a whole number, 0 or more"),
        (
            {"push_every": 0, "lock": "yes"},
            r"lock must be True or False; received 'yes'\. push_every must be",
        ),
        ({"shards": True}, "shards must be a whole number of at least 1"),
        ({"stale": 1}, r"Strategy\('async', stale=1\): these are not options of strategy='async'"),
    ],
)
def test_options_that_cannot_work_are_refused_on_the_driver(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        counter(2).fit(rows(4), strategy=Strategy("async", **options), verbose=0)


def test_what_does_not_go_together_is_refused_on_the_driver() -> None:
    with pytest.raises(ConfigError, match="every_steps must be a whole number of at least 1"):
        counter(2).fit(rows(4), strategy=LocalSGD(every_steps=0), verbose=0)
    with pytest.raises(ConfigError, match="clip_norm needs the gradients of all parameters"):
        counter(2, optimization=Optimization(clip_norm=1.0)).fit(rows(4), strategy=Async(shards=2), verbose=0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*map(torch.from_numpy, rows(4))))
    with pytest.raises(ConfigError, match="max_staleness is for data that has columns"):
        counter(2).fit(loader, strategy=Async(max_staleness=1), verbose=0)


def test_loaders_train_asynchronously_too() -> None:
    est = counter(2)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*map(torch.from_numpy, rows(12))), batch_size=2
    )
    [row] = est.fit(loader, batch_size=4, strategy="async", verbose=0)

    assert row["num_samples"] == 12
    assert est.get_model().weight.tolist() == [-float(row["updates"])] * 3


def test_one_worker_and_its_server_train_as_one_process_does() -> None:
    x, y = clouds()
    trained = []
    for strategy in ("allreduce", "async"):
        est = classifier(1)
        est.fit((x, y), epochs=2, batch_size=40, strategy=strategy, verbose=0)
        trained.append([p.detach().numpy() for p in est.get_model().parameters()])

    for mine, wanted in zip(*trained, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-5)
