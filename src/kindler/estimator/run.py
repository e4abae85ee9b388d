"""One run as the driver sees it: sources are made, workers started and listened to, results taken.

A lost worker may be its machine's fault: `attempts` starts others from the newest checkpoint. An error in
the user's code or data would recur.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kindler import limits
from kindler.config import RunSettings
from kindler.data.row_order import RowAssignment
from kindler.engine import local
from kindler.engine.gang import Halted, NotBegun
from kindler.engine.hub import Event
from kindler.engine.job import Job, RankSpec, equal_ranks, new_run_id
from kindler.engine.outcome import Outcome
from kindler.engine.placement import crowd_message, machine_gpus
from kindler.errors import (
    ConfigError,
    KindlerError,
    StartTimeoutError,
    SyncError,
    SyncTimeoutError,
    WorkerLostError,
)
from kindler.estimator.inputs.contract import Input, Prepared, SourceRequest
from kindler.estimator.inputs.recognise import choose_engine, session_for
from kindler.estimator.lineage import described
from kindler.estimator.model import FrameworkModel
from kindler.files import folder_at
from kindler.frameworks.pickling import pickle_for_workers
from kindler.strategies import AllReduce
from kindler.sync.registry import SYNCS, servers_of, sync_spec
from kindler.temporary import Folder
from kindler.train.checkpoints import CheckpointFolder, StoredCheckpoint, check, parse
from kindler.train.goodput import RunClock
from kindler.train.options import EvaluateOptions, FitOptions, RunConfig, StateLimit, Task
from kindler.train.progress import ProgressBar
from kindler.train.run import ENTRY, SERVER_ENTRY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kindler.spark.frames import Feed

Listener = Callable[[Mapping[str, Any]], None]

_log = logging.getLogger(__name__)


class RunObserver:
    """Follows the runs of an estimator whose class returns it from `_observers`; entered around each run."""

    def __enter__(self) -> None:
        """Called before a run."""

    def __exit__(self, *error: object) -> None:
        """Called after it, however it ended."""

    def hear(self, fields: Mapping[str, Any]) -> None:
        """Called with everything that workers report, including the losses of all steps."""

    def finish(self, rows: list[dict[str, Any]]) -> None:
        """Called with the history of a run that ended well."""


@dataclass(frozen=True, slots=True)
class RunResults:
    """What rank 0 returned."""

    rows: list[dict[str, Any]]
    layout: dict[str, Any]  # dtype and row shape of each column
    statistics: dict[str, Any] | None  # of the training data, if they were made
    state: bytes  # what training continues from; empty after an evaluation
    mode: str | None = None  # how the framework ran the steps, if it had a choice
    step: int = 0
    halted: bool = False  # whether the user interrupted the run, which ended after `step`
    spent: Mapping[str, float] = field(default_factory=dict)  # seconds of the first worker
    made: Mapping[str, Any] = field(default_factory=dict)  # what a record of the fit keeps of it
    packed: bytes = b""  # the model that was sent to the workers
    before: bytes = b""  # the state that training began with


def run(
    model: FrameworkModel,
    options: FitOptions | EvaluateOptions,
    config: RunConfig,
    data: Input,
    validation: Input | None,
    *,
    state: bytes,
    log_steps: bool,
    watched: bool,
    listeners: Sequence[Listener],
    clock: RunClock,
) -> RunResults:
    inputs = {"data": data} if validation is None else {"data": data, "validation": validation}
    spark = None
    if choose_engine(config.engine, *inputs.values()) == "spark":
        spark = session_for(*inputs.values())
    with Folder("kindler-driver-") as folder:
        with clock.ingest():
            sources = {
                name: _prepared(model, options, item, name, spark, folder) for name, item in inputs.items()
            }
            trains = isinstance(options, FitOptions)
            read = {name: described(item, sources[name][0]) for name, item in inputs.items() if trains}
        task = Task(
            framework=model.framework,
            options=options,
            config=config,
            data=sources["data"][0],
            validation=sources["validation"][0] if validation is not None else None,
            process_group=model.facts.process_group,
            run_id=new_run_id(),
            log_steps=log_steps,
            watched=watched,
            limit=_limit(options, config, spark),
        )
        if task.limit is not None:  # otherwise a worker says it before the first step
            task.limit.check(len(state) or model.expected_bytes(config.seed))
        spec, feeds = model.packed, [feed for _, feed in sources.values() if feed is not None]
        with ProgressBar(verbose=options.verbose, what="epoch" if task.trains else "evaluate") as progress:

            def say(line: str) -> None:
                _log.log(logging.INFO if options.verbose else logging.WARNING, line)
                progress.note(line)

            gpus = [] if spark is not None else _gpus_here(model, config.device)
            replaced = ReplacedWorkers(config.settings)
            count = WorkerCount(config.workers or len(gpus) or None, config.settings, spark, say)
            notices: list[Mapping[str, Any]] = []  # of all attempts

            def hear(event: Event) -> None:
                if event.kind == "log":
                    progress.log(event.rank, event.fields["line"])
                    return
                fields = clock.hear(event.fields)
                if fields["name"] == "notice":
                    notices.append(fields)
                    _leave_machine(fields, spark)
                for listener in (progress.report, *listeners, count.hear, replaced.hear):
                    listener(fields)
                _announce(event.fields, say)

            def launch(checkpoints: Sequence[StoredCheckpoint]) -> list[Outcome]:
                clock.launch()
                count.resolve()
                if spark is not None:
                    from kindler.spark.executors import check_executors

                    check_executors(spark, model.row.package)
                if gpus and count.size > len(gpus) and not config.share_gpus:
                    raise ConfigError(crowd_message(count.size, len(machine_gpus()), config.device))
                if count.size > 1 and task.trains and (complaints := model.complaints("several")):
                    raise ConfigError("\n".join(complaints))
                dealing = _dealing(count.size, config.seed, checkpoints)
                packed = _packed(replace(task, dealing=dealing))
                buffers = (packed, spec, state, *(stored.data for stored in checkpoints))
                earlier = len(notices)
                known = tuple(notice["key"] for notice in notices)
                regroups = replaced.left if task.trains and count.size > 1 else 0
                try:
                    outcomes = _launch(
                        model, task, buffers, count.size, dealing, spark, feeds, known, hear, regroups
                    )
                except NotBegun:
                    raise RunMoves(notices[earlier:], step=None) from None
                report, data = _first_result(outcomes)
                if report["moved"]:
                    raise RunMoves(notices[earlier:], step=report["step"], checkpoint=data)
                return outcomes

            halted = False
            try:
                outcomes = attempts(task, launch, say, replaced)
            except Halted as interrupted:
                outcomes, halted = interrupted.outcomes, True
            report, trained = _first_result(outcomes)
            if report.pop("moved"):  # and was interrupted on its way
                saved = trained or next((stored.data for stored in _own(task)), b"")
                if not saved:
                    raise KeyboardInterrupt
                trained = parse(saved).state
            if not task.trains:
                progress.result(report["rows"][0])
    made = {
        **read,
        "engine": "local" if spark is None else "spark",
        "workers": count.size,
        **report.pop("made"),
    }
    return RunResults(state=trained, halted=halted, made=made, packed=spec, before=state, **report)


def _leave_machine(notice: Mapping[str, Any], spark: SparkSession | None) -> None:
    """Tell Spark of a machine's notice, unless it is Spark that told of it."""
    if spark is not None and notice["key"] and notice["address"] is not None:
        from kindler.spark.executors import leave

        leave(spark, notice["address"])


