"""What the user's own training step works with: the model, the optimizers, and gradients over all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kindler.collective import all_gather
from kindler.errors import ConfigError

if TYPE_CHECKING:
    from kindler.frameworks.torch.step_replica import StepReplica


class StepRun:
    """The first argument of `train_step` and `eval_step`.

    `backward` computes gradients of the mean over the rows of all workers, so a step does the same with one
    worker or several. The loss passed to it is a mean over the rows of `batch`.

    Attributes:
        model: This worker's copy of the model.
        config: The estimator's config.
        rows: The number of rows this worker has in the step. If 0, the step is called with made-up rows, so
            that all workers do the same; nothing of it counts.
        global_rows: The number of rows all workers have in the step.
        loss_sum: The sum of the losses passed to `backward` in this step; None before the first.
        weights_read: Whether a step has read `sample_weight`.
    """

    def __init__(self, replica: StepReplica) -> None:
        self._replica = replica
        self.model: Any = replica.model
        self.config: Mapping[str, Any] = replica.spec.config
        self.rows = self.global_rows = 0
        self.weights_read = False
        self._weights: torch.Tensor | None = None
        self.loss_sum: torch.Tensor | None = None

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name; one given without a name is called "optimizer"."""
        return dict(self._replica.optimizers.named)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, if there is only one."""
        return self.optimizers[self._one(None)]

    @property
    def sample_weight(self) -> torch.Tensor | None:
        """The weight of each row of the batch, from `fit(class_weight=..., sample_weight_col=...)`.

        With both, it is their product; without them, None. In `eval_step` class weights do not apply. The
        step multiplies the loss of each row by it, and still takes the mean over rows.
        """
        self.weights_read = True
        return self._weights

    def weigh(self, weights: torch.Tensor | None) -> None:
        """Set the row weights of the next batch; called by the replica."""
        self._weights = weights

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 1."""
        return self._replica.epoch

    @property
    def step(self) -> int:
        """Steps since the model was created."""
        return self._replica.step

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._replica.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._replica.size

    @property
    def device(self) -> torch.device:
        """The device of the model and the batches."""
        device: torch.device = self._replica.device
        return device

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of all workers, with gradients that flow back to each: `kindler.all_gather`."""
        gathered: torch.Tensor = all_gather(tensor)
        return gathered

    def backward(
        self,
        loss: torch.Tensor,
        optimizer: str | None = None,
        *,
        weight: float | torch.Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradients of a loss over the rows of all workers to the existing ones.

        Args:
            loss: A mean over the rows of the batch, or over something else, given by `weight`.
            optimizer: Compute only the gradients of this optimizer's parameters. None computes all.
            weight: What the mean was divided by on this worker, if not by its rows: tokens, for example. Only
                a loss without a weight is tried on the first rows.
            retain_graph: Whether another loss of the same outputs will be passed to `backward`.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(f"run.backward needs a loss that is one number; received {_shown(loss)}.")
        name = None if optimizer is None else self._one(optimizer)
        self._replica.look_at_loss(loss)
        told = loss.detach().reshape(())
        self.loss_sum = told if self.loss_sum is None else self.loss_sum + told
        self._replica.backward(loss, name, weight=weight, retain_graph=retain_graph)

    def update(self, optimizer: str | None = None) -> None:
        """Clip gradients as the estimator says, let an optimizer move its parameters, and clear gradients.

        Args:
            optimizer: Its name; None if there is only one.
        """
        self._replica.update(self._one(optimizer))

    def minimize(
        self,
        loss: torch.Tensor,
        optimizer: str | None = None,
        *,
        weight: float | torch.Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Clear the gradients of an optimizer's parameters, then `backward` and `update`."""
        name = self._one(optimizer)
        self.optimizers[name].zero_grad(set_to_none=True)
        self.backward(
            loss, name if len(self.optimizers) > 1 else None, weight=weight, retain_graph=retain_graph
        )
        self.update(name)

    def _one(self, name: str | None) -> str:
        names = list(self._replica.optimizers.named)
        if name is None and len(names) == 1:
            return names[0]
        if name is None:
            raise ConfigError(
                f"there are the optimizers {', '.join(map(repr, names))}; say which, as in"
                f" run.minimize(loss, {names[0]!r})."
            )
        if name not in names:
            raise ConfigError(f"there is no optimizer {name!r}, only {', '.join(map(repr, names))}.")
        return name


def logged(returned: Any, who: str) -> dict[str, float | torch.Tensor]:
    """The numbers that a step returned, by name; raises ConfigError for anything else."""
    if returned is None:
        return {}
    given = returned if isinstance(returned, Mapping) else {"loss": returned}
    values: dict[str, float | torch.Tensor] = {}
    for name, value in given.items():
        single = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not single or not isinstance(name, str):
            raise ConfigError(
                f"{who} must return the loss, a tensor of one number, or a dict of numbers by name; received"
                f" {_shown(returned if not isinstance(returned, Mapping) else value)}"
                + (f" for {name!r}." if isinstance(returned, Mapping) else ".")
            )
        values[name] = value.detach().reshape(()) if isinstance(value, torch.Tensor) else float(value)
    return values


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
