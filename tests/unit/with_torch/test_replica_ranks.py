"""Several ranks against one process: the same weights after the same steps, however the rows are cut."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from gang import GangWorker, attach, run_ranks
from torch import nn

from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from tests.unit.with_torch.rows import Array, share

pytestmark = pytest.mark.torch

STEPS = 4
CUTS = [pytest.param((5, 11), id="uneven"), pytest.param((16, 0), id="empty-rank")]
Weights = dict[str, torch.Tensor]


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def _data(step: int, classes: bool) -> tuple[Array, Array]:
    rng = np.random.default_rng(step)
    x = rng.standard_normal((16, 6), dtype=np.float32)
    return x, rng.integers(0, 3, 16) if classes else rng.standard_normal(16, dtype=np.float32)


def _ignoring(x: Array, y: Array) -> tuple[Array, Array]:
    return x, np.where(np.arange(16) < 6, -100, y)  # every target of the first rank's 5 rows is ignored


def _adam(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return functools.partial(torch.optim.Adam, lr=0.05, **options)


def _focal(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().pow(1.5).mean()


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.5])
LOSSES: dict[str, Callable[[], Any]] = {
    "cross-entropy": nn.CrossEntropyLoss,
    "class-weights": lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
    "smoothed-class-weights": lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1),
    "ignored-targets": nn.CrossEntropyLoss,
    "functional-class-weights": lambda: functools.partial(nn.functional.cross_entropy, weight=CLASS_WEIGHTS),
    "summed-cross-entropy": lambda: nn.CrossEntropyLoss(reduction="sum"),
    "mse": nn.MSELoss,
    "summed-mse": lambda: nn.MSELoss(reduction="sum"),
    "own-function": lambda: _focal,
}


def _batches(loss: str, step: int) -> tuple[Array, Array]:
    classes = not loss.endswith("mse") and loss != "own-function"
    x, y = _data(step, classes)
    return _ignoring(x, y) if loss == "ignored-targets" else (x, y)


def _reference(loss: str) -> tuple[Weights, list[float]]:
    """A plain loop over whole batches, as its user would write it."""
    torch.manual_seed(0)
    classes = _batches(loss, 0)[1].dtype == np.int64
    model = _classifier() if classes else _regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    function, losses = LOSSES[loss](), []
    for step in range(STEPS):
        x, y = (torch.from_numpy(part) for part in _batches(loss, step))
        optimizer.zero_grad()
        value = function(model(x), y if classes else y.reshape(-1, 1))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return dict(model.state_dict()), losses


def _train(
    worker: GangWorker, loss: str, counts: Sequence[int], accumulation_steps: int, shared_memory: bool
) -> tuple[Weights, dict[str, float]]:
    classes = _batches(loss, 0)[1].dtype == np.int64
    spec = TorchSpec(
        model=_classifier if classes else _regressor,
        optimizer=_adam(),
        loss=LOSSES[loss](),
        accumulation_steps=accumulation_steps,
    )
    replica = TorchReplica(spec, device="cpu", rank=worker.rank)
    sync = attach(replica, worker, shared_memory=shared_memory)
    replica.begin_epoch(0)
    for step in range(STEPS):
        replica.train_step(share(*_batches(loss, step), counts, worker.rank))
    replica.merge_buffers()
    replica.end_epoch()
    merged = replica.merge_tallies(worker.all_gather(replica.take_tallies()))
    sync.close()
    return dict(replica.model.state_dict()), merged


Case = tuple[str, tuple[int, ...], int, bool]
Outcome = tuple[Weights, dict[str, float]]
CASES: list[Case] = [
    *((loss, counts, 1, True) for loss in LOSSES for counts in ((5, 11), (16, 0))),
    *((loss, (3, 13), 4, True) for loss in ("class-weights", "ignored-targets", "mse", "summed-mse")),
    *((loss, (5, 11), 1, False) for loss in ("class-weights", "mse")),
]


def _train_all(worker: GangWorker) -> dict[Case, Outcome]:
    return {case: _train(worker, *case) for case in CASES}


@pytest.fixture(scope="module")
def trained() -> list[dict[Case, Outcome]]:
    """Every case, trained by one gang: starting processes is what takes time here."""
    return run_ranks(2, _train_all)


def _assert_equal_weights(results: Sequence[Weights], expected: Weights, atol: float = 2e-6) -> None:
    for name, wanted in expected.items():
        for weights in results:
            torch.testing.assert_close(weights[name], wanted, atol=atol, rtol=1e-5)
            assert torch.equal(weights[name], results[0][name])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("counts", CUTS)
def test_weights_and_loss_equal_those_of_one_process(
    loss: str, counts: tuple[int, ...], trained: list[dict[Case, Outcome]]
) -> None:
    results = [outcomes[loss, counts, 1, True] for outcomes in trained]

    weights, losses = _reference(loss)
    _assert_equal_weights([result[0] for result in results], weights)
    if loss == "mse":
        assert results[0][1]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert results[1][1] == results[0][1]
    assert results[0][1]["num_samples"] == 16 * STEPS


@pytest.mark.parametrize("loss", ["class-weights", "ignored-targets", "mse", "summed-mse"])
def test_accumulated_passes_give_the_same_weights(loss: str, trained: list[dict[Case, Outcome]]) -> None:
    results = [outcomes[loss, (3, 13), 4, True] for outcomes in trained]

    _assert_equal_weights([result[0] for result in results], _reference(loss)[0])


@pytest.mark.parametrize("loss", ["class-weights", "mse"])
def test_the_network_gives_the_same_weights_as_shared_memory(
    loss: str, trained: list[dict[Case, Outcome]]
) -> None:
    results = [outcomes[loss, (5, 11), 1, False] for outcomes in trained]

    _assert_equal_weights([result[0] for result in results], _reference(loss)[0])


def _diverge(worker: GangWorker) -> tuple[Weights, float]:
    """Start from different weights, optimizer states and rates on each rank."""

    def model() -> nn.Module:
        torch.manual_seed(worker.rank)
        return nn.Linear(6, 3)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1 * (worker.rank + 1), momentum=0.9)

    spec = TorchSpec(model=model, optimizer=optimizer, loss=nn.CrossEntropyLoss())
    replica = TorchReplica(spec, device="cpu", rank=worker.rank)
    replica.train_step(share(*_data(worker.rank, classes=True), (16,), 0))
    attach(replica, worker)
    assert replica.step == 1
    replica.train_step(share(*_data(5, classes=True), (8, 8), worker.rank))
    return dict(replica.model.state_dict()), replica.learning_rate()


def test_attaching_starts_all_ranks_from_rank_zeros_weights_and_optimizer() -> None:
    results = run_ranks(2, _diverge)

    assert [rate for _, rate in results] == [0.1, 0.1]
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in (0, 5):
        x, y = (torch.from_numpy(part) for part in _data(seed, classes=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    _assert_equal_weights([weights for weights, _ in results], dict(model.state_dict()))


class Masked(nn.Module):
    """Running statistics, and a constant that a mean would turn into NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x))


