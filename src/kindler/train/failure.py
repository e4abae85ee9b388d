"""What to do when a run fails: retry or raise. Pure functions: nothing is started or awaited here.

A lost worker may be the fault of its machine, and worth another try. An error of the user's code or data
would happen again.
"""

from __future__ import annotations

from dataclasses import dataclass

from kindler.config import RunSettings
from kindler.errors import KindlerError, StartTimeoutError, SyncError, SyncTimeoutError, WorkerLost

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
    """Decide what to do about a failure.

    Args:
        error: The error that ended the run.
        failures: How often the run had failed before.
        settings: The limit of failures, and the wait between attempts.
        has_checkpoints: Whether the run writes checkpoints.

    >>> lost = WorkerLost("killed", rank=1, host="a")
    >>> decide(lost, 1, RunSettings(retry_backoff_s=2.0), has_checkpoints=True)
    Retry(wait_s=4.0)
    >>> decide(lost, 1, RunSettings(), has_checkpoints=False)
    Raise()
    """
    if not has_checkpoints or failures >= settings.max_failures or not _may_pass(error, failures):
        return Raise()
    return Retry(min(settings.retry_backoff_s * 2.0**failures, _LONGEST_WAIT_S))


def explained(
    error: KindlerError, failures: int, *, trains: bool, has_checkpoints: bool, newest: str | None = None
) -> KindlerError:
    """The error to raise, with the number of attempts or a hint about checkpoints added.

    Args:
        error: The error that ended the run.
        failures: How often the run had failed before.
        trains: Whether the run trains.
        has_checkpoints: Whether it writes checkpoints.
        newest: The newest checkpoint that it has written.
    """
    if is_lost_server(error):
        extended(error, _server_advice(newest, has_checkpoints=has_checkpoints))
    if failures:
        return extended(error, f"The run failed {failures + 1} times; this is the last failure.")
    if isinstance(error, WorkerLost) and trains and not has_checkpoints and not is_lost_server(error):
        return extended(
            error,
            "Hint: with model_dir=..., fit writes checkpoints and resumes by itself when a worker is lost.",
        )
    return error


def is_lost_server(error: KindlerError) -> bool:
    """Whether the parameter server of an asynchronous run died."""
    return isinstance(error, WorkerLost) and error.role == "ps"


def _server_advice(newest: str | None, *, has_checkpoints: bool) -> str:
    lost = "It was the parameter server, which held the weights and the optimizer"
    if newest is not None:
        return f"{lost}. The newest checkpoint is {newest}.\nHint: fit(resume=True) continues from it."
    if has_checkpoints:
        return f"{lost}; there is no checkpoint yet."
    return f"{lost}.\nHint: with model_dir=..., fit writes checkpoints, and fit(resume=True) continues."


def extended(error: KindlerError, more: str) -> KindlerError:
    """The same error, with a line added to its message."""
    error.args = (f"{error.args[0] if error.args else ''}\n{more}", *error.args[1:])
    return error


def _may_pass(error: KindlerError, failures: int) -> bool:
    """Whether another attempt may succeed."""
    if is_lost_server(error):
        return False  # its updates since the checkpoint are gone: whoever started the run decides
    if isinstance(error, SyncTimeoutError):
        return False  # nobody is gone: the workers wait for each other
    if isinstance(error, StartTimeoutError):
        return failures > 0  # they had come up before, so their machines may come back
    return isinstance(error, WorkerLost | SyncError)
