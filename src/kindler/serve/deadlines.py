"""An end to waiting. Python 3.11 has `asyncio.timeout` for this; Python 3.10 does not."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let the task wait in this block for so long.

    Raises:
        TimeoutError: It was still waiting then.
    """
    task = asyncio.current_task()
    over = False

    def end() -> None:
        nonlocal over
        over = True
        if task is not None:
            task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, end)
    try:
        yield
    except asyncio.CancelledError as exc:
        # Somebody else may have cancelled it as well, which then counts.
        if not over or (sys.version_info >= (3, 11) and task is not None and task.uncancel()):
            raise
        raise TimeoutError from exc
    finally:
        timer.cancel()
