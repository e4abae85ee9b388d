"""Models that no server should have, as functions of an array. Each process imports this anew."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

_calls = [0]


def hangs(x: Any) -> Any:
    """Never returns, but for the made-up rows that a server begins with."""
    if x.ravel()[0] > 0:
        threading.Event().wait()
    return x


def crashes(x: Any) -> Any:
    """Every tenth call ends its process."""
    _calls[0] += 1
    if _calls[0] % 10 == 0:
        ctypes.string_at(0)
    return x


def eats(x: Any) -> Any:
    """Takes more memory than it may have."""
    return np.ones(1 << 32)[: len(x)] if x.ravel()[0] > 0 else x