def _first_result(outcomes: Sequence[Outcome]) -> tuple[dict[str, Any], bytes]:
    report, data = next(outcome.buffers for outcome in outcomes if outcome.buffers and outcome.buffers[0])
    return json.loads(report), data


def _limit(
    options: FitOptions | EvaluateOptions, config: RunConfig, spark: SparkSession | None
) -> StateLimit | None:
    if spark is None or not isinstance(options, FitOptions) or options.checkpoint is not None:
        return None
    from kindler.spark.engine import MOST_BYTES, NO_WAY_BACK
    from kindler.spark.executors import meets_at_driver

    return None if meets_at_driver(spark, config.settings) else StateLimit(MOST_BYTES, NO_WAY_BACK)


def _prepared(
    model: FrameworkModel,
    options: FitOptions | EvaluateOptions,
    item: Input,
    name: str,
    spark: SparkSession | None,
    folder: Path,
) -> Prepared:
    request = SourceRequest(
        name=name,
        columns=options.columns if name == "data" else replace(options.columns, length_col=None),
        ingest=options.ingest,
        spark=spark,
        scratch=folder,
        config=getattr(model.spec, "config", {}),
        row_weights=model.row.weighted_batches,
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
    servers: int = 0,
    together: bool = True,
    replaceable: bool = False,
    movable: bool = False,
    noticed: tuple[str, ...] = (),
    regroups: int = 0,
) -> Job:
    server = RankSpec(target=SERVER_ENTRY, role="ps", ports=1, service=True, beside=True)
    return Job(
        ranks=(*equal_ranks(target, workers), *((server,) * servers)),
        buffers=buffers,
        preload=model.preload,
        environment=model.facts.environment,
        settings=settings,
        threads=settings.threads,
        together=together,
        replaceable=replaceable,
        movable=movable,
        noticed=noticed,
        regroups=regroups,
    )


