"""One run as the driver sees it: sources are made, workers started and listened to, results taken.

What the workers do is `train/loop.py`; which way the data takes, `inputs.py`.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import cloudpickle

from kindler.config import RunSettings
from kindler.data.plan import ColumnOptions
from kindler.engine import local
from kindler.engine.gang import new_run_id, new_secret
from kindler.engine.hub import Event
from kindler.engine.outcome import Outcome
from kindler.engine.supervisor import Job
from kindler.errors import ConfigError, KindlerError
from kindler.frameworks.registry import FRAMEWORKS
from kindler.inputs import Ingest, choose_engine, prepare, session_for
from kindler.train.checkpoint import Header
from kindler.train.checkpoints import Checkpoints, Found
from kindler.train.failure import Raise, decide, explained
from kindler.train.folder import folder_at
from kindler.train.progress import Progress
from kindler.train.streams import StreamSource, is_stream, stream_source
from kindler.train.task import Task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kindler.spark.frames import Feed

__all__ = ["Engine", "Model", "Plan", "Results", "job_of", "run"]

Engine = Literal["auto", "local", "spark"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The user's model in the hands of its framework.

    Attributes:
        framework: Its name in the registry.
        spec: What the user handed in.
        pack: Makes bytes of the spec, for the workers.
        lacking: What the spec lacks of the things named, as complaints.
        entry: What its workers run.
        extra_preload: What its workers import ahead of need, besides the framework.
        environment: Variables that must be set before the framework is imported.
    """

    framework: str
    spec: Any
    pack: Callable[[Any], bytes]
    lacking: Callable[..., list[str]]
    entry: str = "kindler.train.loop:run"
    extra_preload: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def preload(self) -> tuple[str, ...]:
        return (FRAMEWORKS.spec(self.framework).preload, *self.extra_preload)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run, on what, where.

    Attributes:
        model: The model.
        data: What the user handed in.
        validation: The same for validation, or None.
        options: Which columns.
        ingest: The way in for a Spark DataFrame.
        state: What training goes on from; empty for a new model.
        workers: How many; None takes all slots.
        engine: Who starts them.
        device: Where they compute.
        seed: Decides initial weights, order and dropout.
        settings: Time limits, threads.
        verbose: 0 shows nothing.
        what: What the progress bar counts.
        resume: Whether to go on from the newest checkpoint in the task's `model_dir`.
        hear: Called with what workers report.
        task: The other fields of `train.task.Task`.
    """

    model: Model
    data: Any
    validation: Any = None
    options: ColumnOptions
    ingest: Ingest = "auto"
    state: bytes = b""
    workers: int | None = None
    engine: Engine = "auto"
    device: str = "auto"
    seed: int = 0
    settings: RunSettings = field(default_factory=RunSettings)
    verbose: int = 1
    what: str = "epoch"
    resume: bool = False
    hear: Callable[[Mapping[str, Any]], None] = lambda fields: None
    task: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Results:
    """What rank 0 returned.

    Attributes:
        rows: The history's rows, or the one row of an evaluation.
        layout: dtype and row shape of each column.
        state: What training goes on from; empty after an evaluation.
    """

    rows: list[dict[str, Any]]
    layout: dict[str, Any]
    state: bytes


def run(plan: Plan) -> Results:
    """One run, from what the user handed in to what rank 0 returned; it goes on after a lost worker."""
    on_spark = choose_engine(plan.engine, plan.data, plan.validation) == "spark"
    spark = session_for(plan.data, plan.validation) if on_spark else None
    with tempfile.TemporaryDirectory(prefix="kindler-driver-") as folder:
        feeds: list[Feed] = []
        sources: list[Any] = []
        for name, item in (("data", plan.data), ("validation", plan.validation)):
            if item is None:
                sources.append(None)
            elif is_stream(item):
                sources.append(_stream(plan, item))
            else:
                source, feed = prepare(
                    item,
                    name=name,
                    options=plan.options,
                    spark=spark,
                    ingest=plan.ingest,
                    scratch=Path(folder),
                )
                sources.append(source)
                feeds += [feed] if feed is not None else []
        task = Task(
            framework=plan.model.framework,
            data=sources[0],
            validation=sources[1],
            seed=plan.seed,
            device=plan.device,
            settings=plan.settings,
            show=plan.verbose > 0,
            run_id=new_run_id(),
            **plan.task,
        )
        buffers = (cloudpickle.dumps(task), plan.model.pack(plan.model.spec), plan.state)
        with Progress(verbose=plan.verbose, what=plan.what) as progress:
            hear, workers = _listener(progress, plan.hear), 0

            def launch(checkpoints: Sequence[bytes]) -> list[Outcome]:
                nonlocal workers
                workers = _workers(plan, spark, before=workers)
                return _launch(plan, (*buffers, *checkpoints), spark, feeds, hear, folder, workers)

            outcomes = _Attempts(plan, task, launch, progress.note).run()
    told = json.loads(outcomes[0].buffers[0])
    return Results(told["rows"], told["layout"], outcomes[0].buffers[1])


def _stream(plan: Plan, data: Any) -> StreamSource:
    return stream_source(
        data,
        config=getattr(plan.model.spec, "config", {}),
        weights=plan.model.framework == "keras",
        allow_nan=plan.options.allow_nan,
    )


def job_of(
    model: Model,
    settings: RunSettings,
    *,
    target: str,
    buffers: tuple[bytes, ...],
    workers: int,
    threads: int | None = None,
) -> Job:
    """A gang of `workers` that call `target`."""
    return Job(
        target=target,
        buffers=buffers,
        size=workers,
        run_id=new_run_id(),
        secret=new_secret(),
        preload=model.preload,
        environment=model.environment,
        settings=settings,
        threads=settings.threads or threads,
    )


class _Attempts:
    """Starts a gang, and after a lost worker another one that goes on from the run's newest checkpoint.

    Args:
        plan: The run.
        task: What its workers are told.
        launch: Starts a gang that may go on from the checkpoints given, the first of use to it.
        say: Tells whoever watches.
    """

    def __init__(
        self,
        plan: Plan,
        task: Task,
        launch: Callable[[Sequence[bytes]], list[Outcome]],
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._task, self._launch, self._say = plan, task, launch, say
        self._folder = None if task.model_dir is None else Checkpoints(task.model_dir)
        self._failures = 0

    def run(self) -> list[Outcome]:
        """What the ranks of the first gang that did not fail returned."""
        earlier = self._earlier()
        found = earlier
        while True:
            try:
                return self._launch([checkpoint.data for checkpoint in found])
            except KindlerError as error:
                wait_s = self._wait_or_raise(error)
                # Of this run only: another one's may lie in the same folder.
                mine = self._folder.to_go_on_from(self._is_mine) if self._folder is not None else []
                found = [*mine, *earlier]
                self._tell(error, found)
            time.sleep(wait_s)

    def _earlier(self) -> list[Found]:
        """What an earlier run has left to go on from, where that is wanted."""
        if self._folder is None or not self._plan.resume:
            return []
        found = self._folder.to_go_on_from()
        for checkpoint in found:
            if checkpoint.header.framework != self._task.framework:
                raise ConfigError(
                    f"{checkpoint.path} is a checkpoint of {checkpoint.header.framework!r}, and this model is"
                    f" one of {self._task.framework!r}.\nHint: give each model a model_dir of its own."
                )
        return found

    def _wait_or_raise(self, error: KindlerError) -> float:
        writes = self._folder is not None
        decision = decide(error, self._failures, self._plan.settings, has_checkpoints=writes)
        if isinstance(decision, Raise):
            trains = self._task.epochs > 0
            raise explained(error, self._failures, trains=trains, has_checkpoints=writes)
        self._failures += 1
        return decision.wait_s

    def _is_mine(self, header: Header) -> bool:
        return header.run == self._task.run_id

    def _tell(self, error: KindlerError, found: Sequence[Found]) -> None:
        what = str(error).partition("\n")[0]
        place = found[0].path if found else "the beginning, for there is no checkpoint yet"
        limit = self._plan.settings.max_failures
        told = f"{what} The run goes on from {place} (failure {self._failures} of at most {limit})."
        _log.log(logging.INFO if self._plan.verbose else logging.WARNING, told)
        self._say(told)


def _workers(plan: Plan, spark: SparkSession | None, *, before: int) -> int:
    """How many workers to start; `before` is how many there were, where some were lost."""
    if spark is None:
        return plan.workers or local.slots()
    from kindler.spark.slots import remaining_workers, resolve_workers

    if before:
        return remaining_workers(spark, before, plan.settings)
    return resolve_workers(spark, plan.workers, plan.settings)


def _launch(
    plan: Plan,
    buffers: tuple[bytes, ...],
    spark: SparkSession | None,
    feeds: Sequence[Feed],
    listener: Callable[[Event], None],
    folder: str,
    workers: int,
) -> list[Outcome]:
    target = plan.model.entry
    if spark is None:
        job = job_of(plan.model, plan.settings, target=target, buffers=buffers, workers=workers)
        return local.run(replace(job, debris=(folder,)), listener=listener)
    from kindler.spark import engine
    from kindler.spark.slots import task_threads

    threads = task_threads(spark, workers)
    job = job_of(plan.model, plan.settings, target=target, buffers=buffers, workers=workers, threads=threads)
    model_dir = plan.task.get("model_dir")
    shared = None if model_dir is None else folder_at(model_dir)
    return engine.run(job, spark=spark, feeds=feeds, listener=listener, folder=shared)


def _listener(progress: Progress, also: Callable[[Mapping[str, Any]], None]) -> Callable[[Event], None]:
    def hear(event: Event) -> None:
        if event.kind == "log":
            progress.log(event.rank, event.fields["line"])
        else:
            progress.report(event.fields)
            also(event.fields)

    return hear
