"""Callbacks that stay on the driver, where `fit` was called, and keep on through lost workers.

Other callbacks run on the workers. What a driver callback does is its own business; which hooks are called,
and how often, is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

RunStatus = Literal["finished", "failed", "killed"]


class DriverCallback:
    """A callback that runs once, in the process that called `fit`, for models of any framework.

    Use it for what must happen once per run rather than on every worker: loggers, notifications, progress
    displays. Pass it to `fit(callbacks=[...])` along with other callbacks, and override the hooks you need.
    """

    def on_run_begin(self, params: Mapping[str, Any]) -> None:
        """Called before any worker starts, with the arguments of `fit`. An exception ends the run."""

    def on_workers_ready(self, workers: int) -> None:
        """Called when this many workers have started; again when lost workers were replaced."""

    def on_progress(self, fields: Mapping[str, Any]) -> None:
        """Called with what workers report in the middle of an epoch, several times a second.

        It must be quick. An exception ends the run at once, as one of `on_epoch_end` does.
        """

    def on_epoch_end(self, logs: Mapping[str, Any]) -> None:
        """Called once per epoch with its row of the history, even if a lost worker makes it run twice."""

    def on_run_end(self, status: RunStatus, error: BaseException | None, estimator: Any) -> None:
        """Called when the run ends.

        Args:
            status: "finished", "failed" (by an exception) or "killed" (by an interrupt).
            error: The exception that ended the run, or None.
            estimator: The estimator; it has the trained model if the status is "finished".
        """


def split_callbacks(callbacks: Sequence[Any] | None) -> tuple[list[DriverCallback], list[Any]]:
    """The driver callbacks, and those that go to the workers."""
    driver = [callback for callback in callbacks or () if isinstance(callback, DriverCallback)]
    return driver, [callback for callback in callbacks or () if not isinstance(callback, DriverCallback)]


class DriverCallbackList:
    """Calls the driver callbacks of one run."""

    def __init__(self, callbacks: Sequence[DriverCallback]) -> None:
        self._callbacks = tuple(callbacks)
        self._epoch = 0

    @property
    def wants_progress(self) -> bool:
        """Whether any of them follows what happens in the middle of an epoch."""
        return any(type(one).on_progress is not DriverCallback.on_progress for one in self._callbacks)

    @contextmanager
    def running(self, estimator: Any, params: Mapping[str, Any]) -> Iterator[DriverCallbackList]:
        """Around the run: callbacks whose `on_run_begin` returned get their `on_run_end`, come what may."""
        with ExitStack() as begun:
            for callback in self._callbacks:
                callback.on_run_begin(params)
                begun.push(partial(_run_ended, callback, estimator))
            yield self

    def report(self, fields: Mapping[str, Any]) -> None:
        """Handle a worker's report; others than "gang", "epoch" and "progress" are ignored."""
        if fields["name"] == "gang":
            for callback in self._callbacks:
                callback.on_workers_ready(int(fields["workers"]))
        elif fields["name"] == "epoch":
            self.finish([fields["row"]])
        elif fields["name"] == "progress":
            for callback in self._callbacks:
                callback.on_progress(fields)

    def finish(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Call `on_epoch_end` for epochs that no report announced: some workers cannot reach the driver."""
        for row in rows:
            if int(row["epoch"]) > self._epoch:
                self._epoch = int(row["epoch"])
                for callback in self._callbacks:
                    callback.on_epoch_end(row)


def _run_ended(
    callback: DriverCallback,
    estimator: Any,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: Any,
) -> None:
    callback.on_run_end(_status(error), error, estimator)


def _status(error: BaseException | None) -> RunStatus:
    if error is None:
        return "finished"
    return "failed" if isinstance(error, Exception) else "killed"
