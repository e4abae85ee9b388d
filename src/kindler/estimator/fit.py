"""One run as the driver sees it: sources are made, workers started and listened to, results taken.

What the workers do is `train/loop.py`; which way the data takes, `inputs.py`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kindler.config import RunSettings
from kindler.data.column_options import ColumnOptions
from kindler.data.row_order import Dealing
from kindler.engine import local
from kindler.engine.hub import Event
from kindler.engine.monitor import new_run_id, new_secret
from kindler.engine.outcome import Outcome
from kindler.engine.supervisor import Job
from kindler.errors import ConfigError, KindlerError
from kindler.estimator.inputs import Ingest, choose_engine, prepare, session_for
from kindler.files import folder_at
from kindler.frameworks.pickling import travelling
from kindler.frameworks.registry import FRAMEWORKS, FrameworkSpec
from kindler.temporary import Folder
from kindler.train.checkpoint_dir import Checkpoints, Found
from kindler.train.checkpoint_file import Header
from kindler.train.failure import Raise, decide, explained
from kindler.train.joining import LOOPS
from kindler.train.loader_source import StreamSource, is_stream, stream_source
from kindler.train.progress import Progress
from kindler.train.task import Task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kindler.data.sources import Source
    from kindler.spark.frames import Feed

__all__ = ["Engine", "Model", "Plan", "Results", "job_of", "run"]

Engine = Literal["auto", "local", "spark"]

_LOOK_S = 0.2
_CHECKPOINT_WAIT_S = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The user's model in the hands of its framework.

    What can be done with it is its framework's to say: see `frameworks/contract.py`.

    Attributes:
        framework: Its name in the registry.
        spec: What the user handed in.
        extra_preload: What its workers import ahead of need, besides the framework.
    """

    framework: str
    spec: Any
    extra_preload: tuple[str, ...] = ()

    @property
    def row(self) -> FrameworkSpec:
        """What the framework can do."""
        return FRAMEWORKS.spec(self.framework)

    @property
    def replica(self) -> Any:
        """The framework's class."""
        return FRAMEWORKS.load(self.framework)

    def pack(self) -> bytes:
        """The spec as bytes, for the workers."""
        packed: bytes = self.replica.dumps(self.spec)
        return packed

    @property
    def entry(self) -> str:
        """What its workers run."""
        return LOOPS[self.row.loop]

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """Variables that must be set before the framework is imported."""
        variables: tuple[tuple[str, str], ...] = self.replica.environment(self.spec)
        return variables

    @property
    def preload(self) -> tuple[str, ...]:
        return (*filter(None, [self.row.preload]), *self.extra_preload)


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
    with Folder("kindler-driver-") as folder:
        feeds: list[Feed] = []
        sources: list[Any] = []
        for name, item in (("data", plan.data), ("validation", plan.validation)):
            if item is None:
                sources.append(None)
            elif is_stream(item):
                sources.append(_stream(plan, item))
            else:
                source, feed = _prepared(plan, item, name, spark, folder)
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
        spec = plan.model.pack()
        with Progress(verbose=plan.verbose, what=plan.what) as progress:
            crew = _Crew(plan, spark, _teller(plan, progress))
            returns = _Returns(crew, task)
            hear = _listener(progress, plan.hear, returns.heard)

            def launch(checkpoints: Sequence[Found]) -> list[Outcome]:
                crew.gather()
                if crew.size > 1 and task.epochs:
                    _refuse_several(plan.model)
                dealing = _dealing(crew.size, plan.seed, [found.header for found in checkpoints])
                told = travelling(replace(task, dealing=dealing))
                buffers = (told, spec, plan.state, *(found.data for found in checkpoints))
                return _launch(plan, buffers, spark, feeds, hear, crew.size, dealing)

            outcomes = _Attempts(plan, task, launch, crew.say).run()
    told = json.loads(outcomes[0].buffers[0])
    return Results(told["rows"], told["layout"], outcomes[0].buffers[1])


def _prepared(
    plan: Plan, item: Any, name: str, spark: SparkSession | None, folder: Path
) -> tuple[Source, Feed | None]:
    try:
        return prepare(item, name=name, options=plan.options, spark=spark, ingest=plan.ingest, scratch=folder)
    except ConfigError as exc:
        if name != "validation" or type(exc) is not ConfigError:
            raise
        raise ConfigError(
            f"validation_data: {exc}\nHint: its columns must have the names that those of the data have."
        ) from None


def _stream(plan: Plan, data: Any) -> StreamSource:
    return stream_source(
        data,
        config=getattr(plan.model.spec, "config", {}),
        weights=plan.model.row.row_weights,
        allow_nan=plan.options.allow_nan,
    )


