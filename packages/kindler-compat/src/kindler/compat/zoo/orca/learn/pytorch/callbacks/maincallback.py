"""`MainCallback`: how a batch is computed, for programs that compute it in their own way."""

from __future__ import annotations

from typing import Any

from kindler.compat.zoo.orca.learn.pytorch.callbacks.base import Callback

__all__ = ["MainCallback"]


class MainCallback(Callback):
    """Computes outputs and loss of a batch; override `on_iter_forward`, or those of training or validation.

    What is overridden sets `runner.output`, `runner.target` and `runner.loss`, a mean over the rows of
    `runner.batch`, which has the features and then the labels.
    """

    def on_iter_forward(self, runner: Any) -> None:
        """Compute a batch."""
        *features, target = runner.batch
        runner.output, runner.target = runner.model(*features), target
        outputs = runner.output if isinstance(runner.output, tuple | list) else [runner.output]
        runner.loss = runner.criterion(*outputs, target)

    def on_train_forward(self, runner: Any) -> None:
        """Compute a batch of training."""
        self.on_iter_forward(runner)

    def on_val_forward(self, runner: Any) -> None:
        """Compute a batch of validation."""
        self.on_iter_forward(runner)

    def on_pred_forward(self, runner: Any) -> None:
        """Cannot be overridden: change what the model returns, or the result of `predict`."""

    def on_iter_backward(self, runner: Any) -> None:
        """Cannot be overridden: workers exchange gradients while they are computed."""

    def on_lr_adjust(self, runner: Any) -> None:
        """Cannot be overridden: `scheduler_creator` makes the schedule."""
