"""What to do when a run fails: try again, or raise. Pure: nothing is started or awaited here.

A worker that was lost may be another's fault: its machine's, its memory's. What the user's own code or data
did wrong, it would do again.
"""

from __future__ import annotations

from dataclasses import dataclass

from kindler.config import RunSettings
from kindler.errors import KindlerError, StartTimeoutError, SyncError, SyncTimeoutError, WorkerLost

__all__ = ["Raise", "Retry", "decide", "explained", "extended"]

_LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Retry:
    """Start the workers again, after `wait_s` seconds."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class Raise:
    """Give up."""


def decide(
    error: KindlerError, failures: int, settings: RunSettings, *, has_checkpoints: bool
) -> Retry | Raise:
    """What follows from a failure.

    Args:
        error: What the run failed with.
        failures: How often it had failed before.
        settings: How often it may fail, and how long to wait in between.
        has_checkpoints: Whether the run writes any.

    >>> lost = WorkerLost("killed", rank=1, host="a")
    >>> decide(lost, 1, RunSettings(retry_backoff_s=2.0), has_checkpoints=True)
    Retry(wait_s=4.0)
    >>> decide(lost, 1, RunSettings(), has_checkpoints=False)
    Raise()
    """
    if not has_checkpoints or failures >= settings.max_failures or not _may_pass(error, failures):
        return Raise()
    return Retry(min(settings.retry_backoff_s * 2.0**failures, _LONGEST_WAIT_S))


def explained(error: KindlerError, failures: int, *, trains: bool, has_checkpoints: bool) -> KindlerError:
    """The error to raise at last, which says how often the run was tried or what would have let it go on."""
    if failures:
        return extended(error, f"The run failed {failures + 1} times; this is the last failure.")
    if isinstance(error, WorkerLost) and trains and not has_checkpoints:
        return extended(
            error,
            "Hint: with model_dir=..., fit writes checkpoints and resumes by itself when a worker is lost.",
        )
    return error


def extended(error: KindlerError, more: str) -> KindlerError:
    """The same error, with a line more."""
    error.args = (f"{error.args[0] if error.args else ''}\n{more}", *error.args[1:])
    return error


def _may_pass(error: KindlerError, failures: int) -> bool:
    """Whether the same run may well succeed when it is tried again."""
    if isinstance(error, SyncTimeoutError):
        return False  # nobody is gone: the workers wait for each other
    if isinstance(error, StartTimeoutError):
        return failures > 0  # they had come up before, so their machines may come back
    return isinstance(error, WorkerLost | SyncError)
