"""`zoo.orca.learn.metrics`: metrics of Orca's estimators. Those of workers are merged, never averaged.

`score(outputs, labels)` is the value for arrays. Classes are counted from 0, unless the loss of a BigDL model
counts them from 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kindler.compat.bigdl.optim.validation import AUC as AUC
from kindler.compat.bigdl.optim.validation import MAE as MAE
from kindler.compat.bigdl.optim.validation import MSE as MSE
from kindler.compat.bigdl.optim.validation import Top1Accuracy, ValidationMethod
from kindler.compat.bigdl.optim.validation import Top5Accuracy as Top5Accuracy

Array = Any
_TINY = 1e-7


class Accuracy(Top1Accuracy):
    """The share of rows whose largest output is the label's; of single outputs, those on the side of 0.5."""

    def __init__(self, zero_based_label: bool = True, bigdl_type: str = "float") -> None:
        self.first_class = 0 if zero_based_label else 1

    def score(self, output: Array, label: Array) -> float:
        if output.ndim == label.ndim and output.shape == label.shape and output.dtype.kind == "f":
            if output.ndim > 1 and output.shape[-1] > 1 and np.all(label.sum(-1) == 1):
                return super().score(output, label)
            return float(np.mean((output >= 0.5) == (label > 0.5)))
        return super().score(output, label)


class SparseCategoricalAccuracy(Accuracy):
    """`Accuracy` of class numbers."""


class CategoricalAccuracy(Accuracy):
    """`Accuracy` of one-hot labels."""


class BinaryAccuracy(Accuracy):
    """The share of outputs on their label's side of 0.5."""

    def score(self, output: Array, label: Array) -> float:
        return float(np.mean((output.reshape(-1) >= 0.5) == (label.reshape(-1) > 0.5)))


class _Named(ValidationMethod):
    def __init__(self, bigdl_type: str = "float") -> None:
        self.tag = type(self).__name__


class _Losses(_Named):
    """The mean over rows of a loss of probabilities."""


class BinaryCrossEntropy(_Losses):
    def score(self, output: Array, label: Array) -> float:
        shares = np.clip(output.reshape(-1).astype(np.float64), _TINY, 1 - _TINY)
        truth = label.reshape(-1)
        return float(-np.mean(truth * np.log(shares) + (1 - truth) * np.log(1 - shares)))


class CategoricalCrossEntropy(_Losses):
    def score(self, output: Array, label: Array) -> float:
        return float(-np.mean((label * np.log(_shares(output))).sum(-1)))


class SparseCategoricalCrossEntropy(_Losses):
    by_class = True

    def score(self, output: Array, label: Array) -> float:
        shares = _shares(output).reshape(-1, output.shape[-1])
        return float(-np.mean(np.log(shares[np.arange(len(shares)), label.reshape(-1).astype(np.int64)])))


class KLDivergence(_Losses):
    def score(self, output: Array, label: Array) -> float:
        truth = np.clip(label.astype(np.float64), _TINY, 1)
        return float(np.mean((truth * np.log(truth / np.clip(output, _TINY, 1))).sum(-1)))


class Poisson(_Losses):
    def score(self, output: Array, label: Array) -> float:
        return float(np.mean(output - label.reshape(output.shape) * np.log(output + _TINY)))


class _OfCounts(_Named):
    """A quotient of counts, which torchmetrics merges over workers; `counted` is its name there."""

    counted: str


class Precision(_OfCounts):
    """Of the rows above 0.5, the share whose label is 1."""

    counted = "BinaryPrecision"


class Recall(_OfCounts):
    """Of the rows whose label is 1, the share above 0.5."""

    counted = "BinaryRecall"


class F1Score(_OfCounts):
    """The harmonic mean of precision and recall."""

    counted = "BinaryF1Score"


def _shares(output: Array) -> Array:
    clipped = np.clip(output.astype(np.float64), _TINY, 1 - _TINY)
    return clipped / clipped.sum(-1, keepdims=True)
