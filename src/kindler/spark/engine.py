"""The Spark engine: one task per worker, each supervising a child process.

`DataFrame.mapInArrow` runs on classic sessions and on Spark Connect. It is a barrier stage, unless the ranks
need not all run together, or Spark allocates executors dynamically, or each rank is a job of its own, whose
task Spark runs again if an executor is lost. Tasks end normally even if the run fails: the failure travels
as an Outcome, and Spark has no stack to print. A worker that dies is replaced within its task where the
others wait for it (`Job.regroups`). Only a plain task whose worker can be replaced fails when that dies, so
that Spark runs it again.

Large buffers and results bypass the JVM, over the workers' connections to the driver. Where workers cannot
reach it, they travel with the task and its rows, or through a shared folder (`BufferFiles`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import BarrierTaskContext, TaskContext
from pyspark.sql import DataFrame, SparkSession

from kindler import limits
from kindler.data.columns import ColumnPlan
from kindler.data.row_order import RowAssignment
from kindler.data.spool import SpoolWriter
from kindler.engine import detached
from kindler.engine.gang import Gang, Listener, follow, watch
from kindler.engine.hub import Hub
from kindler.engine.job import Job
from kindler.engine.notices import on_sigterm
from kindler.engine.outcome import Outcome, pack, unpack
from kindler.engine.placement import TASK_GPUS
from kindler.engine.supervisor import AbortedError, BesideRanks, Supervisor
from kindler.engine.wire import Address
from kindler.engine.worker import describe
from kindler.errors import ConfigError, DataError, KindlerError, TrainingError, WorkerLostError, first_line
from kindler.files import Folder as SharedFolder
from kindler.frame import Frame, encode_again, from_bytes
from kindler.spark.executors import (
    DecommissionWatch,
    driver_hosts,
    has_executors,
    is_dynamic,
    meets_at_driver,
    never_retries,
    spreads_evenly,
)
from kindler.spark.frames import (
    FEED,
    LANE,
    ROW,
    Feed,
    Where,
    dealt_rows,
    feed_frame,
    frame_error,
    lost_prepared_rows,
    own_columns,
    was_cancelled,
)
from kindler.spark.ingest import ComputedRows, ReceivedRows, Staging, can_stage, staged_batches
from kindler.spark.session import setting
from kindler.spark.tasks import task_gpus
from kindler.spark.versions import add_tag, interrupt_tag, is_connect, one_partition, to_arrow
from kindler.temporary import Folder

_RESULT = "rank int, part int, payload binary"
_RESULT_SCHEMA = pa.schema({"rank": pa.int32(), "part": pa.int32(), "payload": pa.binary()})
_IN_TASK_BYTES = 1 << 20  # buffers up to this size travel with the task: no connection is quicker
MOST_BYTES = 64 << 20  # Connect refuses messages of 128 MiB; a JVM of 1 GiB takes several times this
_HINT = (
    "Hint: pass fit(checkpoint=...), a folder that the driver and the workers share, or, where the workers"
    ' can reach the driver, RunSettings(rendezvous="driver").'
)
NO_WAY_BACK = f"can come back in Spark's result rows from workers that cannot reach the driver.\n{_HINT}"
_BATCH_BYTES = 4 << 20  # small enough to stay in cache on its way, large enough to amortise the call
_running: set[_SparkLaunch] = set()  # the gangs of this process
# Of gangs whose ranks come one by one: two that had half the slots each would wait for ever.
_arriving = threading.Lock()


def start(job: Job, *, spark: SparkSession, detached: bool = False) -> Gang:
    """Tasks of `detached` ranks end once those run; the ranks live on beside Spark's tasks, and leave the
    slots to other jobs, such as those that feed them."""
    if not detached:
        launch = _launch(job, spark, _ranks(spark, job.crew), (), None)
    elif meets_at_driver(spark, job.settings):
        launch = _SparkLaunch(job, spark, _ranks(spark, job.size), (), detached=True)
    else:
        raise ConfigError(
            "processes that outlive Spark's tasks must reach the driver, and those of a remote Spark Connect"
            " server do not.\n"
            'Hint: RunSettings(rendezvous="driver") where they can; otherwise run the driver on the cluster.'
        )
    gang = Gang(job, launch)
    gang.start()
    return gang


def run(
    job: Job,
    *,
    spark: SparkSession,
    feeds: Sequence[Feed],
    dealing: RowAssignment,
    listener: Listener,
    folder: SharedFolder | None = None,
) -> list[Outcome]:
    """Outcomes are in the order of ranks; `listener` is called on this thread. `folder` carries large
    buffers where workers cannot reach the driver."""
    if not feeds:
        frame = _ranks(spark, job.crew)
    else:
        frame = dealt_rows(feeds, dealing) if can_stage(spark) else feed_frame(feeds, job.crew, dealing)
    with _interrupts_raise():
        return follow(Gang(job, _launch(job, spark, frame, feeds, folder)), listener)


def _ranks(spark: SparkSession, count: int) -> DataFrame:
    """A row per rank, only to make Spark start its task."""
    return spark.range(0, count, 1, count)


@contextmanager
def _interrupts_raise() -> Iterator[None]:
    """Let Ctrl-C only raise KeyboardInterrupt: PySpark's own handler cancels all jobs of the session."""
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not str(getattr(handler, "__module__", "")).startswith("pyspark"):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _launch(
    job: Job, spark: SparkSession, frame: DataFrame, feeds: Sequence[Feed], folder: SharedFolder | None
) -> _SparkLaunch:
    if meets_at_driver(spark, job.settings):
        if job.regroups and not can_stage(spark) and spreads_evenly(spark, job.crew):
            job = replace(job, together=False)
        elif is_dynamic(spark):
            # Spark refuses barrier stages then (SPARK-24942). As plain tasks the ranks wait at the driver for
            # the last of them, while Spark starts executors for those that wait; running tasks keep theirs.
            job = replace(job, together=False, regroups=0)
        return _SparkLaunch(job, spark, frame, feeds)
    if is_dynamic(spark):
        raise ConfigError(
            "this Spark application has spark.dynamicAllocation.enabled=true, and workers that cannot reach"
            " the driver must all be started by one barrier stage, which Spark then rejects (SPARK-24942).\n"
            'Hint: RunSettings(rendezvous="driver") where they can reach it; otherwise start the application'
            " with spark.dynamicAllocation.enabled=false and a fixed spark.executor.instances."
        )
    # Those who meet at the first of them need it, and each other's addresses, from the beginning to the end.
    job = replace(job, together=True, replaceable=False, regroups=0)
    return _SparkLaunch(job, spark, frame, feeds, files=BufferFiles(folder, job.run_id))