def _announce(fields: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Pass on workers' warnings, and say which of them died or was interrupted."""
    kind = fields["name"]
    if kind == "bad_loss":
        warnings.warn(fields["message"], RuntimeWarning, stacklevel=2)
    elif kind == "warning":
        warnings.warn(fields["message"], UserWarning, stacklevel=2)
    elif kind == "halting":
        say("interrupted: the workers stop after this step. Interrupt again to stop them at once.")
    elif kind == "regrouped":
        say(
            f"worker {fields['worker']} on {fields['host']} died ({fields['reason']}); another one took its "
            f"place after {fields['seconds']:.1f} s, and no step was repeated."
        )
    elif kind in ("replaced", "left"):
        then = {
            "replaced": "another one takes its place, and repeats its part of this epoch.",
            "left": "the others continue without it and its rows.",
        }
        say(f"worker {fields['worker']} on {fields['host']} died ({fields['reason']}); {then[kind]}")


def _gpus_here(model: FrameworkModel, device: str) -> list[str]:
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cuda") or not model.facts.gpus:
        return []
    gpus = machine_gpus()
    return gpus[int(number) :][:1] if number.isdecimal() else gpus


def _dealing(workers: int, seed: int, checkpoints: Sequence[StoredCheckpoint]) -> RowAssignment:
    """How rows are dealt: as in the run that is resumed, if every worker can have a lane of it."""
    for header in (stored.header for stored in checkpoints):
        if header.lanes and header.seed == seed and workers <= len(header.counts):
            lanes = len(header.counts)
            return RowAssignment(seed=seed, lanes=header.lanes, workers=header.workers, joined=lanes)
    return RowAssignment.between(workers, seed=seed)


def _launch(
    model: FrameworkModel,
    task: Task,
    buffers: tuple[bytes, ...],
    workers: int,
    dealing: RowAssignment,
    spark: SparkSession | None,
    feeds: Sequence[Feed],
    noticed: tuple[str, ...],
    hear: Callable[[Event], None],
    regroups: int,
) -> list[Outcome]:
    strategy = task.training.strategy if task.trains else AllReduce()
    row, settings = sync_spec(strategy), task.config.settings
    job = job_of(
        model,
        settings,
        target=ENTRY,
        buffers=buffers,
        workers=workers,
        servers=servers_of(strategy),
        together=row.together,
        replaceable=row.replaceable,
        movable=task.trains and SYNCS.load(strategy.name).in_step,
        noticed=noticed,
        regroups=regroups if row.together else 0,
    )
    if spark is None:
        return local.run(job, listener=hear)
    from kindler.spark import engine
    from kindler.spark.executors import cores_per_host

    return engine.run(
        replace(job, cores=cores_per_host(spark)),
        spark=spark,
        feeds=feeds,
        dealing=dealing,
        listener=hear,
        folder=None if task.folder is None else folder_at(task.folder),
    )


def attempts(
    task: Task,
    launch: Callable[[Sequence[StoredCheckpoint]], list[Outcome]],
    say: Callable[[str], None],
    replaced: ReplacedWorkers,
) -> list[Outcome]:
    """Launch workers, and others from the newest checkpoint after the loss of some.

    `launch` continues from the first of the given checkpoints that it can use.
    """
    settings = task.config.settings
    folder = None if task.folder is None else CheckpointFolder(task.folder)
    checkpoints = earlier = _of_earlier_run(task, folder)
    while True:
        try:
            return launch(checkpoints)
        except RunMoves as moves:
            wait_s = 0.0
            if moves.checkpoint:
                checkpoints = [StoredCheckpoint(check(moves.checkpoint)[0], "memory", moves.checkpoint)]
            elif folder is not None:
                checkpoints = [*_own(task), *earlier]
            say(str(moves))
        except ExecutorsAreBack as back:
            wait_s = 0.0
            checkpoints = [*_own(task), *earlier]
            say(f"{back} It resumes from {checkpoints[0].path}.")
        except KindlerError as error:
            failures = replaced.failures
            retry_s = retry_wait_s(error, failures, settings, has_checkpoints=folder is not None)
            if retry_s is None:
                stored = _own(task) if _is_lost_server(error) else []
                newest = stored[0].path if stored else None
                explain(
                    error, failures, trains=task.trains, has_checkpoints=folder is not None, newest=newest
                )
                raise
            wait_s = retry_s
            failures = replaced.failures = failures + 1
            checkpoints = [*_own(task), *earlier]
            what = str(error).partition("\n")[0]
            start = checkpoints[0].path if checkpoints else "the beginning, as there is no checkpoint yet"
            most = settings.max_failures
            say(f"{what} The run restarts from {start} (failure {failures} of at most {most}).")
        time.sleep(wait_s)


def _own(task: Task) -> list[StoredCheckpoint]:
    if task.folder is None:
        return []
    return CheckpointFolder(task.folder).resume_candidates(lambda header: header.run == task.run_id)


def _of_earlier_run(task: Task, folder: CheckpointFolder | None) -> list[StoredCheckpoint]:
    if folder is None or not task.training.resume:
        return []
    checkpoints = folder.resume_candidates()
    for checkpoint in checkpoints:
        if checkpoint.header.framework != task.framework:
            raise ConfigError(
                f"{checkpoint.path} is a checkpoint from {checkpoint.header.framework!r}, but this model "
                f"is from {task.framework!r}.\nHint: give each model its own folder for checkpoints."
            )
    return checkpoints


def retry_wait_s(
    error: KindlerError, failures: int, settings: RunSettings, *, has_checkpoints: bool
) -> float | None:
    """Seconds to wait before the workers are started again; None to give up.

    >>> lost = WorkerLostError("killed", rank=1, host="a")
    >>> retry_wait_s(lost, 1, RunSettings(retry_backoff_s=2.0), has_checkpoints=True)
    4.0
    """
    if not has_checkpoints or failures >= settings.max_failures or not _may_pass(error, failures):
        return None
    return min(settings.retry_backoff_s * 2.0**failures, limits.LONGEST_RETRY_S)


def _may_pass(error: KindlerError, failures: int) -> bool:
    if _is_lost_server(error):
        return False  # its updates since the checkpoint are gone: whoever started the run decides
    if isinstance(error, SyncTimeoutError):
        return False  # nobody is gone: the workers wait for each other
    if isinstance(error, StartTimeoutError):
        return failures > 0  # they had come up before, so their machines may come back
    return isinstance(error, WorkerLostError | SyncError)


def explain(
    error: KindlerError, failures: int, *, trains: bool, has_checkpoints: bool, newest: str | None = None
) -> None:
    """Add the number of attempts, or a hint about checkpoints, to the error."""
    more, lost_server = [], _is_lost_server(error)
    if lost_server:
        more.append("It was the parameter server, which held the weights and the optimizer")
        if newest is not None:
            more[0] += f". The newest checkpoint is {newest}.\nHint: fit(resume=True) continues from it."
        elif has_checkpoints:
            more[0] += "; there is no checkpoint yet."
        else:
            more[0] += (
                ".\nHint: fit(checkpoint=...) writes checkpoints; fit(resume=True) continues from them."
            )
    if failures:
        more.append(f"The run failed {failures + 1} times; this is the last failure.")
    elif isinstance(error, WorkerLostError) and trains and not has_checkpoints and not lost_server:
        more.append(
            "Hint: fit(checkpoint=...) writes checkpoints and resumes automatically when a worker is lost."
        )
    error.args = ("\n".join([str(error), *more]), *error.args[1:])


def _is_lost_server(error: KindlerError) -> bool:
    return isinstance(error, WorkerLostError) and error.role == "ps"


class ReplacedWorkers:
    """Failures so far that did not end a run: workers replaced while the others went on, and restarts."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self.failures = 0

    @property
    def left(self) -> int:
        return max(0, self._settings.max_failures - self.failures)

    def hear(self, fields: Mapping[str, Any]) -> None:
        self.failures += fields["name"] == "regrouped"


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
            self.full = self.size = self._workers or 1  # one uses all cores, and exchanges nothing
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
                f"the lost executors are back: the run continues with {self.full} instead of {self.size}"
                " workers."
            )


class ExecutorsAreBack(Exception):
    """Ends an attempt with fewer workers than at first, so that the next one has all of them."""


class RunMoves(Exception):
    """Ends an attempt whose workers were given notice, so that others go on; nothing was lost.

    `step` is the last one, None if workers had not come so far; `checkpoint` is what to continue from, empty
    if it is in the folder, or nothing has changed since the attempt began.
    """

    def __init__(
        self, notices: Sequence[Mapping[str, Any]], *, step: int | None, checkpoint: bytes = b""
    ) -> None:
        self.checkpoint = checkpoint
        told = "a worker was given notice"  # out of the driver's reach
        for notice in notices[:1]:
            worker = "" if notice["worker"] is None else f"worker {notice['worker']} on "
            told = f"{worker}{notice['host']} was given notice ({notice['reason']})"
        then = (
            f"the run was saved after step {step:,} and continues with new workers."
            if step
            else "the run starts again with new workers, as it had made no step."
        )
        super().__init__(f"{told}: {then}")
