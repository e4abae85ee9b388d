"""How the ranks of a gang agree to end after the newest step that one of them has begun.

Ranks that meet in every step must all make the same ones: a rank that ended alone would leave the others
waiting for it. When the driver asks them to halt, each says at once, from the thread that listens, which step
it has begun last, and begins no other until it hears the largest of these numbers; up to that one all go on.
Asking costs a step nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from kindler.errors import TrainingError


class Halting:
    """One rank's side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._asked = False
        self._answered = threading.Event()
        self._last = 0

    def asked(self) -> int:
        """The driver asks: the number that was begun last; no other begins from now on."""
        with self._lock:
            self._asked = True
            return self._begun

    def answer(self, last: int) -> None:
        """All ranks have said what they have begun: this is the last number of all."""
        self._last = last
        self._answered.set()

    def go_on(self, number: int, *, whole: bool = True, timeout_s: float) -> bool:
        """Whether to begin what has this number; numbers grow.

        Args:
            number: A step's number, or an epoch's where ranks do not meet in steps.
            whole: Whether what has the last number of all is still done, rather than left where it is.
            timeout_s: How long to wait for the others once the driver has asked.
        """
        with self._lock:
            if not self._asked:
                self._begun = number
                return True
        if not self._answered.wait(timeout_s):
            raise TrainingError(f"the other workers did not say in {timeout_s:g} s where to halt.")
        return number <= self._last if whole else number < self._last


class HaltVote:
    """The driver's side: the numbers that ranks have begun.

    Attributes:
        last: The largest of them, once all have said theirs.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self._missing = set(ranks)
        self._largest = 0
        self._known = threading.Event()
        self.last: int | None = None

    def says(self, rank: int, begun: int) -> bool:
        """What a rank has begun; whether all have said so now."""
        self._largest = max(self._largest, begun)
        return self.left(rank)

    def left(self, rank: int) -> bool:
        """A rank has ended, or has said what it has begun; whether that was the last one missing."""
        self._missing.discard(rank)
        if self._missing or self.last is not None:
            return False
        self.last = self._largest
        self._known.set()
        return True

    def wait(self, timeout_s: float) -> int | None:
        """The last number of all; None if it is not known in time."""
        self._known.wait(timeout_s)
        return self.last
