"""One run as the driver sees it: sources are made, workers started and listened to, results taken.

What the workers do is `train/loop.py`; which way the data takes, `inputs.py`.
"""

from __future__ import annotations

import json
import tempfile
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
from kindler.frameworks.registry import FRAMEWORKS
from kindler.inputs import Ingest, choose_engine, prepare, session_for
from kindler.train.progress import Progress
from kindler.train.task import Task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kindler.spark.frames import Feed

__all__ = ["Engine", "Model", "Plan", "Results", "job_of", "run"]

Engine = Literal["auto", "local", "spark"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The user's model in the hands of its framework.

    Attributes:
        framework: Its name in the registry.
        spec: What the user handed in.
        pack: Makes bytes of the spec, for the workers.
        extra_preload: What its workers import ahead of need, besides the framework.
        environment: Variables that must be set before the framework is imported.
    """

    framework: str
    spec: Any
    pack: Callable[[Any], bytes]
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
    """One gang, from what the user handed in to what rank 0 returned."""
    on_spark = choose_engine(plan.engine, plan.data, plan.validation) == "spark"
    spark = session_for(plan.data, plan.validation) if on_spark else None
    with tempfile.TemporaryDirectory(prefix="kindler-driver-") as folder:
        feeds: list[Feed] = []
        sources: list[Any] = []
        for name, item in (("data", plan.data), ("validation", plan.validation)):
            if item is None:
                sources.append(None)
                continue
            source, feed = prepare(
                item, name=name, options=plan.options, spark=spark, ingest=plan.ingest, scratch=Path(folder)
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
            **plan.task,
        )
        buffers = (cloudpickle.dumps(task), plan.model.pack(plan.model.spec), plan.state)
        with Progress(verbose=plan.verbose, what=plan.what) as progress:
            outcomes = _launch(plan, buffers, spark, feeds, _listener(progress), folder)
    told = json.loads(outcomes[0].buffers[0])
    return Results(told["rows"], told["layout"], outcomes[0].buffers[1])


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


def _launch(
    plan: Plan,
    buffers: tuple[bytes, ...],
    spark: SparkSession | None,
    feeds: Sequence[Feed],
    listener: Callable[[Event], None],
    folder: str,
) -> list[Outcome]:
    target = "kindler.train.loop:run"
    if spark is None:
        workers = plan.workers or local.slots()
        job = job_of(plan.model, plan.settings, target=target, buffers=buffers, workers=workers)
        return local.run(replace(job, debris=(folder,)), listener=listener)
    from kindler.spark import engine
    from kindler.spark.slots import resolve_workers, task_threads

    workers = resolve_workers(spark, plan.workers, plan.settings)
    threads = task_threads(spark, workers)
    job = job_of(plan.model, plan.settings, target=target, buffers=buffers, workers=workers, threads=threads)
    return engine.run(job, spark=spark, feeds=feeds, listener=listener)


def _listener(progress: Progress) -> Callable[[Event], None]:
    def hear(event: Event) -> None:
        if event.kind == "log":
            progress.log(event.rank, event.fields["line"])
        else:
            progress.report(event.fields)

    return hear
