"""What a worker does about a loss that is NaN or infinite: raise, warn, or let the step be left out.

Every loss is looked at as it comes, unless that would mean to wait for a step that still runs, on a GPU or in
JAX: such losses are collected and looked at several times a second, those together that were there at the
look before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from kindler.errors import NonFiniteLossError

OnNan: TypeAlias = Literal["raise", "warn", "skip"]
Describe: TypeAlias = Callable[[], tuple[Sequence[int | str], str]]
"""Gives the first rows of a batch by name, and what is odd about it, if that is known."""

_LOOK_EVERY_S = 0.1
_MOST_FRESH = 256


class LossGuard:
    """Looks at the losses of one worker in training, which its replica shows it.

    Args:
        on_nan: What to do about one that is not finite.
        rank: This worker.
        tell: Tells the driver.
        clock: Returns the time in seconds.

    Attributes:
        skips: Whether steps with such a loss are left out, on all workers.
        skipped: Steps that were left out since `begin_epoch`.
    """

    def __init__(
        self,
        on_nan: OnNan,
        *,
        rank: int,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.skips = on_nan == "skip"
        self.skipped = 0
        self._raises = on_nan == "raise"
        self._rank, self._tell, self._clock = rank, tell, clock
        self._unseen: list[tuple[int, Any, Describe]] = []
        self._ripe = 0  # how many of them the last look has left to the next
        self._values: Callable[[Sequence[Any]], Sequence[float]] = _floats
        self._looked = clock()
        self._told = False

    def begin_epoch(self) -> None:
        """Count and tell anew."""
        self._told, self.skipped = False, 0

    def saw(self, step: int, loss: float, describe: Describe) -> bool:
        """Look at the loss of a step now; whether it is finite.

        Raises:
            NonFiniteLossError: It is not, and that is what `on_nan` asks for.
        """
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
        """Look at the loss of a step soon: at the look after next, so that it is likely to be there by then.

        Args:
            step: The step's number.
            loss: A number that is somewhere else, such as on a GPU.
            describe: Called if it is not finite; must not keep the batch.
            values: Brings several such numbers here at once.
        """
        if values is not None:
            self._values = values
        self._unseen.append((step, loss, describe))
        fresh = len(self._unseen) - self._ripe
        if fresh >= _MOST_FRESH or self._clock() - self._looked > _LOOK_EVERY_S:
            self._look(self._ripe)

    def look(self) -> None:
        """Look at all losses that were noted.

        Raises:
            NonFiniteLossError: One is not finite, and that is what `on_nan` asks for.
        """
        self._look(len(self._unseen))

    def _look(self, count: int) -> None:
        """At the first ones; the others are ripe for the next look."""
        unseen, self._unseen = self._unseen[:count], self._unseen[count:]
        self._ripe = len(self._unseen)
        for (step, _, describe), value in zip(unseen, self._values([e[1] for e in unseen]), strict=True):
            self.saw(step, value, describe)
        self._looked = self._clock()

    def skip(self) -> None:
        """A step was left out."""
        self.skipped += 1

    def figures(self) -> dict[str, int]:
        """What the history says of an epoch."""
        return {"skipped_steps": self.skipped} if self.skips else {}

    def _found(self, step: int, loss: float, describe: Describe) -> None:
        if self._told and not self._raises:
            return
        rows, oddity = describe()
        error = NonFiniteLossError(step=step, rank=self._rank, loss=loss, rows=rows, oddity=oddity)
        if self._raises:
            raise error
        self._told = True
        what = "The step is left out." if self.skips else "Training goes on with it."
        self._tell(f"{error.args[0].partition(chr(10))[0]} {what}")


def _floats(losses: Sequence[Any]) -> list[float]:
    return [float(loss) for loss in losses]
