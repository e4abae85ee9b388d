"""Every error pickles and keeps its message, its fields and its types."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from kindler import errors

EXAMPLES: dict[str, Any] = {
    "AlreadyExistsError": lambda: errors.AlreadyExistsError("is there", name="x"),
    "BrokerError": lambda: errors.BrokerError("gone"),
    "ConfigError": lambda: errors.ConfigError("no"),
    "DamagedError": lambda: errors.DamagedError(sha256="ab", problem="it is gone"),
    "DataError": lambda: errors.DataError("null", column="x", row=3),
    "DiskFullError": lambda: errors.DiskFullError(
        path="/a/b", needed_bytes=7, free_bytes=3, reason="No space left on device"
    ),
    "FeedError": lambda: errors.FeedError("closed"),
    "FrameError": lambda: errors.FrameError("no frame"),
    "JavaNotFoundError": lambda: errors.JavaNotFoundError("none"),
    "KindlerError": lambda: errors.KindlerError("no"),
    "MissingExtraError": lambda: errors.MissingExtraError(what="a", package="b", extra="c"),
    "NonFiniteLossError": lambda: errors.NonFiniteLossError(step=3, rank=1, loss=float("inf"), rows=[7, 8]),
    "NotFittedError": lambda: errors.NotFittedError("not yet"),
    "NotFoundError": lambda: errors.NotFoundError(what="model", name="x", available=["y"]),
    "RowsFailedError": lambda: errors.RowsFailedError(
        count=3, rows=9, most=2, kinds={"ValueError: too large": 3}
    ),
    "StalledError": lambda: errors.StalledError(
        ranks=[1], hosts={0: "g", 1: "h"}, stacks={1: "in forward"}, waited_s=3
    ),
    "StartTimeoutError": lambda: errors.StartTimeoutError("late"),
    "StoreError": lambda: errors.StoreError("full"),
    "SyncError": lambda: errors.SyncError("broke"),
    "SyncTimeoutError": lambda: errors.SyncTimeoutError(op="sum", missing=[1], size=2, waited_s=3),
    "TaskCancelledError": lambda: errors.TaskCancelledError("cancelled"),
    "TaskTimeoutError": lambda: errors.TaskTimeoutError(task="predict", waited_s=3, goes_on=True),
    "TrackingError": lambda: errors.TrackingError("is down", uri="http://h:5000"),
    "TrainingError": lambda: errors.TrainingError("failed"),
    "UntrustedError": lambda: errors.UntrustedError(what="a model", reason="it is a pickle"),
    "WorkerError": lambda: errors.worker_error(
        types=["builtins:KeyError", "builtins:LookupError"], message="m", traceback="t", rank=1, host="h"
    ),
    "WorkerLostError": lambda: errors.WorkerLostError(
        "gone", rank=1, host="h", exit_code=-9, log_tail="last"
    ),
}
CLASSES = [
    name
    for name in errors.__all__
    if isinstance(getattr(errors, name), type) and not issubclass(getattr(errors, name), Warning)
]


def test_there_is_an_example_of_every_error() -> None:
    assert sorted(EXAMPLES) == sorted(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_an_error_survives_pickling_with_message_and_fields(name: str) -> None:
    error = EXAMPLES[name]()
    again = pickle.loads(pickle.dumps(error))

    assert isinstance(error, errors.KindlerError)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert [c.__name__ for c in type(again).__mro__] == [c.__name__ for c in type(error).__mro__]


@pytest.mark.parametrize(
    "builtin",
    [ValueError, KeyError, OSError, FileNotFoundError, UnicodeDecodeError, StopIteration, ZeroDivisionError],
)
def test_what_was_raised_on_a_worker_is_caught_as_its_own_type(builtin: type[Exception]) -> None:
    error = errors.worker_error(
        types=[f"builtins:{builtin.__name__}"], message="the user's words", traceback="t", rank=2, host="h"
    )

    assert isinstance(error, builtin)
    assert isinstance(error, errors.WorkerError)
    assert str(error).startswith("the user's words")
    assert "worker 2, host h" in str(error)


def test_a_class_that_is_not_loaded_here_falls_back_to_its_loaded_base() -> None:
    error = errors.worker_error(
        types=["nowhere:Special", "builtins:ValueError"], message="m", traceback="t", rank=0, host="h"
    )

    assert isinstance(error, ValueError)
    assert type(error).__name__ == "Special"
