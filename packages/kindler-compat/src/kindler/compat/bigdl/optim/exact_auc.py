"""The area under the ROC curve, as a metric of torchmetrics that workers merge exactly."""

from __future__ import annotations

import torch
import torchmetrics

__all__ = ["ExactAUC"]


class ExactAUC(torchmetrics.classification.BinaryAUROC):
    """The area under the ROC curve, from all outputs.

    Args:
        first: The label of the negative class.
    """

    def __init__(self, first: float = 0.0) -> None:
        super().__init__(thresholds=None, validate_args=False)
        self.first = first

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        if preds.dim() == 2 and preds.shape[1] == 2:  # of two classes: how much more likely the second is
            preds = preds[:, 1] - preds[:, 0]
        # torchmetrics takes scores for probabilities if all of a batch are: logits must not depend on that.
        scores = 0.5 + 0.5 * preds.double() / (1 + preds.double().abs())
        super().update(scores.reshape(-1), (target.reshape(-1) - self.first > 0.5).long())
