"""What a worker does about a loss that is NaN or infinite: raise, warn, or skip the step.

A loss is checked as it comes, unless that would wait for a running step (on a GPU or in JAX): such losses are
collected and checked several times a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from kindler import limits
from kindler.config import NanLoss
from kindler.errors import NonFiniteLossError

Describe: TypeAlias = Callable[[], tuple[Sequence[int | str], str]]
"""Gives the first rows of a batch by name, and what is odd about it, if that is known."""

_MOST_FRESH = 256


class LossGuard:
    """Watches the training losses of one worker, which its replica shows it."""

    def __init__(
        self,
        nan_loss: NanLoss,
        *,
        rank: int,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.skips = nan_loss == "skip"
        self.skipped = 0
        self._raises = nan_loss == "raise"
        self._rank, self._tell, self._clock = rank, tell, clock
        self._unseen: list[tuple[int, Any, Describe]] = []
        self._ripe = 0  # how many of them the last look has left to the next
        self._values: Callable[[Sequence[Any]], Sequence[float]] = _floats
        self._looked = clock()
        self._told = False

    def begin_epoch(self) -> None:
        self._told, self.skipped = False, 0

    def saw(self, step: int, loss: float, describe: Describe) -> bool:
        """Check a loss now and return whether it is finite; may raise NonFiniteLossError."""
        if math.isfinite(loss):
            return True
        self._found(step, loss, describe)
        return False

    def note(
        self,
        step: int,
        loss: Any,
        describe: Describe,
        values: Callable[[Sequence[Any]], Sequence[float]] | None = None,
    ) -> None:
        """Check a loss at the look after next, when it is likely to be computed.

        `loss` is a number elsewhere, such as on a GPU, `values` fetches several of them at once, and
        `describe` must not keep the batch.
        """
        if values is not None:
            self._values = values
        self._unseen.append((step, loss, describe))
        fresh = len(self._unseen) - self._ripe
        if fresh >= _MOST_FRESH or self._clock() - self._looked > limits.LOSS_LOOK_S:
            self._look(self._ripe)

    def look(self) -> None:
        """Check all losses noted so far; may raise NonFiniteLossError."""
        self._look(len(self._unseen))

    def _look(self, count: int) -> None:
        """Check the first ones; the others are ripe for the next look."""
        unseen, self._unseen = self._unseen[:count], self._unseen[count:]
        self._ripe = len(self._unseen)
        for (step, _, describe), value in zip(unseen, self._values([e[1] for e in unseen]), strict=True):
            self.saw(step, value, describe)
        self._looked = self._clock()

    def skip(self) -> None:
        self.skipped += 1

    def figures(self) -> dict[str, int]:
        return {"skipped_steps": self.skipped} if self.skips else {}

    def _found(self, step: int, loss: float, describe: Describe) -> None:
        if self._told and not self._raises:
            return
        rows, oddity = describe()
        error = NonFiniteLossError(step=step, rank=self._rank, loss=loss, rows=rows, oddity=oddity)
        if self._raises:
            raise error
        self._told = True
        what = "The step is skipped." if self.skips else "Training continues with it."
        self._tell(f"{error.args[0].partition(chr(10))[0]} {what}")


def _floats(losses: Sequence[Any]) -> list[float]:
    return [float(loss) for loss in losses]