def job_of(
    model: Model,
    settings: RunSettings,
    *,
    target: str,
    buffers: tuple[bytes, ...],
    workers: int,
    cores: int | None = None,
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
        threads=settings.threads,
        cores=cores,
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
        launch: Callable[[Sequence[Found]], list[Outcome]],
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
                return self._launch(found)
            except _ExecutorsAreBack as back:
                wait_s = 0.0
                found = self._found(earlier)
                self._say(f"{back} It goes on from {found[0].path}.")
            except KindlerError as error:
                wait_s = self._wait_or_raise(error)
                found = self._found(earlier)
                self._tell(error, found)
            time.sleep(wait_s)

    def _found(self, earlier: Sequence[Found]) -> list[Found]:
        # Of this run only: another one's may lie in the same folder.
        mine = self._folder.to_go_on_from(self._is_mine) if self._folder is not None else []
        return [*mine, *earlier]

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
        self._say(f"{what} The run goes on from {place} (failure {self._failures} of at most {limit}).")


class _Crew:
    """How many workers an attempt has: as many as the first one, unless executors were lost for good.

    Attributes:
        full: How many the first attempt had.
        size: How many this one has.
        say: Tells whoever watches.
    """

    def __init__(self, plan: Plan, spark: SparkSession | None, say: Callable[[str], None]) -> None:
        self._plan, self._spark, self.say = plan, spark, say
        self.full = self.size = 0

    def gather(self) -> None:
        """Decide how many workers to start now; waits for executors."""
        plan, spark = self._plan, self._spark
        if spark is None:
            self.full = self.size = plan.workers or local.slots()
            return
        from kindler.spark.slots import remaining_workers, resolve_workers

        if self.full:
            self.size = remaining_workers(spark, self.full, plan.settings, self.say)
        else:
            self.full = self.size = resolve_workers(spark, plan.workers, plan.settings)

    @property
    def could_be_full(self) -> bool:
        """Whether workers are missing and there is room for them again."""
        if self._spark is None or self.size == self.full:
            return False
        from kindler.spark.slots import slots

        return slots(self._spark) >= self.full


class _ExecutorsAreBack(Exception):
    """A run with fewer workers than at first ends here, to go on with all of them."""


class _Returns:
    """Notices at the end of an epoch that a run which has lost workers can have all of them again."""

    def __init__(self, crew: _Crew, task: Task) -> None:
        self._crew, self._task = crew, task
        self._folder = None if task.model_dir is None else Checkpoints(task.model_dir)

    def heard(self, fields: Mapping[str, Any]) -> None:
        """A worker reported something.

        Raises:
            _ExecutorsAreBack: The epoch is over and kept, and there is room for all workers.
        """
        if fields["name"] != "epoch" or self._folder is None or not self._crew.could_be_full:
            return
        epoch, crew = fields["row"]["epoch"], self._crew
        deadline = time.monotonic() + _CHECKPOINT_WAIT_S

        def is_kept(header: Header) -> bool:
            return header.run == self._task.run_id and header.ends_epoch and header.epoch >= epoch

        # It is written in the background. What has no checkpoint would have to be trained again.
        while (kept := self._folder.header(is_kept)) is None:
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_S)
        if kept.stopped or kept.epoch >= kept.first_epoch + self._task.epochs:
            return  # there is nothing left to do for them
        raise _ExecutorsAreBack(
            f"the lost executors are back: the run goes on with {crew.full} instead of {crew.size} workers."
        )


def _teller(plan: Plan, progress: Progress) -> Callable[[str], None]:
    """Tells whoever watches what becomes of the run."""

    def say(line: str) -> None:
        _log.log(logging.INFO if plan.verbose else logging.WARNING, line)
        progress.note(line)

    return say


def _refuse_several(model: Model) -> None:
    complaints = model.replica.against_several(model.spec)
    if complaints:
        raise ConfigError("\n".join(complaints))


def _dealing(workers: int, seed: int, headers: Sequence[Header]) -> Dealing:
    """How rows are dealt to so many workers: as in the run that goes on, if each can have a lane of it.

    Args:
        workers: How many there are now.
        seed: The run's.
        headers: Checkpoints that the run may go on from, best first.
    """
    for header in headers:
        if header.lanes and header.seed == seed and workers <= len(header.counts):
            lanes = len(header.counts)
            return Dealing(seed=seed, lanes=header.lanes, workers=header.workers, joined=lanes)
    return Dealing.between(workers, seed=seed)


def _launch(
    plan: Plan,
    buffers: tuple[bytes, ...],
    spark: SparkSession | None,
    feeds: Sequence[Feed],
    listener: Callable[[Event], None],
    workers: int,
    dealing: Dealing,
) -> list[Outcome]:
    target = plan.model.entry
    if spark is None:
        job = job_of(plan.model, plan.settings, target=target, buffers=buffers, workers=workers)
        return local.run(job, listener=listener)
    from kindler.spark import engine
    from kindler.spark.slots import cores_per_host

    cores = cores_per_host(spark)
    job = job_of(plan.model, plan.settings, target=target, buffers=buffers, workers=workers, cores=cores)
    model_dir = plan.task.get("model_dir")
    shared = None if model_dir is None else folder_at(model_dir)
    return engine.run(job, spark=spark, feeds=feeds, dealing=dealing, listener=listener, folder=shared)


def _listener(progress: Progress, *also: Callable[[Mapping[str, Any]], None]) -> Callable[[Event], None]:
    def hear(event: Event) -> None:
        if event.kind == "log":
            progress.log(event.rank, event.fields["line"])
        else:
            progress.report(event.fields)
            for listener in also:
                listener(event.fields)

    return hear
