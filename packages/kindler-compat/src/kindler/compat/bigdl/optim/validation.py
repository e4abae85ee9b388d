"""BigDL's validation methods, and the names by which results are known.

Means over rows are tensors of the graph. What is not a mean over rows (AUC) is computed on the driver from
outputs and labels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kindler.errors import ConfigError

__all__ = ["AUC", "MAE", "MSE", "NDCG", "HitRatio", "Loss", "Scores", "Top1Accuracy", "Top5Accuracy"]
__all__ += ["TreeNNAccuracy", "ValidationMethod", "named", "tag_of"]

Array = Any

_NAMES = {
    "Top1Accuracy": "top1accuracy acc accuracy categorical_accuracy sparse_categorical_accuracy"
    " binary_accuracy",
    "Top5Accuracy": "top5accuracy top5acc top_k_categorical_accuracy sparse_top_k_categorical_accuracy",
    "Loss": "loss",
    "MAE": "mae mean_absolute_error",
    "MSE": "mse mean_squared_error",
    "AucScore": "auc aucscore",
    "TreeNNAccuracy()": "treennaccuracy treennaccuracy()",
}
_ALIASES = {name: tag for tag, names in _NAMES.items() for name in names.split()}


def tag_of(name: str) -> str:
    """BigDL's name of a metric: "Top1Accuracy" for "acc"; names it does not have stay as they are."""
    return _ALIASES.get(name.lower(), name)


class ValidationMethod:
    """Base class."""

    tag: str  # the name of its result
    by_class = False  # whether its labels are class numbers
    first_class = 0  # the number of the first class
    rows: int | None = None  # how many rows make one group, where it judges groups

    def __init__(self, bigdl_type: str = "float") -> None: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def tensor(self, tf: Any, output: Any, label: Any) -> Any:
        """The mean over rows as a scalar tensor; None where it is not a mean over rows."""
        return None

    def score(self, output: Array, label: Array) -> float:
        raise NotImplementedError


class Top1Accuracy(ValidationMethod):
    """The share of rows whose largest output is the label's.

    An output of width 1 is compared with 0.5. Labels may be one-hot.
    """

    tag = "Top1Accuracy"
    by_class = True

    def tensor(self, tf: Any, output: Any, label: Any) -> Any:
        several = output.shape.rank is not None and output.shape.rank > 1 and output.shape[-1] != 1
        best = tf.argmax(output, -1, output_type=tf.int64) if several else tf.cast(output >= 0.5, tf.int64)
        truth = _classes_tf(tf, output, label) if several else tf.cast(tf.reshape(label, [-1]), tf.int64)
        return tf.reduce_mean(tf.cast(tf.equal(tf.reshape(best, [-1]), truth), tf.float32))

    def score(self, output: Array, label: Array) -> float:
        if output.ndim < 2 or output.shape[-1] == 1:
            return float(np.mean((output.reshape(-1) >= 0.5).astype(np.int64) == label.reshape(-1)))
        return float(np.mean(output.argmax(-1).reshape(-1) == _classes(output, label)))


class Top5Accuracy(ValidationMethod):
    """The share of rows whose label is among the five largest outputs."""

    tag = "Top5Accuracy"
    by_class = True

    def tensor(self, tf: Any, output: Any, label: Any) -> Any:
        width = output.shape[-1]
        count = 5 if width is None else min(5, int(width))
        best = tf.math.top_k(output, k=count).indices
        truth = tf.cast(_classes_tf(tf, output, label), tf.int32)
        return tf.reduce_mean(tf.cast(tf.reduce_any(tf.equal(best, truth[:, None]), axis=-1), tf.float32))

    def score(self, output: Array, label: Array) -> float:
        best = np.argsort(-output, axis=-1, kind="stable")[:, :5]
        return float(np.mean((best == _classes(output, label)[:, None]).any(axis=-1)))


class Loss(ValidationMethod):
    """The mean over rows of a criterion; None is the model's own, `ClassNLLCriterion()` for a model alone."""

    tag = "Loss"

    def __init__(self, cri: Any = None, bigdl_type: str = "float") -> None:
        self.cri = cri

    def score(self, output: Array, label: Array) -> float:
        from kindler.compat.bigdl.nn.criterion import ClassNLLCriterion

        return float((self.cri or ClassNLLCriterion()).forward(output, label))


class _Error(ValidationMethod):
    cost: str  # of numpy and of TensorFlow

    def tensor(self, tf: Any, output: Any, label: Any) -> Any:
        target = tf.reshape(tf.cast(label, output.dtype), tf.shape(output))
        return tf.reduce_mean(getattr(tf, self.cost)(output - target))

    def score(self, output: Array, label: Array) -> float:
        return float(np.mean(getattr(np, self.cost)(output - label.reshape(output.shape))))


class MAE(_Error):
    """The mean absolute error."""

    tag, cost = "MAE", "abs"


