"""BigDL's validation methods as metrics of torch, merged over workers exactly.

Means over rows are functions of (outputs, targets). What is not a mean over rows (AUC) is a metric of
torchmetrics, whose states are joined. torchmetrics takes seconds to import, in every worker that imports this
module: only what uses it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kindler.compat.bigdl.nn.criterion import Criterion
from kindler.compat.bigdl.optim.validation import AUC, Loss, ValidationMethod
from kindler.errors import ConfigError

__all__ = ["torch_metrics"]


def torch_metrics(methods: Sequence[ValidationMethod], loss: Any) -> dict[str, Any]:
    """Metrics by BigDL's names; the model's own `Loss`, which is always counted, is left out.

    Args:
        methods: The validation methods.
        loss: The criterion; if its labels are counted from 1, so are those of the methods.
    """
    one_based = isinstance(loss, Criterion) and loss.one_based
    made: dict[str, Any] = {}
    for method in methods:
        first = method.first_class if not one_based else 1
        if isinstance(method, AUC):
            from kindler.compat.bigdl.optim.exact_auc import ExactAUC

            made[method.tag] = ExactAUC(float(first if method.by_class else 0))
        elif (counted := getattr(method, "counted", None)) is not None:
            import torchmetrics

            made[method.tag] = getattr(torchmetrics.classification, counted)(validate_args=False)
        elif not isinstance(method, Loss) or method.cri not in (None, loss):
            made[method.tag] = RowMean(method, first if method.by_class else 0)
    return made


class RowMean:
    """The mean of a validation method over the rows of a batch."""

    def __init__(self, method: ValidationMethod, first: int) -> None:
        if method.rows is not None:
            raise ConfigError(
                f"{method!r} judges groups of {method.rows} rows, which batches would tear apart.\n"
                "Hint: method.score(outputs, labels) judges the arrays of predict."
            )
        self.method, self.first = method, first

    def __call__(self, outputs: Any, targets: Any) -> float:
        """The mean over these rows."""
        output, label = (part[0] if isinstance(part, tuple | list) else part for part in (outputs, targets))
        return self.method.score(output.cpu().numpy(), np.asarray(label.cpu().numpy()) - self.first)
