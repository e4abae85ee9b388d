"""What a run does about lost workers: another attempt from the newest checkpoint, with the workers left.

A lost worker may be its machine's fault and worth another try; an error in the user's code or data would
recur.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kindler.config import RunSettings
from kindler.engine import local
from kindler.engine.outcome import Outcome
from kindler.errors import (
    ConfigError,
    KindlerError,
    StartTimeoutError,
    SyncError,
    SyncTimeoutError,
    WorkerLost,
)
from kindler.train.checkpoints import Checkpoints, StoredCheckpoint
from kindler.train.options import Task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LONGEST_WAIT_S = 30.0


class Attempts:
    """Starts a gang, and after the loss of a worker another one that continues from the newest checkpoint.

    `launch` continues from the first of the given checkpoints that it can use.
    """

    def __init__(
        self,
        task: Task,
        launch: Callable[[Sequence[StoredCheckpoint]], list[Outcome]],
        say: Callable[[str], None],
    ) -> None:
        self._task, self._launch, self._say = task, launch, say
        model_dir = task.config.model_dir
        self._folder = None if model_dir is None else Checkpoints(model_dir)
        self._failures = 0

    def run(self) -> list[Outcome]:
        checkpoints = earlier = self._of_earlier_run()
        while True:
            try:
                return self._launch(checkpoints)
            except ExecutorsAreBack as back:
                wait_s = 0.0
                checkpoints = [*self._own(), *earlier]
                self._say(f"{back} It goes on from {checkpoints[0].path}.")
            except KindlerError as error:
                wait_s = self._wait_or_raise(error)
                checkpoints = [*self._own(), *earlier]
                what = str(error).partition("\n")[0]
                start = checkpoints[0].path if checkpoints else "the beginning, as there is no checkpoint yet"
                limit = self._task.config.settings.max_failures
                self._say(
                    f"{what} The run goes on from {start} (failure {self._failures} of at most {limit})."
                )
            time.sleep(wait_s)

    def _own(self) -> list[StoredCheckpoint]:
        if self._folder is None:
            return []
        return self._folder.resume_candidates(lambda header: header.run == self._task.run_id)

    def _of_earlier_run(self) -> list[StoredCheckpoint]:
        if self._folder is None or not self._task.training.resume:
            return []
        checkpoints = self._folder.resume_candidates()
        for checkpoint in checkpoints:
            if checkpoint.header.framework != self._task.framework:
                raise ConfigError(
                    f"{checkpoint.path} is a checkpoint of {checkpoint.header.framework!r}, but this model"
                    f" is one of {self._task.framework!r}.\nHint: give each model a model_dir of its own."
                )
        return checkpoints

    def _wait_or_raise(self, error: KindlerError) -> float:
        writes = self._folder is not None
        wait_s = retry_wait_s(error, self._failures, self._task.config.settings, has_checkpoints=writes)
        if wait_s is None:
            own = self._own() if _is_lost_server(error) else []
            raise explained(
                error,
                self._failures,
                trains=self._task.trains,
                has_checkpoints=writes,
                newest=own[0].path if own else None,
            )
        self._failures += 1
        return wait_s


def retry_wait_s(
    error: KindlerError, failures: int, settings: RunSettings, *, has_checkpoints: bool
) -> float | None:
    """Seconds to wait before the workers are started again; None to give up.

    >>> lost = WorkerLost("killed", rank=1, host="a")
    >>> retry_wait_s(lost, 1, RunSettings(retry_backoff_s=2.0), has_checkpoints=True)
    4.0
    """
    if not has_checkpoints or failures >= settings.max_failures or not _may_pass(error, failures):
        return None
    return min(settings.retry_backoff_s * 2.0**failures, _LONGEST_WAIT_S)


def _may_pass(error: KindlerError, failures: int) -> bool:
    if _is_lost_server(error):
        return False  # its updates since the checkpoint are gone: whoever started the run decides
    if isinstance(error, SyncTimeoutError):
        return False  # nobody is gone: the workers wait for each other
    if isinstance(error, StartTimeoutError):
        return failures > 0  # they had come up before, so their machines may come back
    return isinstance(error, WorkerLost | SyncError)


def explained(
    error: KindlerError, failures: int, *, trains: bool, has_checkpoints: bool, newest: str | None = None
) -> KindlerError:
    """Add the number of attempts, or a hint about checkpoints, to the error."""
    if _is_lost_server(error):
        _extend(error, _server_advice(newest, has_checkpoints=has_checkpoints))
    if failures:
        _extend(error, f"The run failed {failures + 1} times; this is the last failure.")
    elif isinstance(error, WorkerLost) and trains and not has_checkpoints and not _is_lost_server(error):
        _extend(
            error,
            "Hint: with model_dir=..., fit writes checkpoints and resumes by itself when a worker is lost.",
        )
    return error


def _is_lost_server(error: KindlerError) -> bool:
    return isinstance(error, WorkerLost) and error.role == "ps"


def _server_advice(newest: str | None, *, has_checkpoints: bool) -> str:
    lost = "It was the parameter server, which held the weights and the optimizer"
    if newest is not None:
        return f"{lost}. The newest checkpoint is {newest}.\nHint: fit(resume=True) continues from it."
    if has_checkpoints:
        return f"{lost}; there is no checkpoint yet."
    return f"{lost}.\nHint: with model_dir=..., fit writes checkpoints, and fit(resume=True) continues."


def _extend(error: KindlerError, more: str) -> None:
    error.args = (f"{error.args[0] if error.args else ''}\n{more}", *error.args[1:])


class WorkerCount:
    """The number of workers of an attempt: as many as in the first, unless executors were lost for good."""

    def __init__(
        self,
        workers: int | None,
        settings: RunSettings,
        spark: SparkSession | None,
        say: Callable[[str], None],
    ) -> None:
        self._workers, self._settings, self._spark, self.say = workers, settings, spark, say
        self.full = self.size = 0

    def resolve(self) -> None:
        spark, settings = self._spark, self._settings
        if spark is None:
            self.full = self.size = self._workers or local.slots()
            return
        from kindler.spark.executors import remaining_workers, resolve_workers

        if self.full:
            self.size = remaining_workers(spark, self.full, settings, self.say)
        else:
            self.full = self.size = resolve_workers(spark, self._workers, settings)

    @property
    def can_grow(self) -> bool:
        if self._spark is None or self.size == self.full:
            return False
        from kindler.spark.executors import slots_without_a_job

        return (slots_without_a_job(self._spark) or 0) >= self.full

    def hear(self, fields: Mapping[str, Any]) -> None:
        """Handle a worker's report without waiting.

        Raises ExecutorsAreBack after a saved epoch if there are slots for all workers again.
        """
        if fields["name"] == "saved" and not fields["ends"] and self.can_grow:
            raise ExecutorsAreBack(
                f"the lost executors are back: the run goes on with {self.full} instead of {self.size}"
                " workers."
            )


class ExecutorsAreBack(Exception):
    """Ends an attempt with fewer workers than at first, so that the next one has all of them."""
