"""Metrics by name against scikit-learn on all rows, however the rows are cut into batches and over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from gang import GangWorker, run_ranks
from sklearn import metrics as sk
from torch import nn

from kindler import Estimator
from kindler.errors import ConfigError
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from tests.unit.with_torch.rows import Array, batch, share

pytestmark = pytest.mark.torch

STEPS, ROWS = 3, 16
CLASS_NAMES = ["accuracy", "top_2", "auc", "f1", "precision", "recall", "log_loss"]
NUMBER_NAMES = ["mse", "rmse", "mae", "r2"]
Figures = dict[str, float]


def _given() -> nn.Module:
    """A model whose outputs are its inputs."""
    return nn.Identity()


def _binary(rng: np.random.Generator) -> tuple[Array, Array]:
    scores = np.round(rng.normal(size=(ROWS, 1)), 1).astype(np.float32)  # some are equal
    return scores, rng.integers(0, 2, ROWS)


def _many(rng: np.random.Generator) -> tuple[Array, Array]:
    return rng.normal(size=(ROWS, 4)).astype(np.float32), rng.integers(0, 3, ROWS)  # a class is never true


def _numbers(rng: np.random.Generator) -> tuple[Array, Array]:
    labels = 1e4 + rng.normal(size=(ROWS, 2))  # far from 0, where sums of squares lose digits
    return (labels + rng.normal(size=labels.shape)).astype(np.float64), labels


def _rows(kind: Callable[..., Any]) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(5)
    return [kind(rng) for _ in range(STEPS)]


def _judge(worker: GangWorker, counts: Sequence[int]) -> list[Figures]:
    found = []
    for kind, loss, names in (
        (_binary, nn.BCEWithLogitsLoss(), [n for n in CLASS_NAMES if n != "top_2"]),
        (_many, nn.CrossEntropyLoss(), CLASS_NAMES),
        (_numbers, nn.MSELoss(), NUMBER_NAMES),
    ):
        replica = TorchReplica(TorchSpec(model=_given, loss=loss, metrics=names), device="cpu")
        for x, y in _rows(kind):
            replica.eval_step(share(x, y, counts, worker.rank))
        found.append(replica.merge_tallies(worker.all_gather(replica.take_tallies())))
    return found


def _all(kind: Callable[..., Any]) -> tuple[Array, Array]:
    parts = _rows(kind)
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _wanted() -> list[Figures]:
    x, y = _all(_binary)
    guess, p = (x[:, 0] > 0).astype(int), torch.sigmoid(torch.from_numpy(x[:, 0]).double()).numpy()
    two = {
        "accuracy": sk.accuracy_score(y, guess),
        "auc": sk.roc_auc_score(y, x[:, 0]),
        "f1": sk.f1_score(y, guess),
        "precision": sk.precision_score(y, guess),
        "recall": sk.recall_score(y, guess),
        "log_loss": sk.log_loss(y, p),
    }
    x, y = _all(_many)
    probabilities = torch.softmax(torch.from_numpy(x).double(), 1).numpy()
    options: dict[str, Any] = {"average": "macro", "zero_division": 0}
    many = {
        "accuracy": sk.accuracy_score(y, x.argmax(1)),
        "top_2": sk.top_k_accuracy_score(y, x, k=2, labels=range(4)),
        "auc": np.mean([sk.roc_auc_score(y == place, probabilities[:, place]) for place in range(3)]),
        "f1": sk.f1_score(y, x.argmax(1), **options),
        "precision": sk.precision_score(y, x.argmax(1), **options),
        "recall": sk.recall_score(y, x.argmax(1), **options),
        "log_loss": sk.log_loss(y, probabilities, labels=range(4)),
    }
    x, y = _all(_numbers)
    mse = sk.mean_squared_error(y, x)
    numbers = {
        "mse": mse,
        "rmse": math.sqrt(mse),
        "mae": sk.mean_absolute_error(y, x),
        "r2": sk.r2_score(y, x),
    }
    return [two, many, numbers]


@pytest.mark.parametrize("counts", [(5, 11), (16, 0)])
def test_two_ranks_of_uneven_rows_have_the_metrics_of_scikit_learn_on_all_rows(counts: Sequence[int]) -> None:
    for found in run_ranks(2, _judge, counts):
        for figures, wanted in zip(found, _wanted(), strict=True):
            assert {name: figures[name] for name in wanted} == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def _replica(loss: Any, metrics: Any) -> TorchReplica:
    return TorchReplica(TorchSpec(model=_given, loss=loss, metrics=metrics), device="cpu")


def _figures(loss: Any, metrics: Any, outputs: Array, labels: Array) -> Figures:
    replica = _replica(loss, metrics)
    replica.eval_step(batch(outputs.astype(np.float32), labels))
    return replica.merge_tallies([replica.take_tallies()])


def test_two_outputs_of_two_classes_are_judged_as_one_score_of_the_second() -> None:
    x, y = _all(_binary)
    both = np.concatenate([np.zeros_like(x), x], axis=1)
    names = ["accuracy", "auc", "f1", "precision", "recall", "log_loss"]

    found = _figures(nn.CrossEntropyLoss(), names, both, y)

    assert {name: found[name] for name in names} == pytest.approx(_wanted()[0], rel=1e-6)


def test_ignored_targets_count_in_no_metric_of_classes() -> None:
    x, y = _all(_many)
    kept = np.arange(len(y)) % 3 > 0
    names = [name for name in CLASS_NAMES if name != "accuracy"]

    found = _figures(nn.CrossEntropyLoss(), names, x, np.where(kept, y, -100))
    wanted = _figures(nn.CrossEntropyLoss(), names, x[kept], y[kept])

    assert {name: found[name] for name in names} == pytest.approx({name: wanted[name] for name in names})


def test_states_of_metrics_go_on_in_the_middle_of_an_epoch() -> None:
    (x1, y1), (x2, y2), _ = _rows(_many)
    spec = TorchSpec(
        model=lambda: nn.Linear(4, 4),
        optimizer=torch.optim.SGD,
        loss=nn.CrossEntropyLoss(),
        metrics=["auc", "f1"],
    )
    straight, resumed, joined = (TorchReplica(spec, device="cpu") for _ in range(3))
    straight.begin_epoch(1)
    straight.train_step(batch(x1, y1))
    state, local = straight.state(), straight.local_state()
    straight.train_step(batch(x2, y2))
    resumed.load_state(state)
    resumed.begin_epoch(1)
    resumed.load_local_state(local)
    joined.load_state(state)
    joined.begin_epoch(1)
    joined.join_local_states([local], size=1)
    for other in (resumed, joined):
        other.train_step(batch(x2, y2))
        assert other.merge_tallies([other.take_tallies()]) == pytest.approx(
            straight.counter.merge([_taken(straight)])
        )


def _taken(replica: TorchReplica) -> bytes:
    """The tallies, which stay."""
    kept = replica.counter.keep()
    data = replica.take_tallies()
    replica.counter.restore([kept])
    return data


def test_what_no_row_tells_is_nan() -> None:
    one_class = _figures(nn.BCEWithLogitsLoss(), ["auc", "recall"], np.ones((4, 1)), np.ones(4))
    assert math.isnan(one_class["auc"])
    assert one_class["recall"] == 1.0
    empty = _replica(nn.MSELoss(), ["r2", "rmse"])
    assert all(
        math.isnan(v) for k, v in empty.merge_tallies([empty.take_tallies()]).items() if k != "num_samples"
    )


def test_curves_and_matrices_are_one_entry_of_the_history() -> None:
    x, y = _all(_binary)
    metrics = {
        "roc": torchmetrics.ROC(task="binary", thresholds=5),
        "counts": torchmetrics.ConfusionMatrix(task="binary"),
        "f1": torchmetrics.F1Score(task="multiclass", num_classes=2, average="none"),
    }
    found = _figures(nn.BCEWithLogitsLoss(), {k: metrics[k] for k in ("roc", "counts")}, x, y)

    assert set(found) == {"loss", "num_samples", "roc", "counts"}
    assert [len(part) for part in found["roc"]] == [5, 5, 5]  # type: ignore[arg-type]
    assert found["counts"] == sk.confusion_matrix(y, x[:, 0] > 0).tolist()
    both = np.concatenate([np.zeros_like(x), x], axis=1)
    by_class = _figures(nn.CrossEntropyLoss(), {"f1": metrics["f1"]}, both, y)
    assert set(by_class) == {"loss", "num_samples", "f1_0", "f1_1"}


@pytest.mark.parametrize("given", ["f2", ["mse", "f2"], {"mine": "f2"}, "top_0", "top_k"])
def test_a_name_that_is_none_is_refused_by_the_constructor_with_the_choices(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)unknown metric '(f2|top_0|top_k)'.*'accuracy', 'auc', 'f1'.*top_5"
    ):
        Estimator.from_torch(model=nn.Linear(2, 1), metrics=given)
    with pytest.raises(ConfigError, match="a metric must be"):
        Estimator.from_torch(model=nn.Linear(2, 1), metrics=[3])


def test_other_names_of_a_metric_are_kept_in_the_history() -> None:
    x, y = _all(_numbers)
    found = _figures(
        nn.MSELoss(), ["mean_squared_error", "r2_score", "root_mean_squared_error"], x - 1e4, y - 1e4
    )

    assert found["root_mean_squared_error"] == pytest.approx(math.sqrt(found["mean_squared_error"]))
    assert "r2_score" in found


def _own(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.sum() + targets.sum()) * 0.0


def test_what_a_loss_leaves_open_is_refused_rather_than_guessed() -> None:
    x, y = _all(_many)
    with pytest.raises(
        ConfigError, match=r"what 'auc' means is not clear here.*not probabilities that sum to 1"
    ):
        _figures(_own, "auc", x, y)
    scores, two = _all(_binary)
    with pytest.raises(ConfigError, match=r"what 'f1' means is not clear here.*outside 0 to 1"):
        _figures(_own, "f1", scores, two)
    with pytest.raises(ConfigError, match="best 5 classes; the model's output has 4"):
        _figures(nn.CrossEntropyLoss(), "top_5", x, y)
    assert _figures(_own, "auc", scores, two)["auc"] == pytest.approx(sk.roc_auc_score(two, scores[:, 0]))
