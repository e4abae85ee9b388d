"""`zoo.pipeline.api.keras.metrics`: validation methods under Keras's names."""

from __future__ import annotations

from kindler.compat.bigdl.optim.validation import AUC, MAE, MSE, Top1Accuracy, Top5Accuracy

__all__ = ["AUC", "MAE", "MSE", "Accuracy", "Top1Accuracy", "Top5Accuracy"]


class Accuracy(Top1Accuracy):
    """`zero_based_label` must be True: labels are counted from 0."""

    def __init__(self, zero_based_label: bool = True, bigdl_type: str = "float") -> None:
        if not zero_based_label:
            raise ValueError("zero_based_label=False: labels are counted from 0; subtract 1 from them.")