class _SparkLaunch:
    """Runs the Spark job on a thread, so that the driver can listen and interrupt.

    Ranks meet at the driver's hub; with `files` at rank 0, and large buffers travel through those. The job of
    `detached` ranks only starts their supervisors, which then run in processes of their own.
    """

    after_first = True

    def __init__(
        self,
        job: Job,
        spark: SparkSession,
        frame: DataFrame,
        feeds: Sequence[Feed],
        *,
        detached: bool = False,
        files: BufferFiles | None = None,
    ) -> None:
        self._job = job
        self._spark = spark
        self._frame = frame
        self._feeds = feeds
        self._detached = detached
        self._files = files
        self._tag = f"kindler-{job.run_id}"
        # Whether each rank is a Spark job of its own: another task can take its place while the others run.
        self._apart = job.regroups > 0 and not job.together
        self._hub: Hub | None = None
        self._beside: BesideRanks | None = None
        self._staging: Staging | None = None
        self._ending = threading.Event()
        self._ends: list[Outcome] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread

    def open(self, stack: ExitStack) -> Hub | None:
        job = self._job
        task = _SupervisorTask(
            job=job, feeds=tuple((feed.name, feed.columns) for feed in self._feeds), detached=self._detached
        )
        if self._files is not None:
            files = stack.enter_context(self._files)
            self._start(replace(task, job=files.outgoing(job), files=files), stack)
            return None
        large = sum(map(len, job.buffers)) > _IN_TASK_BYTES
        bind, advertised = driver_hosts(self._spark)
        hub = stack.enter_context(
            Hub(job, host=bind, advertised=advertised, cargo=job.buffers if large else ())
        )
        self._hub = hub
        again = job.settings.max_failures if job.replaceable and never_retries(self._spark) else 0
        task = replace(task, hub=hub.address, cargo=large, again=again or job.regroups)
        self._start(replace(task, job=replace(job, buffers=())) if large else task, stack)
        # They come to an end when the hub says so: before the stack closes it.
        self._beside = stack.enter_context(BesideRanks(job, hub.address, far=True))
        if job.movable and has_executors(self._spark):
            stack.enter_context(DecommissionWatch(self._spark, hub.notice, job.noticed))
        if self._feeds and not is_connect(self._spark):
            stack.enter_context(
                ComputedRows(
                    self._spark.sparkContext,
                    self._tag,
                    over=lambda: hub.joined > 0 or not self._thread.is_alive(),
                    report=hub.announce,
                    written=self._staging.written if self._staging is not None else None,
                )
            )
        return hub

    def _start(self, task: _SupervisorTask, stack: ExitStack) -> None:
        stack.enter_context(small_batches(self._spark))
        if self._feeds and can_stage(self._spark):
            self._staging = stack.enter_context(Staging(self._spark, self._job.run_id, self._job.crew))
        self._thread = threading.Thread(target=self._run, args=(task,), name="kindler-spark-job", daemon=True)
        self._thread.start()
        _running.add(self)

    def _run(self, task: _SupervisorTask) -> None:
        frame = self._frame
        try:
            self._name_jobs()
            if self._staging is not None:  # a first job writes the rows
                task = replace(task, staged=self._staging.write(frame))
                frame = _ranks(self._spark, self._job.crew)
                if not task.staged or self._ending.is_set():
                    return
            if self._apart:
                self._run_apart(frame.mapInArrow(task, _RESULT))
                return
            table = to_arrow(frame.mapInArrow(task, _RESULT, barrier=self._job.together))
            self._ends = _outcomes(zip(*(table.column(i).to_pylist() for i in range(3)), strict=True))
        except BaseException as exc:  # noqa: BLE001 - raised again on the thread that waits
            self._error = exc

    def _name_jobs(self) -> None:
        """Those that this thread starts."""
        add_tag(self._spark, self._tag)
        if not is_connect(self._spark):
            self._spark.sparkContext.setJobGroup(self._tag, "rows for the workers of Kindler, and the run")

    def _run_apart(self, frame: DataFrame) -> None:
        rows = frame.rdd  # for all ranks: what Spark prepares for them is prepared once
        threads = [
            threading.Thread(
                target=self._run_rank, args=(rows, rank), name=f"kindler-rank-{rank}", daemon=True
            )
            for rank in range(self._job.crew)
        ]
        with _arriving:
            if self._ending.is_set():
                return
            for thread in threads:
                thread.start()
            while not self.is_complete and not self._ending.wait(limits.TICK_S) and self._error is None:
                pass
        for thread in threads:
            thread.join()

    def _run_rank(self, rows: Any, rank: int) -> None:
        """Spark runs a task again a few times; then, or if it cannot, this starts its job again."""
        error: BaseException
        for _ in range(1 + self._job.regroups):
            try:
                self._name_jobs()
                self._ends += _outcomes(one_partition(rows, rank))
                return
            except BaseException as exc:  # noqa: BLE001 - raised again on the thread that waits
                error = exc
            if self._ending.is_set() or not self.is_complete or was_cancelled(error):
                break
        self._error = self._error or error
        assert self._hub is not None
        self._hub.abort()

    def is_queued(self) -> bool:
        # Those that are not complete themselves do not count: two of them might wait for each other.
        return any(other is not self and other.is_complete for other in tuple(_running))

    @property
    def is_complete(self) -> bool:
        return self._hub is None or not self._hub.missing()

    def is_alive(self) -> bool:
        if self._thread.is_alive() or not self._detached:
            return self._thread.is_alive()
        assert self._hub is not None
        started = self._error is None and all(o.kind == "detached" for o in self._ends)
        return started and not self._hub.finished

    def end(self) -> None:
        timeout_s = self._job.settings.stop_timeout_s
        self._ending.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            interrupt_tag(self._spark, self._tag)
            if self._apart:
                self._spark.sparkContext.cancelJobGroup(self._tag)
            self._thread.join(timeout_s)
        _running.discard(self)
        if self._files is not None:
            self._ends = [self._files.incoming(outcome) for outcome in self._ends]
        if self._detached:
            assert self._hub is not None
            self._hub.await_departures(2 * timeout_s)

    def outcomes(self, hub: Hub | None) -> list[Outcome]:
        if hub is None or self._beside is None:
            return self._ends
        results = [Outcome(rank, "result", {}, buffers) for rank, buffers in hub.results.items()]
        ends = [*self._ends, *self._beside.outcomes]
        return [o for o in ends if o.kind not in ("result", "detached")] + results

    def incomplete(self, outcomes: Sequence[Outcome], *, started: bool) -> BaseException:
        if (error := self._error) is not None:
            if started or lost_prepared_rows(error):
                reason = f"Spark abandoned its task ({first_line(error)})"
                return WorkerLostError(reason, rank=None, host="the cluster")
            return frame_error(error, [(feed.frame, feed.columns.names) for feed in self._feeds])
        if not outcomes:  # Spark starts no task for a frame it knows to be empty
            return DataError("the data has no rows.")
        return TrainingError(f"the run ended with {len(outcomes)} results of {self._job.size} workers.")

    def clean_up(self) -> None:
        _running.discard(self)