def _normalised(worker: GangWorker, counts: Sequence[int]) -> tuple[Weights, Weights]:
    spec = TorchSpec(model=Masked, optimizer=torch.optim.SGD, loss=nn.CrossEntropyLoss())
    replica = TorchReplica(spec, device="cpu", rank=worker.rank)
    attach(replica, worker)
    replica.begin_epoch(0)
    for step in range(STEPS):
        replica.train_step(share(*_data(step, classes=True), counts, worker.rank))
    before = {name: buffer.clone() for name, buffer in replica.model.named_buffers()}
    replica.merge_buffers()
    return before, dict(replica.model.state_dict())


@pytest.mark.parametrize("counts", CUTS)
def test_running_statistics_become_those_of_the_rows_of_all_ranks(counts: Sequence[int]) -> None:
    (first, merged), (second, other) = run_ranks(2, _normalised, counts)

    def by_rows(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return (one * counts[0] + two * counts[1]) / 16

    means, variances = ((first[name], second[name]) for name in ("norm.running_mean", "norm.running_var"))
    mean = by_rows(*means)
    torch.testing.assert_close(merged["norm.running_mean"], mean)
    spread = by_rows(*((own - mean) ** 2 for own in means))
    torch.testing.assert_close(merged["norm.running_var"], by_rows(*variances) + spread)
    assert merged["norm.num_batches_tracked"].item() == STEPS
    assert merged["mask"].tolist() == [0.0, float("-inf"), 1.0]
    for name, value in merged.items():
        assert torch.equal(value, other[name])


def _evaluate(worker: GangWorker, counts: Sequence[int], metrics: Callable[[], Any]) -> dict[str, float]:
    spec = TorchSpec(model=_classifier, loss=nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), metrics=metrics())
    replica = TorchReplica(spec, device="cpu")
    for step in range(STEPS):
        part = share(*_data(step, classes=True), counts, worker.rank)
        replica.eval_step(part)
    tallies = worker.all_gather(replica.take_tallies())
    return replica.merge_tallies(tallies)


