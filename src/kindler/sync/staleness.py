"""Who may take weights, and whose gradients may be applied, so that none becomes too stale. Pure.

A gradient is as stale as the number of updates between the weights that it was computed with and its own
update. Whoever has taken weights and not yet returned gradients is outstanding. With the bound s, the
outstanding ones p1 <= p2 <= ... (by the version they took) can still be applied in that order within the
bound as long as v + i - 1 - p_i <= s for each of them, where v is the present version. Both rules below keep
that true, and the oldest outstanding one can always be applied: nobody waits for ever, and no work is thrown
away.
"""

from __future__ import annotations

from collections.abc import Hashable


class Outstanding:
    """The versions that are being worked with.

    Args:
        most: The bound; None sets none.

    >>> out = Outstanding(most=1)
    >>> out.take("a", 0), out.take("b", 0)
    (None, None)
    >>> out.may_take(), out.may_apply("b", 0)
    (False, True)
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._taken: dict[Hashable, int] = {}  # in the order in which they were taken: versions only grow

    def take(self, who: Hashable, version: int) -> None:
        """Somebody has the weights of this version now."""
        self._taken.pop(who, None)
        self._taken[who] = version

    def drop(self, who: Hashable) -> None:
        """Nothing will come of what it has taken, or it has come."""
        self._taken.pop(who, None)

    def may_take(self) -> bool:
        """Whether one more can have the present weights."""
        return self._most is None or len(self._taken) <= self._most

    def may_apply(self, who: Hashable, version: int) -> bool:
        """Whether its gradients may be applied to the weights of `version` now."""
        if self._most is None:
            return True
        for place, (other, taken) in enumerate(self._taken.items(), start=1):
            if other == who:
                return True
            if version + place - taken > self._most:
                return False
        return True
