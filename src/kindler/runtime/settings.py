"""The settings of tasks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kindler.errors import ConfigError
from kindler.store.selectors import parse

_LONGEST_S = 1e6  # what can be waited for at once
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,49}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSettings:
    """How a task is run.

    Attributes:
        label: The label of workers that may run it; "default" is that of workers without one.
        timeout_s: Seconds that it may run, including loading and excluding waiting.
        wait_s: Seconds that it may wait for a worker of a broker; local workers are started on demand.
        max_retries: How often it is started again after its worker was lost.
        trusted: Whether it may run functions and pickles of the store.
        callback: A script's name, called by the worker with the result; or a function, called in this
            process with the handle.

    >>> TaskSettings(timeout_s=0)
    Traceback (most recent call last):
    kindler.errors.ConfigError: timeout_s=0: must be seconds, above 0 and at most 1e+06.
    """

    label: str = "default"
    timeout_s: float = 1200.0
    wait_s: float = 3600.0
    max_retries: int = 1
    trusted: bool = False
    callback: str | Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.label, str) or not _LABEL.fullmatch(self.label):
            raise ConfigError(f"label={self.label!r}: must be letters, digits, - and _, at most 50.")
        for name, seconds in (("timeout_s", self.timeout_s), ("wait_s", self.wait_s)):
            if not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST_S:
                raise ConfigError(f"{name}={seconds!r}: must be seconds, above 0 and at most {_LONGEST_S:g}.")
        if type(self.max_retries) is not int or self.max_retries < 0:
            raise ConfigError(f"max_retries={self.max_retries!r}: must be 0 or more.")
        if isinstance(self.callback, str):
            parse(self.callback)
        elif self.callback is not None and not callable(self.callback):
            raise ConfigError(f"callback={self.callback!r}: must be the name of a script, or a function.")
