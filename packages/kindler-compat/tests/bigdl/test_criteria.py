"""Each criterion against a function of numpy: its loss, and its gradients by differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numeric
import numpy as np
import pytest
import torch

from kindler.compat.bigdl.nn import criterion as criteria
from kindler.compat.bigdl.nn.criterion import *
from kindler.errors import ConfigError, DataError
from kindler.frameworks.torch.loss import LossRule

X = np.random.default_rng(3).permutation(np.linspace(-1.3, 1.7, 12)).reshape(4, 3)
Y = np.random.default_rng(4).permutation(np.linspace(-1.0, 1.1, 12)).reshape(4, 3)
SHARES = np.exp(X) / np.exp(X).sum(1, keepdims=True)
GOALS = np.exp(Y) / np.exp(Y).sum(1, keepdims=True)
SIGNS = np.where(Y > 0, 1.0, -1.0)
BITS = (Y > 0).astype(float)
CLASSES = np.array([1.0, 3.0, 2.0, 3.0])
WEIGHTS = np.array([0.5, 2.0, 1.0])
ROWS = np.arange(4)
PICKED = CLASSES.astype(int) - 1
EYE = np.eye(3)[PICKED]


def log_softmax(x: Any, axis: int = 1) -> Any:
    return x - np.log(np.exp(x).sum(axis, keepdims=True))


def cosine(x: Any, y: Any) -> Any:
    return (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)


def smooth(x: Any, y: Any) -> Any:
    gap = np.abs(x - y)
    return np.where(gap < 1, 0.5 * gap**2, gap - 0.5)


def margins(x: Any) -> Any:
    """Of each row, the sum of `max(0, 1 - x[right] + x[other])` over the other classes."""
    gaps = np.maximum(0, 1 - x[ROWS, PICKED][:, None] + x)
    return (gaps * (1 - EYE)).sum(1)


def several_classes(x: Any, labels: Any) -> Any:
    total = 0.0
    for row, numbers in zip(x, labels.astype(int), strict=True):
        right = [n - 1 for n in numbers[: list(numbers).index(0)]]
        others = [n for n in range(len(row)) if n not in right]
        total += sum(max(0, 1 - row[r] + row[o]) for r in right for o in others) / len(row)
    return total / len(x)


def steps(x: Any) -> Any:
    return sum(((x[:, step] - TARGET[:, step]) ** 2).mean() for step in range(2))


TARGET = np.stack([Y[:, :2], Y[:, 1:]], 1)
PLACES = np.array([[[1.0, 2.0]], [[3.0, 0.0]]])
MAPS = X.reshape(2, 3, 1, 2)

# The criterion, outputs, target, and the loss as a function of the outputs.
CASES: dict[str, list[tuple[Any, Any, Any, Callable[..., Any]]]] = {
    "ClassNLLCriterion": [
        (ClassNLLCriterion(), X, CLASSES, lambda x: -x[ROWS, PICKED].mean()),
        (ClassNLLCriterion(size_average=False), X, CLASSES, lambda x: -x[ROWS, PICKED].sum()),
        (
            ClassNLLCriterion(WEIGHTS),
            X,
            CLASSES[:, None],
            lambda x: -(WEIGHTS[PICKED] * x[ROWS, PICKED]).sum() / WEIGHTS[PICKED].sum(),
        ),
        (ClassNLLCriterion(logProbAsInput=False), SHARES, CLASSES, lambda x: -np.log(x[ROWS, PICKED]).mean()),
        (
            ClassNLLCriterion(),
            X,
            np.array([1.0, -1.0, 2.0, -1.0]),
            lambda x: -(x[0, 0] + x[2, 1]) / 2,
        ),
    ],
    "CrossEntropyCriterion": [
        (CrossEntropyCriterion(), X, CLASSES, lambda x: -log_softmax(x)[ROWS, PICKED].mean()),
        (
            CrossEntropyCriterion(WEIGHTS),
            X,
            CLASSES,
            lambda x: -(WEIGHTS[PICKED] * log_softmax(x)[ROWS, PICKED]).sum() / WEIGHTS[PICKED].sum(),
        ),
    ],
    "SoftmaxWithCriterion": [
        (
            SoftmaxWithCriterion(ignore_label=0),
            MAPS,
            PLACES,
            lambda x: (
                -(log_softmax(x)[0, 0, 0, 0] + log_softmax(x)[0, 1, 0, 1] + log_softmax(x)[1, 2, 0, 0]) / 3
            ),
        ),
        (
            SoftmaxWithCriterion(ignore_label=0, normalize_mode="BATCH_SIZE"),
            MAPS,
            PLACES,
            lambda x: (
                -(log_softmax(x)[0, 0, 0, 0] + log_softmax(x)[0, 1, 0, 1] + log_softmax(x)[1, 2, 0, 0]) / 2
            ),
        ),
    ],
    "CategoricalCrossEntropy": [
        (
            CategoricalCrossEntropy(),
            SHARES,
            EYE,
            lambda x: -np.log((x / x.sum(1, keepdims=True))[ROWS, PICKED]).mean(),
        )
    ],
    "MSECriterion": [(MSECriterion(), X, Y, lambda x: ((x - Y) ** 2).mean())],
    "AbsCriterion": [
        (AbsCriterion(), X, Y, lambda x: np.abs(x - Y).mean()),
        (AbsCriterion(False), X, Y, lambda x: np.abs(x - Y).sum()),
    ],
    "SmoothL1Criterion": [
        (SmoothL1Criterion(), X, Y, lambda x: smooth(x, Y).mean()),
        (SmoothL1Criterion(False), X, Y, lambda x: smooth(x, Y).sum()),
    ],
    "BCECriterion": [
        (BCECriterion(), SHARES, BITS, lambda x: -(BITS * np.log(x) + (1 - BITS) * np.log(1 - x)).mean()),
        (
            BCECriterion(WEIGHTS),
            SHARES,
            BITS,
            lambda x: -(WEIGHTS * (BITS * np.log(x) + (1 - BITS) * np.log(1 - x))).mean(),
        ),
    ],
    "DistKLDivCriterion": [
        (DistKLDivCriterion(), X, GOALS, lambda x: (GOALS * (np.log(GOALS) - x)).mean()),
        (DistKLDivCriterion(False), X, GOALS, lambda x: (GOALS * (np.log(GOALS) - x)).sum()),
    ],
    "KullbackLeiblerDivergenceCriterion": [
        (
            KullbackLeiblerDivergenceCriterion(),
            SHARES,
            GOALS,
            lambda x: (GOALS * np.log(GOALS / x)).sum(1).mean(),
        )
    ],
    "KLDCriterion": [
        (KLDCriterion(), [X, Y], Y, lambda m, v: 0.5 * (m**2 + np.exp(v) - 1 - v).sum() / 4),
        (KLDCriterion(False), [X, Y], Y, lambda m, v: 0.5 * (m**2 + np.exp(v) - 1 - v).sum()),
    ],
    "GaussianCriterion": [
        (
            GaussianCriterion(),
            [X, Y],
            SIGNS,
            lambda m, v: 0.5 * (np.log(2 * np.pi) + v + (SIGNS - m) ** 2 / np.exp(v)).sum(),
        )
    ],
    "MarginCriterion": [
        (MarginCriterion(0.5), X, SIGNS, lambda x: np.maximum(0, 0.5 - SIGNS * x).mean()),
        (MarginCriterion(squared=True), X, SIGNS, lambda x: (np.maximum(0, 1 - SIGNS * x) ** 2).mean()),
    ],
    "SoftMarginCriterion": [(SoftMarginCriterion(), X, SIGNS, lambda x: np.log1p(np.exp(-SIGNS * x)).mean())],
    "HingeEmbeddingCriterion": [
        (
            HingeEmbeddingCriterion(0.8),
            X,
            SIGNS,
            lambda x: np.where(SIGNS == 1, x, np.maximum(0, 0.8 - x)).mean(),
        )
    ],
    "MarginRankingCriterion": [
        (
            MarginRankingCriterion(0.3),
            [X, Y],
            SIGNS,
            lambda x, y: np.maximum(0, -SIGNS * (x - y) + 0.3).mean(),
        )
    ],
    "CosineEmbeddingCriterion": [
        (
            CosineEmbeddingCriterion(0.1),
            [X, Y],
            np.array([1.0, -1.0, 1.0, -1.0]),
            lambda x, y: np.where([1, 0, 1, 0], 1 - cosine(x, y), np.maximum(0, cosine(x, y) - 0.1)).mean(),
        )
    ],
    "CosineDistanceCriterion": [(CosineDistanceCriterion(), X, Y, lambda x: (1 - cosine(x, Y)).mean())],
    "CosineProximityCriterion": [(CosineProximityCriterion(), X, Y, lambda x: -(cosine(x, Y) / 3).mean())],
    "L1Cost": [(L1Cost(), X, Y, lambda x: np.abs(x).sum())],
    "DotProductCriterion": [
        (DotProductCriterion(), X, Y, lambda x: (x * Y).sum()),
        (DotProductCriterion(True), X, Y, lambda x: (x * Y).sum() / 4),
    ],
    "DiceCoefficientCriterion": [
        (
            DiceCoefficientCriterion(),
            SHARES,
            BITS,
            lambda x: (1 - (2 * (x * BITS).sum(1) + 1) / (x.sum(1) + BITS.sum(1) + 1)).mean(),
        )
    ],
    "PoissonCriterion": [(PoissonCriterion(), SHARES, BITS, lambda x: (x - BITS * np.log(x + 1e-7)).mean())],
    "MeanAbsolutePercentageCriterion": [
        (MeanAbsolutePercentageCriterion(), X, Y, lambda x: 100 * (np.abs(x - Y) / np.abs(Y)).mean())
    ],
    "MeanSquaredLogarithmicCriterion": [
        (
            MeanSquaredLogarithmicCriterion(),
            SHARES,
            GOALS,
            lambda x: ((np.log1p(x) - np.log1p(GOALS)) ** 2).mean(),
        )
    ],
    "MultiLabelMarginCriterion": [
        (
            MultiLabelMarginCriterion(),
            X,
            np.array([[1.0, 3.0, 0.0], [2.0, 0.0, 0.0], [3.0, 0.0, 0.0], [1.0, 2.0, 0.0]]),
            lambda x: several_classes(x, np.array([[1, 3, 0], [2, 0, 0], [3, 0, 0], [1, 2, 0]])),
        )
    ],
    "MultiLabelSoftMarginCriterion": [
        (
            MultiLabelSoftMarginCriterion(WEIGHTS),
            X,
            BITS,
            lambda x: (WEIGHTS * (np.log1p(np.exp(-x)) + (1 - BITS) * x)).mean(),
        )
    ],
    "MultiMarginCriterion": [
        (MultiMarginCriterion(), X, CLASSES, lambda x: margins(x).mean() / 3),
        (
            MultiMarginCriterion(weights=WEIGHTS, size_average=False),
            X,
            CLASSES,
            lambda x: (WEIGHTS[PICKED] * margins(x)).sum() / 3,
        ),
    ],
    "MultiCriterion": [
        (
            MultiCriterion().add(MSECriterion(), 0.5).add(AbsCriterion()),
            X,
            Y,
            lambda x: 0.5 * ((x - Y) ** 2).mean() + np.abs(x - Y).mean(),
        )
    ],
    "ParallelCriterion": [
        (
            ParallelCriterion().add(ClassNLLCriterion(), 0.5).add(MSECriterion()),
            [X, SHARES],
            [CLASSES, Y],
            lambda x, z: -0.5 * x[ROWS, PICKED].mean() + ((z - Y) ** 2).mean(),
        ),
        (
            ParallelCriterion(True).add(AbsCriterion()).add(MSECriterion()),
            [X, SHARES],
            Y,
            lambda x, z: np.abs(x - Y).mean() + ((z - Y) ** 2).mean(),
        ),
    ],
    "TimeDistributedCriterion": [
        (TimeDistributedCriterion(MSECriterion()), np.stack([X[:, :2], X[:, 1:]], 1), TARGET, steps),
        (
            TimeDistributedCriterion(MSECriterion(), True),
            np.stack([X[:, :2], X[:, 1:]], 1),
            TARGET,
            lambda x: steps(x) / 2,
        ),
    ],
}


def test_every_criterion_has_a_reference() -> None:
    assert {*CASES, "Criterion"} == set(criteria.__all__)


@pytest.mark.parametrize(
    ("name", "number"), [(n, i) for n, cases in CASES.items() for i in range(len(cases))]
)
def test_a_criterion_computes_what_numpy_does_and_its_gradients(name: str, number: int) -> None:
    criterion, outputs, target, reference = CASES[name][number]
    several = outputs if isinstance(outputs, list) else [outputs]
    tensors = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in several]
    labels = [torch.tensor(array) for array in (target if isinstance(target, list) else [target])]

    loss = criterion(*tensors, *labels)  # as the training loop calls it
    gradients = torch.autograd.grad(loss, tensors)

    np.testing.assert_allclose(loss.item(), reference(*several), rtol=1e-9)
    for found, expected in zip(gradients, numeric.gradients(reference, several, 1.0), strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-7)
    in_arrays = criterion.forward(outputs, target)  # as programs of BigDL do
    assert in_arrays == pytest.approx(reference(*several), rel=1e-4)
    back = criterion.backward(outputs, target)
    for found, expected in zip(back if isinstance(back, list) else [back], gradients, strict=True):
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "criterion", [ClassNLLCriterion(WEIGHTS), CrossEntropyCriterion(WEIGHTS), SoftmaxWithCriterion(-1)]
)
def test_means_of_uneven_parts_weigh_what_they_divide_by(criterion: Any) -> None:
    rule = LossRule(criterion)
    labels = torch.tensor([1.0, -1.0, 2.0, 3.0])
    scores = torch.tensor(X)

    whole = rule(scores, (labels,), 4)
    parts = [rule(scores[:1], (labels[:1],), 1), rule(scores[1:], (labels[1:],), 3)]

    total = sum(float(part.loss) * float(part.scale) for part in parts)
    assert total / sum(float(part.weight) for part in parts) == pytest.approx(float(whole.loss))


def test_rows_that_do_not_count_give_neither_loss_nor_gradient() -> None:
    scores = torch.tensor(X, requires_grad=True)
    loss = ClassNLLCriterion()(scores, torch.full((4,), -1.0))
    loss.backward()

    assert loss.item() == 0
    assert not scores.grad.any()


@pytest.mark.parametrize("label", [0.0, 4.0, 1.5, -2.0, float("nan")])
def test_labels_that_are_no_class_numbers_are_refused(label: float) -> None:
    for criterion in (ClassNLLCriterion(), CrossEntropyCriterion(), MultiMarginCriterion()):
        with pytest.raises(DataError, match="whole numbers from 1 to 3"):
            criterion(torch.tensor(X), torch.tensor([1.0, 2.0, label, 3.0]))


def test_labels_are_never_broadcast() -> None:
    with pytest.raises(DataError, match="one label value for each output value"):
        MSECriterion()(torch.tensor(X), torch.tensor(Y[:, 0]))
    with pytest.raises(ConfigError, match="4 rows of outputs and 8 labels"):
        ClassNLLCriterion()(torch.tensor(X), torch.ones(4, 2))
    with pytest.raises(ConfigError, match="2 weights for 3 classes"):
        ClassNLLCriterion(WEIGHTS[:2])(torch.tensor(X), torch.tensor(CLASSES))
    with pytest.raises(ConfigError, match="cannot be summed"):
        MultiCriterion().add(AbsCriterion()).add(AbsCriterion(False))
    with pytest.raises(ConfigError, match="add takes a criterion"):
        ParallelCriterion().add(torch.nn.MSELoss())
    with pytest.raises(ConfigError, match="1 criteria; received 2 outputs"):
        ParallelCriterion().add(MSECriterion())([torch.tensor(X)] * 2, [torch.tensor(Y)] * 2)
