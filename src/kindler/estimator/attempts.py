"""What a run does about lost workers: another attempt from the newest checkpoint, with the workers left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kindler.config import RunSettings
from kindler.engine import local
from kindler.engine.outcome import Outcome
from kindler.errors import ConfigError, KindlerError
from kindler.train.checkpoint_dir import Checkpoints, StoredCheckpoint
from kindler.train.checkpoint_file import Header
from kindler.train.failure import Raise, decide, explained, is_lost_server
from kindler.train.task import Task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Attempts:
    """Starts a gang, and after the loss of a worker another one that continues from the newest checkpoint.

    Args:
        task: The run.
        launch: Starts a gang that continues from the first of these checkpoints that it can use.
        say: Shows a message to whoever watches.
    """

    def __init__(
        self,
        task: Task,
        launch: Callable[[Sequence[StoredCheckpoint]], list[Outcome]],
        say: Callable[[str], None],
    ) -> None:
        self._task, self._launch, self._say = task, launch, say
        self._folder = None if task.model_dir is None else Checkpoints(task.model_dir)
        self._failures = 0

    def run(self) -> list[Outcome]:
        """The results of the first gang that does not fail."""
        earlier = self._earlier()
        found = earlier
        while True:
            try:
                return self._launch(found)
            except ExecutorsAreBack as back:
                wait_s = 0.0
                found = self._found(earlier)
                self._say(f"{back} It goes on from {found[0].path}.")
            except KindlerError as error:
                wait_s = self._wait_or_raise(error)
                found = self._found(earlier)
                self._tell(error, found)
            time.sleep(wait_s)

    def _found(self, earlier: Sequence[StoredCheckpoint]) -> list[StoredCheckpoint]:
        # Those of this run only: the folder may have some of other runs.
        mine = self._folder.to_go_on_from(self._is_mine) if self._folder is not None else []
        return [*mine, *earlier]

    def _earlier(self) -> list[StoredCheckpoint]:
        """The checkpoints of an earlier run to continue from, if that is wanted."""
        if self._folder is None or not self._task.training.resume:
            return []
        found = self._folder.to_go_on_from()
        for checkpoint in found:
            if checkpoint.header.framework != self._task.framework:
                raise ConfigError(
                    f"{checkpoint.path} is a checkpoint of {checkpoint.header.framework!r}, but this model"
                    f" is one of {self._task.framework!r}.\nHint: give each model a model_dir of its own."
                )
        return found

    def _wait_or_raise(self, error: KindlerError) -> float:
        writes = self._folder is not None
        decision = decide(error, self._failures, self._task.settings, has_checkpoints=writes)
        if isinstance(decision, Raise):
            mine = self._found(()) if is_lost_server(error) else []
            raise explained(
                error,
                self._failures,
                trains=self._task.trains,
                has_checkpoints=writes,
                newest=str(mine[0].path) if mine else None,
            )
        self._failures += 1
        return decision.wait_s

    def _is_mine(self, header: Header) -> bool:
        return header.run == self._task.run_id

    def _tell(self, error: KindlerError, found: Sequence[StoredCheckpoint]) -> None:
        what = str(error).partition("\n")[0]
        place = found[0].path if found else "the beginning, for there is no checkpoint yet"
        limit = self._task.settings.max_failures
        self._say(f"{what} The run goes on from {place} (failure {self._failures} of at most {limit}).")


class Crew:
    """The number of workers of an attempt: that of the first one, unless executors were lost for good.

    Attributes:
        full: Workers of the first attempt.
        size: Workers of this one.
        say: Shows a message to whoever watches.
    """

    def __init__(
        self,
        workers: int | None,
        settings: RunSettings,
        spark: SparkSession | None,
        say: Callable[[str], None],
    ) -> None:
        self._workers, self._settings, self._spark, self.say = workers, settings, spark, say
        self.full = self.size = 0

    def gather(self) -> None:
        """Decide how many workers to start now. Waits for executors."""
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
    def could_be_full(self) -> bool:
        """Whether workers are missing and there are slots for them again."""
        if self._spark is None or self.size == self.full:
            return False
        from kindler.spark.executors import slots_without_a_job

        return (slots_without_a_job(self._spark) or 0) >= self.full


class ExecutorsAreBack(Exception):
    """Ends an attempt with fewer workers than at first, so that the next one has all of them."""


class ReturningExecutors:
    """Notices that a run that has lost workers can have all of them again, once an epoch is saved."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def heard(self, fields: Mapping[str, Any]) -> None:
        """Takes the report of a worker, without waiting for anything: others are to be heard, too.

        Raises:
            ExecutorsAreBack: The epoch is over and saved, and there are slots for all workers.
        """
        crew = self._crew
        if fields["name"] != "saved" or fields["ends"] or not crew.could_be_full:
            return
        raise ExecutorsAreBack(
            f"the lost executors are back: the run goes on with {crew.full} instead of {crew.size} workers."
        )
