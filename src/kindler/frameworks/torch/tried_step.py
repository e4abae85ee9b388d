"""Tries the user's own training step on the first rows; see `loss_trial.py`.

The step is undone; what it minimizes is only noted. Leaf modules (BatchNorm, Dropout) are in evaluation mode
meanwhile, so that only the loss is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from kindler.errors import ConfigError
from kindler.frameworks.loss_trial import LossTrial, refusal
from kindler.frameworks.torch.gather import join, take_rows
from kindler.frameworks.torch.state import snapshot
from kindler.frameworks.torch.step_copy import attributes_of
from kindler.frameworks.torch.tried_loss import HOW_TO_GATHER, undrawn

if TYPE_CHECKING:
    from kindler.frameworks.torch.step_replica import StepReplica

_MOST_ROWS = 16  # the model is called for them
_TOLERANCE, _HALF = 1e-4, 2e-2
_HINT = (
    f"{HOW_TO_GATHER}. If it is a mean over something else than rows, say what it was divided by:"
    " run.backward(loss, weight=...), or run.minimize(loss, weight=...). A loss with a weight is not tried."
)


class TriedStep:
    """`running`: the current step is a trial and must leave nothing behind."""

    def __init__(self, replica: StepReplica) -> None:
        self._replica = replica
        self._trial = LossTrial(_MOST_ROWS, join, strict=False)
        self._noted: list[tuple[float, float]] = []
        self._declared = False
        self._rows = 0
        self.running = False

    def notes(self, loss: torch.Tensor, weight: float | torch.Tensor | None) -> bool:
        """A loss with a `weight` says what it is a mean over, and is not tried."""
        if self.running and weight is None:
            self._noted.append((float(loss.detach()) * self._rows, float(self._rows)))
        self._declared = self._declared or weight is not None
        return self.running

    def __call__(
        self, features: tuple[torch.Tensor, ...], labels: tuple[torch.Tensor, ...], rows: int
    ) -> None:
        if self._trial.over:
            return
        undo = self._replica.undo()
        self.running = True
        try:
            with undrawn(self._replica.device), _resting(self._replica.model):
                half = self._replica.spec.precision is not None
                found = self._trial(
                    lambda chosen: self._losses(take_rows((features, labels), chosen, rows), len(chosen)),
                    rows,
                    _HALF if half else _TOLERANCE,
                )
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - the step itself shows what is wrong with it
            found = None
        finally:
            self.running = False
            undo()
        if found is not None:
            loss = "the loss of the step" if found.place == 0 else f"loss {found.place + 1} of the step"
            raise refusal(found, loss, why="several workers", hint=_HINT)

    def _losses(self, batch: tuple[Any, Any], rows: int) -> Sequence[tuple[float, float]]:
        replica = self._replica
        self._noted, self._declared, self._rows = [], False, rows
        replica.run.rows = replica.run.global_rows = rows
        buffers = list(zip(replica.tracked.buffers(), snapshot(replica.tracked), strict=True))
        attributes = attributes_of(replica.model.modules())
        try:
            returned = replica.losses_of(*batch, rows)
        finally:
            attributes()
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not self._noted and not self._declared and isinstance(loss, torch.Tensor):
            self.notes(loss, None)
        return self._noted


@contextmanager
def _resting(model: torch.nn.Module) -> Iterator[None]:
    """Leaf modules in evaluation mode; restores `requires_grad` whatever is raised."""
    learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    awake = [part for part in model.modules() if part.training and next(part.children(), None) is None]
    for part in awake:
        part.training = False
    try:
        yield
    finally:
        for part in awake:
            part.training = True
        for parameter, learns in learning:
            parameter.requires_grad_(learns)