def _many_metrics() -> dict[str, Any]:
    task = {"task": "multiclass", "num_classes": 3}
    f1 = torchmetrics.F1Score(average="macro", **task)
    return {
        "auroc": torchmetrics.AUROC(**task),
        "binned_auroc": torchmetrics.AUROC(thresholds=20, **task),
        "f1": f1,
        "f1_by_class": torchmetrics.F1Score(average="none", **task),
        "doubled": torchmetrics.F1Score(average="macro", **task) * 2,
        "group": torchmetrics.MetricCollection([torchmetrics.Precision(**task), torchmetrics.Recall(**task)]),
        "accuracy": "accuracy",
        "first_logit": lambda output, target: output[:, 0].mean(),
    }


@pytest.mark.parametrize("counts", [(16, 0), (3, 13), (0, 16)])
def test_metrics_over_ranks_equal_those_of_one_process(counts: Sequence[int]) -> None:
    results = run_ranks(2, _evaluate, counts, _many_metrics)

    torch.manual_seed(0)
    model = _classifier()
    data = [_data(step, classes=True) for step in range(STEPS)]
    x, y = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*data, strict=True))
    output = model(x).detach()
    expected: dict[str, Any] = {}
    for name, metric in _many_metrics().items():
        if isinstance(metric, torchmetrics.MetricCollection):
            expected |= {f"{name}_{key}": value.item() for key, value in metric(output, y).items()}
        elif name == "f1_by_class":
            expected |= {f"{name}_{place}": value for place, value in enumerate(metric(output, y).tolist())}
        elif callable(metric):
            metric = (
                metric.update(output, y) or metric.compute() if name != "first_logit" else metric(output, y)
            )
            expected[name] = metric.item()
    expected["accuracy"] = (output.argmax(1) == y).double().mean().item()
    expected["loss"] = nn.functional.cross_entropy(output, y, weight=CLASS_WEIGHTS).item()
    expected["num_samples"] = 16 * STEPS
    for found in results:
        assert found == pytest.approx(expected, abs=1e-6)


def _correlated(worker: GangWorker, counts: Sequence[int]) -> dict[str, float]:
    metrics = [torchmetrics.PearsonCorrCoef(), torchmetrics.R2Score(), torchmetrics.MaxMetric()]
    spec = TorchSpec(model=_regressor, loss=nn.MSELoss(), metrics=[*metrics[:2], "mse", "mae"])
    replica = TorchReplica(spec, device="cpu")
    for step in range(STEPS):
        replica.eval_step(share(*_data(step, classes=False), counts, worker.rank))
    return replica.merge_tallies(worker.all_gather(replica.take_tallies()))


@pytest.mark.parametrize("counts", CUTS)
def test_states_without_a_reduction_are_joined_by_the_metric_itself(counts: Sequence[int]) -> None:
    results = run_ranks(2, _correlated, counts)

    torch.manual_seed(0)
    model = _regressor()
    data = [_data(step, classes=False) for step in range(STEPS)]
    x, y = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*data, strict=True))
    output = model(x).detach().reshape(-1)
    for found in results:
        assert found["PearsonCorrCoef"] == pytest.approx(np.corrcoef(output, y)[0, 1], abs=1e-5)
        residual, total = ((y - output) ** 2).sum().item(), ((y - y.mean()) ** 2).sum().item()
        assert found["R2Score"] == pytest.approx(1 - residual / total, abs=1e-5)
        assert found["mse"] == pytest.approx(((y - output) ** 2).mean().item(), abs=1e-6)
        assert found["mae"] == pytest.approx((y - output).abs().mean().item(), abs=1e-6)
        assert found["loss"] == pytest.approx(found["mse"], abs=1e-6)


def _clipped(worker: GangWorker) -> Weights:
    spec = TorchSpec(
        model=_classifier,
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        loss=nn.CrossEntropyLoss(),
        clip_norm=0.01,
    )
    replica = TorchReplica(spec, device="cpu", rank=worker.rank)
    attach(replica, worker)
    replica.train_step(share(*_data(0, classes=True), (4, 12), worker.rank))
    return dict(replica.model.state_dict())


def test_gradients_are_clipped_after_ranks_have_agreed() -> None:
    results = run_ranks(2, _clipped)

    torch.manual_seed(0)
    model = _classifier()
    x, y = (torch.from_numpy(part) for part in _data(0, classes=True))
    nn.functional.cross_entropy(model(x), y).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert norm > 0.01
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    _assert_equal_weights(results, dict(model.state_dict()))
