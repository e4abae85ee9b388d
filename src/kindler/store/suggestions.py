"""How often a store looks for what might have been meant by a name that is not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Suggestions:
    """Allows a few looks at once, and then so many a second.

    A look costs many times what finding a name does. A person never asks that often; a client that does must
    not keep the others waiting.

    Args:
        at_once: How many after a while of none.
        a_second: How many become free each second.
        clock: The time in seconds.
    """

    def __init__(
        self, *, at_once: int = 20, a_second: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._at_once, self._a_second, self._clock = at_once, a_second, clock
        self._left, self._since = float(at_once), clock()
        self._lock = threading.Lock()

    def may_look(self) -> bool:
        """Whether one more may be made now; it counts if so.

        >>> now = [0.0]
        >>> some = Suggestions(at_once=1, a_second=2.0, clock=lambda: now[0])
        >>> some.may_look(), some.may_look()
        (True, False)
        >>> now[0] = 0.5
        >>> some.may_look()
        True
        """
        with self._lock:
            now = self._clock()
            self._left = min(self._at_once, self._left + (now - self._since) * self._a_second)
            self._since = now
            if self._left < 1:
                return False
            self._left -= 1
            return True
