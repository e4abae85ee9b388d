"""How long a rank has waited for others, and a mark on its worker while it does."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any


class Waiting:
    """`with waiting:` around what blocks until other ranks come.

    While the block runs, the worker's attribute `waiting` is True, so that whoever watches the worker can
    tell a rank that is held up by others from one that is busy.

    Args:
        worker: Where to set the attribute; None sets none.

    Attributes:
        seconds: Time spent in such blocks so far.
    """

    def __init__(self, worker: Any = None) -> None:
        self.seconds = 0.0
        self._worker = worker
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.monotonic()
        if self._worker is not None:
            self._worker.waiting = True

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.monotonic() - self._since
        if self._worker is not None:
            self._worker.waiting = False
