"""Labels that a loss cannot mean are refused with column and row; "accuracy" follows the labels' form."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

from kindler.errors import ConfigError, DataError
from kindler.frameworks.torch.replica import TorchReplica, TorchSpec
from tests.unit.with_torch.rows import Array, batch

pytestmark = pytest.mark.torch

X = np.random.default_rng(0).standard_normal((12, 4), dtype=np.float32)
CLASSES = np.arange(12) % 3
SGD = functools.partial(torch.optim.SGD, lr=0.1)
BY_CLASS = [
    nn.CrossEntropyLoss(),
    F.cross_entropy,
    functools.partial(F.cross_entropy, label_smoothing=0.1),
    nn.NLLLoss(),
]


def _replica(loss: Any, model: Any = None, **options: Any) -> TorchReplica:
    spec = TorchSpec(model=model or nn.Linear(4, 3), loss=loss, optimizer=SGD, **options)
    return TorchReplica(spec, device="cpu", label_names=("kind",))


def _with(place: int, value: Any, dtype: Any = np.float32) -> Array:
    labels = CLASSES.astype(dtype)
    labels[place] = value
    return labels


@pytest.mark.parametrize("loss", BY_CLASS)
@pytest.mark.parametrize("step", ["train_step", "eval_step"])
@pytest.mark.parametrize(
    ("labels", "complaint"),
    [
        (_with(7, 0.5), r"is 0\.5, which is not a class number.*from 0 to 2"),
        (_with(7, np.nan), "is NaN"),
        (_with(7, 3), r"is 3\.0, but the model's output has 3 classes: labels must be from 0 to 2"),
        (_with(7, 3, np.int64), "is 3, but the model's output has 3 classes"),
        (_with(7, -1, np.int64), "is -1.*with -100, which the loss ignores"),
        (_with(7, 1e20), "3 classes"),
        (_with(7, np.inf), "3 classes"),
        (_with(7, 2**62, np.int64), "3 classes"),
        (_with(7, 0.5).reshape(-1, 1), r"is 0\.5"),
    ],
)
def test_a_label_that_is_no_class_number_is_refused_with_column_and_row(
    loss: Any, step: str, labels: Array, complaint: str
) -> None:
    replica = _replica(loss, accumulation_steps=2)

    with pytest.raises(
        DataError, match=rf"(?s)column 'kind', row 7 of the 12 that worker 0.*{complaint}"
    ) as e:
        getattr(replica, step)(batch(X, labels))
    assert e.value.column == "kind"


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (nn.CrossEntropyLoss(), CLASSES.astype(np.float32)),
        (nn.CrossEntropyLoss(), CLASSES == 1),
        (nn.CrossEntropyLoss(), _with(3, -100, np.int64)),
        (nn.CrossEntropyLoss(), _with(3, -100)),
        (nn.CrossEntropyLoss(ignore_index=255), _with(3, 255, np.uint8)),
        (functools.partial(F.cross_entropy, ignore_index=-1), _with(3, -1, np.int64)),
    ],
)
def test_whole_numbers_of_any_type_and_ignored_ones_are_class_numbers(loss: Any, labels: Array) -> None:
    replica = _replica(loss)
    outputs, wanted = replica.predict((X,))[0], torch.from_numpy(labels.astype(np.int64))
    replica.train_step(batch(X, labels))

    assert replica.running_loss() == pytest.approx(loss(torch.from_numpy(outputs), wanted).item(), rel=1e-5)


def test_a_complaint_names_the_row_as_the_batch_does() -> None:
    rows = batch(X, _with(7, 9))
    rows.where = lambda row: 100 + row

    with pytest.raises(DataError, match="row 107") as error:
        _replica(nn.CrossEntropyLoss(), accumulation_steps=3).train_step(rows)
    assert error.value.row == 107


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.BCELoss(), F.binary_cross_entropy])
@pytest.mark.parametrize("value", [2.0, -1.0, np.nan])
def test_labels_of_a_binary_loss_lie_between_0_and_1(loss: Any, value: float) -> None:
    replica = _replica(loss, nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()))

    with pytest.raises(DataError, match=r"column 'kind', row 7.*needs labels from 0 to 1"):
        replica.eval_step(batch(X, np.where(np.arange(12) == 7, value, CLASSES == 1).astype(np.float32)))


def test_probabilities_of_classes_lie_between_0_and_1() -> None:
    soft = np.full((12, 3), 1 / 3, np.float32)
    soft[5, 1] = -0.25

    with pytest.raises(DataError, match=r"column 'kind', row 5.*is -0\.25"):
        _replica(nn.CrossEntropyLoss()).train_step(batch(X, soft))


def test_one_output_is_one_class_and_not_two() -> None:
    replica = _replica(nn.CrossEntropyLoss(), nn.Linear(4, 1))

    with pytest.raises(DataError, match=r"row 1 .*is 1\.0, but the model's output has 1 classes"):
        replica.train_step(batch(X, (CLASSES == 1).astype(np.float32).reshape(-1, 1)))


def test_an_elementwise_loss_does_not_take_values_in_another_order() -> None:
    replica = _replica(nn.MSELoss(), nn.Unflatten(1, (2, 2)))
    wide = _replica(nn.MSELoss(), nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3))))

    replica.eval_step(batch(X, X))  # flat: the same order
    with pytest.raises(DataError, match=r"\(12, 2, 3\) and the label \(12, 3, 2\).*in the same order"):
        wide.train_step(batch(X, np.zeros((12, 3, 2), np.float32)))


def _accuracy(loss: Any, outputs: Array, labels: Array) -> float:
    """Of a model whose outputs are these."""
    replica = _replica(loss, nn.Identity(), metrics="accuracy")
    replica.eval_step(batch(outputs.astype(np.float32), labels))
    return replica.merge_tallies([replica.take_tallies()])["accuracy"]


MANY = (np.random.default_rng(1).random((12, 3)) > 0.5).astype(np.float32)  # several labels, or none, a row


def test_a_perfect_multi_label_model_has_accuracy_1() -> None:
    assert _accuracy(nn.BCEWithLogitsLoss(), 2 * MANY - 1, MANY) == 1.0
    assert _accuracy(nn.BCELoss(), 0.2 + 0.6 * MANY, MANY) == 1.0
    assert _accuracy(F.binary_cross_entropy_with_logits, 1 - 2 * MANY, MANY) == 0.0


@pytest.mark.parametrize("task", ["multilabel", "binary", "multiclass"])
def test_accuracy_equals_that_of_torchmetrics_for_every_form_of_labels(task: Any) -> None:
    draw = np.random.default_rng(2)
    forms: dict[str, Any] = {
        "multilabel": (nn.BCEWithLogitsLoss(), draw.normal(size=(12, 3)), MANY, {"num_labels": 3}),
        "binary": (nn.BCELoss(), draw.random((12, 1)), MANY[:, 0], {}),
        "multiclass": (nn.CrossEntropyLoss(), draw.normal(size=(12, 3)), CLASSES, {"num_classes": 3}),
    }
    loss, outputs, labels, options = forms[task]
    wanted = torchmetrics.functional.accuracy(
        torch.from_numpy(outputs).reshape(labels.shape if task == "binary" else outputs.shape),
        torch.from_numpy(labels).long(),
        task=task,
        average="micro",
        **options,
    )

    assert _accuracy(loss, outputs, labels) == pytest.approx(wanted.item())


def test_one_hot_and_soft_labels_of_classes_count_by_their_largest() -> None:
    outputs = np.eye(3)[CLASSES]
    assert _accuracy(nn.CrossEntropyLoss(), outputs, np.eye(3, dtype=np.float32)[CLASSES]) == 1.0
    assert _accuracy(nn.CrossEntropyLoss(), outputs, (0.1 + 0.7 * outputs).astype(np.float32)) == 1.0


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss(), lambda out, target: out.sum() * 0.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, bool])
def test_one_hot_labels_of_any_loss_and_type_count_by_class(loss: Any, dtype: Any) -> None:
    outputs = np.eye(3)[np.where(np.arange(12) < 9, CLASSES, (CLASSES + 1) % 3)]

    assert _accuracy(loss, outputs, np.eye(3)[CLASSES].astype(dtype)) == 0.75


def test_a_loss_of_class_numbers_refuses_one_hot_labels_in_words() -> None:
    with pytest.raises(DataError, match=r"(?s)shape \(12, 3\).*needs class numbers.*Hint"):
        _accuracy(nn.NLLLoss(), np.eye(3)[CLASSES], np.eye(3, dtype=np.int64)[CLASSES])


def test_ignored_targets_do_not_count_in_accuracy() -> None:
    labels = np.where(np.arange(12) < 6, -100, CLASSES)
    outputs = np.eye(3)[np.where(np.arange(12) < 9, CLASSES, (CLASSES + 1) % 3)]

    assert _accuracy(nn.CrossEntropyLoss(), outputs, labels) == 0.5


def _own(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.sum() + targets.sum()) * 0.0


@pytest.mark.parametrize(
    ("loss", "outputs", "labels", "why"),
    [
        (_own, np.zeros((12, 3)), MANY, "one class of several or several labels"),
        (nn.MSELoss(), np.zeros((12, 3)), MANY, "one class of several or several labels"),
        (_own, np.zeros(12), np.linspace(0, 1, 12, dtype=np.float32), "labels other than 0 and 1"),
        (_own, np.linspace(-3, 3, 12), MANY[:, 0], "outputs outside 0 to 1"),
    ],
)
def test_accuracy_is_refused_where_its_meaning_would_be_a_guess(
    loss: Any, outputs: Array, labels: Array, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)what 'accuracy' means is not clear here.*{why}.*Hint"):
        _accuracy(loss, outputs, labels)


def test_accuracy_of_a_loss_of_the_users_own_is_known_by_the_labels_form() -> None:
    assert _accuracy(_own, np.eye(3)[CLASSES], CLASSES) == 1.0
    assert _accuracy(_own, 0.2 + 0.6 * MANY[:, 0], MANY[:, 0]) == 1.0
    assert _accuracy(nn.MSELoss(), 3 * MANY[:, 0] - 1, MANY[:, 0]) == 1.0


def test_metrics_of_torchmetrics_are_not_given_labels_cut_to_whole_numbers() -> None:
    metric = torchmetrics.Accuracy(task="binary")
    replica = _replica(nn.BCEWithLogitsLoss(), nn.Linear(4, 1), metrics=metric)

    with pytest.raises(DataError, match=r"BinaryAccuracy needs class numbers.*0\.5"):
        replica.eval_step(batch(X, np.full(12, 0.5, np.float32)))