@dataclass(frozen=True)
class BufferFiles:
    """Large buffers between the driver and workers that cannot reach it, through a shared folder.

    Without one they travel with the task and its result rows, which Spark carries up to a limit.
    """

    folder: SharedFolder | None
    run_id: str

    def __enter__(self) -> BufferFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.folder is not None:
            for kind in ("job", "result"):
                self.folder.remove(self._name(kind))

    def outgoing(self, job: Job) -> Job:
        """On the driver: the job as it travels with the task."""
        size = sum(map(len, job.buffers))
        if size <= _IN_TASK_BYTES:
            return job
        if self.folder is not None:
            self._write("job", job.buffers)
            return replace(job, buffers=())
        if size > MOST_BYTES:
            raise ConfigError(
                f"the model and its state have {size:,} bytes, and {MOST_BYTES:,} can travel with a Spark"
                f" task to workers that cannot reach the driver.\n{_HINT}"
            )
        return job

    def received(self, job: Job) -> Job:
        """On a worker: the job with its buffers."""
        return job if job.buffers or self.folder is None else replace(job, buffers=self._read("job"))

    def sent(self, outcome: Outcome) -> Outcome:
        """On a worker: the outcome as it travels in result rows."""
        size = sum(map(len, outcome.buffers))
        if size <= _IN_TASK_BYTES:
            return outcome
        if self.folder is not None and outcome.rank == 0:
            self._write("result", outcome.buffers)
            return replace(outcome, buffers=(), fields={**outcome.fields, "in_folder": True})
        if size > MOST_BYTES:
            error = TrainingError(
                f"the trained state is lost: it has {size:,} bytes, and {MOST_BYTES:,} {NO_WAY_BACK}"
            )
            return _failed(outcome.rank, error)
        return outcome

    def incoming(self, outcome: Outcome) -> Outcome:
        """On the driver: the outcome with its buffers."""
        return replace(outcome, buffers=self._read("result")) if "in_folder" in outcome.fields else outcome

    def _name(self, kind: str) -> str:
        return f"kindler-{self.run_id}.{kind}"

    def _write(self, kind: str, buffers: tuple[bytes, ...]) -> None:
        assert self.folder is not None
        self.folder.write(self._name(kind), encode_again(Frame(kind, {}, buffers)))

    def _read(self, kind: str) -> tuple[bytes, ...]:
        assert self.folder is not None
        return from_bytes(self.folder.read(self._name(kind))).buffers


