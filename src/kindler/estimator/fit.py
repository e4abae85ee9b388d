"""One run as the driver sees it: sources are made, workers started and listened to, results taken.

What the workers do is in `train/loop.py`; how data reaches them, in `inputs/`.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kindler.config import RunSettings
from kindler.data.row_order import Dealing
from kindler.engine import local
from kindler.engine.gang import Halted
from kindler.engine.hub import Event
from kindler.engine.job import Job, RankSpec, equal_ranks, new_run_id
from kindler.engine.outcome import Outcome
from kindler.engine.placement import crowd_message, machine_gpus
from kindler.errors import ConfigError
from kindler.estimator.attempts import Attempts, Crew, ReturningExecutors
from kindler.estimator.inputs.contract import Input, Prepared, SourceRequest
from kindler.estimator.inputs.recognise import Engine, choose_engine, session_for
from kindler.estimator.model import FrameworkModel
from kindler.files import folder_at
from kindler.frameworks.pickling import pickle_for_workers
from kindler.sync.contract import SyncConfig
from kindler.sync.registry import servers_of, sync_spec
from kindler.temporary import Folder
from kindler.train.checkpoint_dir import StoredCheckpoint
from kindler.train.checkpoint_file import Header
from kindler.train.joining import SERVER
from kindler.train.options import EvaluateOptions, FitOptions
from kindler.train.progress import ProgressBar
from kindler.train.task import StateLimit, Task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kindler.spark.frames import Feed

_log = logging.getLogger(__name__)


class RunObserver:
    """Follows runs of an estimator whose class returns it from `observers`; entered around each of them."""

    def __enter__(self) -> None:
        """Called before a run."""

    def __exit__(self, *error: object) -> None:
        """Called after it, however it has ended."""

    def hear(self, fields: Mapping[str, Any]) -> None:
        """Called with everything that workers report, the losses of all steps included."""

    def finish(self, rows: list[dict[str, Any]]) -> None:
        """Called with the history of a run that has ended well."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What to run, on what data, and where.

    Attributes:
        model: The model.
        options: What was asked for: training, or an evaluation.
        data: The rows to train on, or to evaluate.
        validation: The rows to evaluate while training, if any.
        state: What training continues from; empty for a new model.
        workers: How many; None takes all slots.
        engine: Who starts them.
        device: Where they compute.
        seed: Decides initial weights, order and dropout.
        settings: Time limits, threads.
        share_gpus: Whether several workers may compute on one GPU.
        model_dir: The folder of checkpoints.
        log_steps: Whether workers report the loss of every step.
        watched: Whether `hear` follows the progress within an epoch, even if it is not shown.
        hear: Called with what workers report.
    """

    model: FrameworkModel
    options: FitOptions | EvaluateOptions
    data: Input
    validation: Input | None = None
    state: bytes = b""
    workers: int | None = None
    engine: Engine = "auto"
    device: str = "auto"
    seed: int = 0
    settings: RunSettings = field(default_factory=RunSettings)
    share_gpus: bool = False
    model_dir: str | None = None
    log_steps: bool = False
    watched: bool = False
    hear: Callable[[Mapping[str, Any]], None] = lambda fields: None

    @property
    def inputs(self) -> list[Input]:
        return [item for item in (self.data, self.validation) if item is not None]


@dataclass(frozen=True, slots=True)
class RunResults:
    """What rank 0 returned.

    Attributes:
        rows: The history's rows, or the one row of an evaluation.
        layout: dtype and row shape of each column.
        state: What training continues from; empty after an evaluation.
        mode: How the framework ran the steps, if it had a choice.
        step: Optimizer steps of the model by now.
        halted: Whether the user has interrupted the run, which ended after this step.
    """

    rows: list[dict[str, Any]]
    layout: dict[str, Any]
    state: bytes
    mode: str | None = None
    step: int = 0
    halted: bool = False


def run(plan: RunPlan) -> RunResults:
    """Run a plan to its end, through the loss of workers."""
    on_spark = choose_engine(plan.engine, *plan.inputs) == "spark"
    spark = session_for(*plan.inputs) if on_spark else None
    options = plan.options
    with Folder("kindler-driver-") as folder:
        data, feed = _prepared(plan, plan.data, "data", spark, folder)
        validation, more = None, None
        if plan.validation is not None:
            validation, more = _prepared(plan, plan.validation, "validation", spark, folder)
        feeds = [item for item in (feed, more) if item is not None]
        task = Task(
            framework=plan.model.framework,
            options=options,
            data=data,
            validation=validation,
            seed=plan.seed,
            device=plan.device,
            process_group=plan.model.facts.process_group,
            model_dir=plan.model_dir,
            run_id=new_run_id(),
            log_steps=plan.log_steps,
            watched=plan.watched,
            settings=plan.settings,
            share_gpus=plan.share_gpus,
            limit=_limit(plan, spark),
        )
        if task.limit is not None:  # otherwise a worker says it before the first step
            task.limit.check(len(plan.state) or plan.model.expected_bytes(plan.seed))
        spec = plan.model.packed
        what = "epoch" if task.trains else "evaluate"
        with ProgressBar(verbose=options.verbose, what=what) as progress:
            gpus = [] if on_spark else _gpus_here(plan)
            workers = plan.workers or len(gpus) or None
            crew = Crew(workers, plan.settings, spark, _teller(plan, progress))
            returning = ReturningExecutors(crew)
            hear = _listener(progress, plan.hear, returning.heard, _mourner(crew.say), _pass_on_warnings)

            def launch(checkpoints: Sequence[StoredCheckpoint]) -> list[Outcome]:
                crew.gather()
                if spark is not None:
                    _check_executors(plan.model, spark)
                if gpus and crew.size > len(gpus) and not plan.share_gpus:
                    raise ConfigError(crowd_message(crew.size, len(machine_gpus()), plan.device))
                if crew.size > 1 and task.trains:
                    _refuse_several(plan.model)
                dealing = _dealing(crew.size, plan.seed, [found.header for found in checkpoints])
                buffers = (
                    _packed(replace(task, dealing=dealing)),
                    spec,
                    plan.state,
                    *(found.data for found in checkpoints),
                )
                return _launch(plan, buffers, spark, feeds, hear, crew.size, dealing)

            outcomes, halted = _outcomes(Attempts(task, launch, crew.say))
            told, state = next(
                outcome.buffers for outcome in outcomes if outcome.buffers and outcome.buffers[0]
            )
            report = json.loads(told)
            if not task.trains:
                progress.result(report["rows"][0])
    step = report.get("step", 0)
    return RunResults(report["rows"], report["layout"], state, report.get("mode"), step, halted)


def _outcomes(attempts: Attempts) -> tuple[list[Outcome], bool]:
    """What workers returned, and whether that is because the user has interrupted them."""
    try:
        return attempts.run(), False
    except Halted as halted:
        return halted.outcomes, True


def _limit(plan: RunPlan, spark: SparkSession | None) -> StateLimit | None:
    """What a trained state may have if it can only come back through Spark."""
    if spark is None or plan.model_dir is not None or not isinstance(plan.options, FitOptions):
        return None
    from kindler.spark.executors import meets_at_driver
    from kindler.spark.large_buffers import MOST_BYTES, NO_WAY_BACK

    return None if meets_at_driver(spark, plan.settings) else StateLimit(MOST_BYTES, NO_WAY_BACK)


def _check_executors(model: FrameworkModel, spark: SparkSession) -> None:
    """Complain, before a worker starts, about executors that lack what it needs."""
    from kindler.spark.executors import check_executors

    check_executors(spark, model.row.package)


def _prepared(plan: RunPlan, item: Input, name: str, spark: SparkSession | None, folder: Path) -> Prepared:
    columns = plan.options.columns
    request = SourceRequest(
        name=name,
        columns=columns if name == "data" else replace(columns, length_col=None),
        ingest=plan.options.ingest,
        spark=spark,
        scratch=folder,
        config=getattr(plan.model.spec, "config", {}),
        row_weights=plan.model.row.weighted_batches,
    )
    try:
        return item.source(request)
    except ConfigError as exc:
        if name != "validation" or not item.has_columns or type(exc) is not ConfigError:
            raise
        raise ConfigError(
            f"validation_data: {exc}\nHint: its columns must have the names of those in the training data."
        ) from None


def _packed(task: Task) -> bytes:
    try:
        return pickle_for_workers(task)
    except ConfigError:
        pickle_for_workers(task.options)  # complains in the words of `fit`, if it is one of its arguments
        raise


def job_of(
    model: FrameworkModel,
    settings: RunSettings,
    *,
    target: str,
    buffers: tuple[bytes, ...],
    workers: int,
    cores: int | None = None,
    servers: int = 0,
    together: bool = True,
    replaceable: bool = False,
) -> Job:
    """A gang of `workers` that call `target`, with parameter servers beside them."""
    server = RankSpec(target=SERVER, role="ps", ports=1, service=True, beside=True)
    return Job(
        ranks=(*equal_ranks(target, workers), *((server,) * servers)),
        buffers=buffers,
        preload=model.preload,
        environment=model.facts.environment,
        settings=settings,
        threads=settings.threads,
        cores=cores,
        together=together,
        replaceable=replaceable,
    )


def _teller(plan: RunPlan, progress: ProgressBar) -> Callable[[str], None]:
    """Shows messages about the run to whoever watches."""

    def say(line: str) -> None:
        _log.log(logging.INFO if plan.options.verbose else logging.WARNING, line)
        progress.note(line)

    return say


def _mourner(say: Callable[[str], None]) -> Callable[[Mapping[str, Any]], None]:
    """Says which worker died where the others go on, or wait for another one in its place."""

    def hear(fields: Mapping[str, Any]) -> None:
        if fields["name"] == "replaced":
            say(
                f"worker {fields['worker']} on {fields['host']} died ({fields['reason']}); another one takes"
                " its place, and repeats its part of this epoch."
            )
        if fields["name"] == "halting":
            say("interrupted: the workers end after this step. Interrupt again to end them at once.")
        if fields["name"] == "left":
            say(
                f"worker {fields['worker']} on {fields['host']} died ({fields['reason']}); the others go on"
                " without it and without its rows."
            )

    return hear


def _pass_on_warnings(fields: Mapping[str, Any]) -> None:
    """Says what a worker warns of: that a loss is not finite, where the run goes on, among others."""
    if fields["name"] == "bad_loss":
        warnings.warn(fields["message"], RuntimeWarning, stacklevel=2)
    if fields["name"] == "warning":
        warnings.warn(fields["message"], UserWarning, stacklevel=2)


def _gpus_here(plan: RunPlan) -> list[str]:
    """The GPUs of this machine that workers would compute on: all of them, or the one that was asked for."""
    model = plan.model
    kind, _, number = plan.device.partition(":")
    if kind not in ("auto", "cuda") or not model.facts.gpus:
        return []
    found = machine_gpus()
    return found[int(number) :][:1] if number.isdecimal() else found


def _refuse_several(model: FrameworkModel) -> None:
    complaints = model.complaints("several")
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
    plan: RunPlan,
    buffers: tuple[bytes, ...],
    spark: SparkSession | None,
    feeds: Sequence[Feed],
    listener: Callable[[Event], None],
    workers: int,
    dealing: Dealing,
) -> list[Outcome]:
    target, options = plan.model.entry, plan.options
    sync = options.sync if isinstance(options, FitOptions) else SyncConfig()
    row, servers = sync_spec(sync), servers_of(sync)
    make = partial(
        job_of,
        plan.model,
        plan.settings,
        target=target,
        buffers=buffers,
        workers=workers,
        servers=servers,
        together=row.together,
        replaceable=row.replaceable,
    )
    if spark is None:
        return local.run(make(), listener=listener)
    from kindler.spark import engine
    from kindler.spark.executors import cores_per_host

    job = make(cores=cores_per_host(spark))
    shared = None if plan.model_dir is None else folder_at(plan.model_dir)
    return engine.run(job, spark=spark, feeds=feeds, dealing=dealing, listener=listener, folder=shared)


def _listener(progress: ProgressBar, *also: Callable[[Mapping[str, Any]], None]) -> Callable[[Event], None]:
    def hear(event: Event) -> None:
        if event.kind == "log":
            progress.log(event.rank, event.fields["line"])
        else:
            progress.report(event.fields)
            for listener in also:
                listener(event.fields)

    return hear
