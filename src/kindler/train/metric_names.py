"""Names of metrics: which are metrics at all, and whether higher or lower is better."""

from __future__ import annotations

import math
import re
from typing import Literal

from kindler.errors import ConfigError

Direction = Literal["min", "max"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What a row of the history has besides loss and metrics.
BOOKKEEPING = _words(
    "epoch steps num_samples seconds rows_per_s val_num_samples updates staleness_median staleness_max"
    " sync_bytes lost_workers rounds optimizer_bytes skipped_steps"
)
_SMALLER = _words(
    "loss error err mse mae rmse msle mape smape perplexity crossentropy entropy divergence hinge deviance"
    " distance regret"
)
_LARGER = _words(
    "acc accuracy auc auroc auprc f1 f1score fbeta precision recall r2 r2score map ndcg mrr iou dice bleu"
    " rouge specificity sensitivity kappa similarity top1 top5 psnr ssim score hits"
)
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")


def direction(name: str) -> Direction:
    """Whether lower ("min") or higher ("max") is better; raises ConfigError if the name does not tell.

    >>> direction("val_loss"), direction("val_acc"), direction("BinaryAccuracy")
    ('min', 'max', 'max')
    """
    # The last telling word decides: a "precision_error" is an error.
    for word in reversed([word.lower() for word in _WORD.findall(name)]):
        if word in _SMALLER:
            return "min"
        if word in _LARGER or re.fullmatch(r"top\d*", word):
            return "max"
    for ending in ("loss", "error"):
        if name.lower().endswith(ending):
            return "min"
    if name.lower().endswith(("acc", "accuracy")):
        return "max"
    raise ConfigError(
        f"the name {name!r} does not say whether higher or lower is better.\n"
        f"Hint: write 'max:{name}' or 'min:{name}'; callbacks also take mode='max' or mode='min'."
    )


def parse(name: str) -> tuple[str, Direction]:
    """A metric's name and direction; the prefix "max:" or "min:" overrides the name.

    >>> parse("val_loss"), parse("max:val_gain")
    (('val_loss', 'min'), ('val_gain', 'max'))
    """
    prefix, colon, rest = name.partition(":")
    if colon and prefix == "min":
        return rest, "min"
    if colon and prefix == "max":
        return rest, "max"
    return name, direction(name)


def improves(value: float, best: float | None, way: Direction, *, min_delta: float = 0.0) -> bool:
    """Whether `value` is better than `best` by more than `min_delta`. NaN never is.

    >>> improves(0.4, 0.5, "min"), improves(float("nan"), None, "max")
    (True, False)
    """
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value < best - min_delta if way == "min" else value > best + min_delta