def _failed(rank: int, exc: Exception) -> Outcome:
    return Outcome(rank, "error", {**describe(exc), "host": socket.gethostname()})


def _outcomes(rows: Iterable[tuple[int, int, bytes]]) -> list[Outcome]:
    pieces: dict[int, list[tuple[int, bytes]]] = {}
    for rank, part, payload in rows:
        pieces.setdefault(rank, []).append((part, payload))
    return [unpack(rank, [p for _, p in sorted(pieces[rank])]) for rank in sorted(pieces)]


@dataclass(frozen=True, kw_only=True)
class _SupervisorTask:
    """`hub` None means that ranks meet at rank 0; with `cargo`, buffers are fetched from the hub. `again`
    is how often the task replaces a dead worker, where Spark does not rerun it."""

    job: Job
    feeds: tuple[tuple[str, ColumnPlan], ...]
    hub: Address | None = None
    cargo: bool = False
    files: BufferFiles | None = None
    detached: bool = False
    again: int = 0
    staged: tuple[str, ...] = ()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = BarrierTaskContext.get() if self.job.together else TaskContext.get()
        assert context is not None
        for outcome in self._supervise(context, batches):
            for part, payload in enumerate(pack(outcome)):
                row = {"rank": outcome.rank, "part": part, "payload": payload}
                yield pa.RecordBatch.from_pylist([row], _RESULT_SCHEMA)

    def _supervise(self, context: Any, batches: Iterator[pa.RecordBatch]) -> list[Outcome]:
        rank, owner = context.partitionId(), os.getppid()
        if self.detached:
            return [self._detach(rank, owner, batches)]
        beside: BesideRanks | None = None
        try:
            with (
                self._meeting(context, rank) as (hub, watcher),
                self._beside_first(rank, owner, hub) as beside,
            ):
                outcome = self._work(rank, owner, hub, batches, attempt=context.attemptNumber())
                if watcher is not None:
                    watcher.join()  # the ranks beside serve until the last of the others is done
            outcome = watcher.verdict(outcome) if watcher is not None else outcome
        except AbortedError:
            outcome = Outcome(rank, "aborted")
        except _WorkerIsLost:
            raise  # the run goes on: Spark starts the task again, here or elsewhere
        except Exception as exc:  # noqa: BLE001 - the edge of the task: it becomes an outcome
            outcome = _failed(rank, exc)
        own = outcome if self.files is None else self.files.sent(outcome)
        return [own, *(beside.outcomes if beside is not None else ())]

    def _beside_first(
        self, rank: int, owner: int, hub: Address
    ) -> AbstractContextManager[BesideRanks | None]:
        if self.files is None or rank != 0 or self.job.crew == self.job.size:
            return nullcontext()
        job = self.files.received(self.job)
        return BesideRanks(job, hub, base=_local_folder(rank), owner=owner)

    def _detach(self, rank: int, owner: int, batches: Iterator[pa.RecordBatch]) -> Outcome:
        assert self.hub is not None
        for _ in batches:
            pass
        try:
            detached.start(
                detached.Order(
                    job=_with_gpus(self.job, rank),
                    rank=rank,
                    hub=self.hub,
                    owner=owner,
                    base=_local_folder(rank),
                    cargo=self.cargo,
                )
            )
        except Exception as exc:  # noqa: BLE001 - the edge of the task: it becomes an outcome
            return _failed(rank, exc)
        return Outcome(rank, "detached")

    def _work(
        self, rank: int, owner: int, hub: Address, batches: Iterator[pa.RecordBatch], *, attempt: int
    ) -> Outcome:
        job = self.job if self.files is None else self.files.received(self.job)
        job = _with_gpus(job, rank)
        far, base = self.hub is not None, _local_folder(rank)
        folder = Folder(f"kindler-{job.run_id}-{rank}-", base)
        with folder:  # a worker that takes another's place finds its files
            first, last = attempt, attempt + self.again
            while True:
                with (
                    Supervisor(
                        job,
                        rank,
                        hub=hub,
                        owner=owner,
                        base=base,
                        far=far,
                        cargo=self.cargo,
                        attempt=attempt,
                        folder=folder,
                    ) as supervisor,
                    on_sigterm(supervisor.give_notice) if job.movable else nullcontext(),
                ):
                    supervisor.start()
                    try:
                        if attempt == first:
                            rows = self._rows(batches, rank)
                            _spool(supervisor, self.feeds, rows, rank=rank, size=self.job.crew)
                    except KindlerError as exc:
                        return supervisor.failed(exc)
                    outcome = supervisor.run()
                    if not supervisor.needs_another(outcome):
                        return outcome
                    if attempt == last:
                        raise _WorkerIsLost(
                            outcome.fields.get("reason", "the driver received nothing from it")
                        )
                    attempt += 1

    def _rows(self, batches: Iterator[pa.RecordBatch], rank: int) -> Iterator[pa.RecordBatch]:
        if not self.staged:
            return batches
        for _ in batches:
            pass
        return staged_batches(self.staged, rank)

    @contextmanager
    def _meeting(self, context: Any, rank: int) -> Iterator[tuple[Address, _RankZeroWatcher | None]]:
        if self.hub is not None:
            yield self.hub, None
            return
        address = context.getTaskInfos()[rank].address.rpartition(":")[0].strip("[]")
        with Hub(self.job, at_driver=False, host=address) if rank == 0 else nullcontext() as opened:
            addresses = context.allGather(json.dumps(opened.address if opened else None))
            host, port = json.loads(addresses[0])
            with _RankZeroWatcher(opened, self.job) if opened else nullcontext() as watcher:
                yield (host, port), watcher