class MSE(_Error):
    """The mean squared error."""

    tag, cost = "MSE", "square"


class AUC(ValidationMethod):
    """The area under the ROC curve, exactly: the number of thresholds has no effect."""

    tag = "AucScore"
    by_class = True

    def __init__(self, threshold_num: int = 200, bigdl_type: str = "float") -> None: ...

    def score(self, output: Array, label: Array) -> float:
        if output.ndim == 2 and output.shape[1] == 2:  # of two classes: how much more likely the second is
            output = output[:, 1] - output[:, 0]
        scores, truth = output.reshape(-1), label.reshape(-1) > 0.5
        if len(scores) != len(truth):
            raise ConfigError(f"AUC needs outputs of one or two classes; received {output.shape}.")
        positives, negatives = int(truth.sum()), int((~truth).sum())
        if not positives or not negatives:
            raise ConfigError("AUC needs labels of both classes, 0 and 1.")
        _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # ties have their mean rank
        return float((ranks[truth].sum() - positives * (positives + 1) / 2) / (positives * negatives))


class HitRatio(ValidationMethod):
    """The share of groups of one positive row and `neg_num` others where it is among the `k` best."""

    name = "HitRate"

    def __init__(self, k: int = 10, neg_num: int = 100, bigdl_type: str = "float") -> None:
        self.k, self.neg_num, self.rows = k, neg_num, neg_num + 1
        self.tag = f"{self.name}@{k}"

    def gains(self, places: Array) -> Array:
        return places < self.k

    def score(self, output: Array, label: Array) -> float:
        size, rows = self.neg_num + 1, output.size
        if rows % size or (label.reshape(-1, size).sum(axis=1) != 1).any():
            raise ConfigError(
                f"{self!r} needs groups of {size} rows, of which one is positive; received {rows} rows."
            )
        groups = output.reshape(-1, size)
        best = groups[label.reshape(-1, size) == 1][:, None]
        return float(np.mean(self.gains((groups > best).sum(axis=1))))


class NDCG(HitRatio):
    """Normalized discounted cumulative gain of the positive row among the `k` best."""

    name = "NDCG"

    def gains(self, places: Array) -> Array:
        return np.where(places < self.k, np.log(2) / np.log(places + 2), 0.0)


class TreeNNAccuracy(ValidationMethod):
    """The accuracy of the first node of a tree's outputs."""

    tag = "TreeNNAccuracy()"
    by_class = True

    def score(self, output: Array, label: Array) -> float:
        output = output[:, 0] if output.ndim == 3 else output
        truth = label[:, 0] if label.ndim == 2 else label
        return Top1Accuracy().score(output, truth)


_METHODS: dict[str, type[ValidationMethod]] = {
    kind.tag: kind for kind in (Top1Accuracy, Top5Accuracy, Loss, MAE, MSE, AUC, TreeNNAccuracy)
}


def named(method: Any) -> ValidationMethod:
    """A validation method by its name, as "acc" or "top5acc"; methods themselves are returned."""
    if isinstance(method, ValidationMethod):
        return method
    if not isinstance(method, str):
        raise ConfigError(f"a validation method is a name such as 'acc', or an object; received {method!r}.")
    if tag_of(method) not in _METHODS:
        known = "'acc', 'top5acc', 'loss', 'mae', 'mse', 'auc', 'treennaccuracy'"
        raise ConfigError(f"unknown validation method {method!r}; there are {known}.")
    return _METHODS[tag_of(method)]()


class Scores(dict[str, float]):
    """Results of an evaluation, under TFPark's names.

    Other usual names of the same metric find them, too: "acc", "accuracy", "Top1Accuracy".
    """

    def __missing__(self, key: Any) -> float:
        for name, value in self.items():
            if isinstance(key, str) and tag_of(key) in map(tag_of, (name, *name.split())):
                return value
        raise KeyError(key)

    def __contains__(self, key: Any) -> bool:
        try:
            self[key]
        except KeyError:
            return False
        return True

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is get


def named_all(methods: Any) -> list[ValidationMethod]:
    """Several methods: one, or a list of them; None is none."""
    several = methods if isinstance(methods, list | tuple) else [methods]
    return [] if methods is None else [named(method) for method in several]


def _classes(output: Array, label: Array) -> Array:
    if label.ndim == output.ndim and label.shape[-1] == output.shape[-1] > 1:
        return label.argmax(-1).reshape(-1)
    return label.reshape(-1).astype(np.int64)


def _classes_tf(tf: Any, output: Any, label: Any) -> Any:
    same = label.shape.rank is not None and label.shape.rank == output.shape.rank
    if same and label.shape[-1] == output.shape[-1] and label.shape[-1] is not None:
        return tf.reshape(tf.argmax(label, -1, output_type=tf.int64), [-1])
    return tf.cast(tf.reshape(label, [-1]), tf.int64)