class _WorkerIsLost(Exception):
    """The worker has died; raised so that Spark starts the task again."""


class _RankZeroWatcher(threading.Thread):
    """Watches the hub at rank 0 until all ranks are done, since the driver cannot."""

    def __init__(self, hub: Hub, job: Job) -> None:
        super().__init__(name="kindler-watch", daemon=True)
        self._hub = hub
        self._settings = job.settings
        self._over = threading.Event()
        self._failures: list[Outcome] = []

    def __enter__(self) -> _RankZeroWatcher:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            self._over.set()
        self.join()  # rank 0 is done; the others still need the meeting point to say so themselves

    def run(self) -> None:
        try:
            self._failures = watch(
                self._hub,
                running=lambda: not self._hub.finished,
                listener=lambda event: None,
                settings=self._settings,
                stopped=self._over.is_set,
            )
        except KindlerError:
            self._hub.abort()  # not all came; each supervisor says so itself

    def verdict(self, outcome: Outcome) -> Outcome:
        """Rank 0's outcome, or the gang's stall, which only rank 0 knows of."""
        return next((failure for failure in self._failures if failure.kind == "stalled"), outcome)


def _spool(
    supervisor: Supervisor,
    feeds: Sequence[tuple[str, ColumnPlan]],
    batches: Iterator[pa.RecordBatch],
    *,
    rank: int,
    size: int,
) -> None:
    with ExitStack() as stack:
        writers = [
            stack.enter_context(SpoolWriter(supervisor.scratch / name, columns.all))
            for name, columns in feeds
        ]
        received = ReceivedRows(supervisor.report)
        for batch in batches:
            supervisor.check()
            if not writers:
                continue  # the rows only make Spark start the task
            received.add(batch.num_rows, batch.nbytes)
            feed = batch.column(FEED).to_numpy()
            for number, writer in enumerate(writers):
                part = batch if (feed == number).all() else batch.filter(pa.array(feed == number))
                if part.num_rows:
                    ids, lanes = part.column(ROW).to_numpy(), part.column(LANE).to_numpy()
                    _check_lanes(lanes, rank, size)
                    writer.append(own_columns(part, feeds[number][1].names, number), where=Where(ids))
                    writer.append_order(ids, lanes)
        received.end()


def _check_lanes(lanes: Any, rank: int, size: int) -> None:
    """Checked, because only Spark's source says where rows are sent."""
    strays = lanes[lanes % size != rank]
    if len(strays):
        raise TrainingError(
            f"Spark brought a row of lane {strays[0]} to partition {rank} of {size}; it belongs elsewhere."
        )


def _with_gpus(job: Job, rank: int) -> Job:
    context = TaskContext.get()
    assert context is not None
    gpus = task_gpus(context)
    if not gpus:
        return job
    spec = job.ranks[rank]
    spec = replace(spec, environment={TASK_GPUS: ",".join(gpus), **spec.environment})
    return replace(job, ranks=(*job.ranks[:rank], spec, *job.ranks[rank + 1 :]))


def _local_folder(rank: int) -> Path | None:
    folders = [f for f in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if f and os.access(f, os.W_OK)]
    return Path(folders[rank % len(folders)]) if folders else None


def small_batches(spark: SparkSession) -> AbstractContextManager[None]:
    """Limits Arrow batches to a few megabytes, whatever the row width."""
    return setting(spark, "spark.sql.execution.arrow.maxBytesPerBatch", str(_BATCH_BYTES))
