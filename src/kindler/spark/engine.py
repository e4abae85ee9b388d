"""The Spark engine: one barrier task a worker, each the supervisor of a child process.

`DataFrame.mapInArrow(barrier=True)` is all that is asked of Spark, so classic sessions and Spark
Connect run the same code. Tasks end normally also when the run fails: the failure travels as an
Outcome, and Spark has no stack to print.

Large things do not pass through the JVM: the job's buffers and the results travel over the workers'
connections to the driver. Where workers cannot reach it, they travel with the task and its rows, or through a
folder that both sides see (`large_buffers.py`).
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
from pyspark import BarrierTaskContext
from pyspark.sql import DataFrame, SparkSession

from kindler.config import RunSettings
from kindler.data.columns import Columns
from kindler.data.row_order import Dealing
from kindler.data.spool import SpoolWriter
from kindler.engine import fork_server
from kindler.engine.address import address_towards
from kindler.engine.channel import Address
from kindler.engine.hub import Hub
from kindler.engine.monitor import Listener, verdict, watch
from kindler.engine.outcome import Outcome, pack, unpack
from kindler.engine.supervisor import Aborted, Job, Supervisor
from kindler.engine.worker import describe
from kindler.errors import DataError, KindlerError, TrainingError, WorkerLost
from kindler.spark.frame_errors import frame_error
from kindler.spark.frames import FEED, LANE, ROW, Feed, Where, feed_frame, own_columns
from kindler.spark.large_buffers import Folder, Parcels
from kindler.spark.session import LOOPBACK, is_connect, is_on_this_machine

__all__ = ["run"]

_RESULT = "rank int, part int, payload binary"
_BATCH_CONF = "spark.sql.execution.arrow.maxBytesPerBatch"
_IN_TASK_BYTES = 1 << 20  # buffers up to this size travel with the task: no connection is quicker
_BATCH_BYTES = 4 << 20  # small enough to stay in cache on its way, large enough to amortise the call


def run(
    job: Job,
    *,
    spark: SparkSession,
    feeds: Sequence[Feed],
    dealing: Dealing,
    listener: Listener,
    folder: Folder | None = None,
) -> list[Outcome]:
    """Run `job` on `job.size` barrier tasks; results in the order of ranks.

    Args:
        job: What to run.
        spark: The session.
        feeds: Frames whose rows each worker finds spooled in its scratch folder.
        dealing: Which of the rows are whose.
        listener: Called on this thread with what workers print and report.
        folder: A folder that the driver and the workers share, for large things where the workers cannot
            reach the driver.
    """
    frame = feed_frame(feeds, job.size, dealing) if feeds else spark.range(0, job.size, 1, job.size)
    if meets_at_driver(spark, job.settings):
        return _run_at_driver(job, spark, frame, feeds, listener)
    with Parcels(folder, job.run_id) as parcels:
        task = _Task(job=parcels.outgoing(job), feeds=_columns(feeds), hub=None, parcels=parcels)
        with _small_batches(spark):
            call = _Call(spark, frame, task, tag=f"kindler-{job.run_id}")
            call.start()
            try:
                call.join()
            finally:
                call.end(job.settings.stop_timeout_s)
        outcomes = [parcels.incoming(outcome) for outcome in call.outcomes]
    return _results(job, call, [], outcomes, feeds=feeds, started=False)


def _run_at_driver(
    job: Job, spark: SparkSession, frame: DataFrame, feeds: Sequence[Feed], listener: Listener
) -> list[Outcome]:
    large = sum(map(len, job.buffers)) > _IN_TASK_BYTES
    bind, advertised = _driver_hosts(spark)
    with Hub(
        size=job.size,
        secret=job.secret,
        settings=job.settings,
        host=bind,
        advertised=advertised,
        cargo=job.buffers if large else (),
    ) as hub:
        lean = replace(job, buffers=()) if large else job
        task = _Task(job=lean, feeds=_columns(feeds), hub=hub.address, cargo=large)
        with _small_batches(spark):
            call = _Call(spark, frame, task, tag=f"kindler-{job.run_id}")
            call.start()
            try:
                heard = watch(
                    hub,
                    running=call.is_alive,
                    listener=listener,
                    settings=job.settings,
                    after_first=True,
                )
            finally:
                hub.abort()
                call.end(job.settings.stop_timeout_s)
        kept = hub.results
        outcomes = [o for o in call.outcomes if o.kind != "result"]
        outcomes += [Outcome(rank, "result", {}, buffers) for rank, buffers in kept.items()]
        return _results(job, call, heard, outcomes, feeds=feeds, started=hub.joined > 0)


def _columns(feeds: Sequence[Feed]) -> tuple[tuple[str, Columns], ...]:
    return tuple((feed.name, feed.columns) for feed in feeds)


def _results(
    job: Job,
    call: _Call,
    heard: list[Outcome],
    outcomes: list[Outcome],
    *,
    feeds: Sequence[Feed],
    started: bool,
) -> list[Outcome]:
    results = verdict(heard, outcomes)
    if len(results) == job.size and all(o.kind == "result" for o in results):
        return results  # however Spark's own job has ended
    if call.error is not None:
        if started:
            raise WorkerLost(
                f"Spark gave up on its task ({_first_line(call.error)})", rank=None, host="the cluster"
            ) from None
        raise frame_error(call.error, [(feed.frame, feed.columns.names) for feed in feeds]) from None
    if not results:
        raise DataError("the data has no rows.")  # Spark starts no task for a frame it knows to be empty
    raise TrainingError(f"the run ended with {len(results)} results of {job.size} workers.")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]


class _Call(threading.Thread):
    """The Spark job, waited for on a thread of its own, so that the driver can listen and interrupt."""

    def __init__(self, spark: SparkSession, frame: DataFrame, task: _Task, tag: str) -> None:
        super().__init__(name="kindler-spark-job", daemon=True)
        self._spark = spark
        self._frame = frame
        self._task = task
        self._tag = tag
        self.outcomes: list[Outcome] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._spark.addTag(self._tag)
            table = self._frame.mapInArrow(self._task, _RESULT, barrier=True).toArrow()
            self.outcomes = _outcomes(table)
        except BaseException as exc:  # noqa: BLE001 - raised again on the thread that waits
            self.error = exc

    def end(self, timeout_s: float) -> None:
        """Wait for the tasks, which were told to end; interrupt Spark when they do not."""
        self.join(timeout_s)
        if self.is_alive():
            self._spark.interruptTag(self._tag)
            self.join(timeout_s)


def _outcomes(table: pa.Table) -> list[Outcome]:
    pieces: dict[int, list[tuple[int, bytes]]] = {}
    for rank, part, payload in zip(*(table.column(i).to_pylist() for i in range(3)), strict=True):
        pieces.setdefault(rank, []).append((part, payload))
    return [unpack(rank, [p for _, p in sorted(pieces[rank])]) for rank in sorted(pieces)]


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What runs in a Spark task. Built on the driver, pickled once, closed over nothing."""

    job: Job
    feeds: tuple[tuple[str, Columns], ...]
    hub: Address | None
    cargo: bool = False
    parcels: Parcels | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = BarrierTaskContext.get()
        outcome = self._supervise(context, batches)
        for part, payload in enumerate(pack(outcome)):
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array([outcome.rank], pa.int32()),
                    pa.array([part], pa.int32()),
                    pa.array([payload], pa.binary()),
                ],
                ["rank", "part", "payload"],
            )

    def _supervise(self, context: Any, batches: Iterator[pa.RecordBatch]) -> Outcome:
        rank, owner = context.partitionId(), os.getppid()
        try:
            with self._meeting(context, rank) as (hub, watcher):
                outcome = self._work(rank, owner, hub, batches)
            outcome = watcher.verdict(outcome) if watcher is not None else outcome
        except Aborted:
            outcome = Outcome(rank, "aborted")
        except Exception as exc:  # noqa: BLE001 - the edge of the task: it becomes an outcome
            outcome = Outcome(rank, "error", {**describe(exc), "host": socket.gethostname()})
        if outcome.kind != "result":
            fork_server.retire(owner)
        return outcome if self.parcels is None else self.parcels.sent(outcome)

    def _work(self, rank: int, owner: int, hub: Address, batches: Iterator[pa.RecordBatch]) -> Outcome:
        job = self.job if self.parcels is None else self.parcels.received(self.job)
        far = self.hub is not None
        with Supervisor(
            job, rank, hub=hub, owner=owner, base=_local_folder(rank), far=far, cargo=self.cargo
        ) as supervisor:
            supervisor.start()
            try:
                _spool(supervisor, self.feeds, batches, rank=rank, size=self.job.size)
            except KindlerError as exc:
                return supervisor.failed(exc)
            return supervisor.run()

    @contextmanager
    def _meeting(self, context: Any, rank: int) -> Iterator[tuple[Address, _Watcher | None]]:
        """Where supervisors meet: at the driver, or at rank 0 where the driver is out of reach."""
        if self.hub is not None:
            yield self.hub, None
            return
        address = context.getTaskInfos()[rank].address.rpartition(":")[0].strip("[]")
        mine = Hub(size=self.job.size, secret=self.job.secret, settings=self.job.settings, host=address)
        with mine if rank == 0 else nullcontext() as opened:
            told = context.allGather(json.dumps(opened.address if opened else None))
            host, port = json.loads(told[0])
            with _Watcher(opened, self.job) if opened else nullcontext() as watcher:
                yield (host, port), watcher


class _Watcher(threading.Thread):
    """Watches the meeting point at rank 0, until all ranks are done: the driver cannot."""

    def __init__(self, hub: Hub, job: Job) -> None:
        super().__init__(name="kindler-watch", daemon=True)
        self._hub = hub
        self._settings = job.settings
        self._over = threading.Event()
        self._heard: list[Outcome] = []

    def __enter__(self) -> _Watcher:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is not None:
            self._over.set()
        self.join()  # rank 0 is done; the others still need the meeting point to say so themselves

    def run(self) -> None:
        try:
            self._heard = watch(
                self._hub, running=self._running, listener=lambda event: None, settings=self._settings
            )
        except KindlerError:
            self._hub.abort()  # not all came; each supervisor says so itself

    def verdict(self, outcome: Outcome) -> Outcome:
        """Rank 0's outcome, or the gang's stall, which nobody but rank 0 knows of."""
        return next((heard for heard in self._heard if heard.kind == "stalled"), outcome)

    def _running(self) -> bool:
        return not self._over.is_set() and not self._hub.finished


def _spool(
    supervisor: Supervisor,
    feeds: Sequence[tuple[str, Columns]],
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
        for batch in batches:
            supervisor.check()
            if not writers:
                continue  # the rows only make Spark start the task
            feed = batch.column(FEED).to_numpy()
            for number, writer in enumerate(writers):
                part = batch if (feed == number).all() else batch.filter(pa.array(feed == number))
                if part.num_rows:
                    ids, lanes = part.column(ROW).to_numpy(), part.column(LANE).to_numpy()
                    _check_lanes(lanes, rank, size)
                    writer.append(own_columns(part, feeds[number][1].names, number), where=Where(ids))
                    writer.append_order(ids, lanes)


def _check_lanes(lanes: Any, rank: int, size: int) -> None:
    """That Spark has sent rows where they belong is known from its source alone; better to look."""
    strays = lanes[lanes % size != rank]
    if len(strays):
        raise TrainingError(
            f"Spark brought a row of lane {strays[0]} to partition {rank} of {size}; it belongs elsewhere."
        )


def _local_folder(rank: int) -> Path | None:
    """One of the folders that Spark was given for temporary files."""
    folders = [f for f in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if f and os.access(f, os.W_OK)]
    return Path(folders[rank % len(folders)]) if folders else None


def meets_at_driver(spark: SparkSession, settings: RunSettings) -> bool:
    """Whether workers meet at the driver, rather than among themselves."""
    if settings.rendezvous != "auto":
        return settings.rendezvous == "driver"
    return is_on_this_machine(spark)  # executors reach the driver of a classic session anyhow


def _connect_host(spark: Any) -> str:
    return str(spark.client.host)


def _driver_hosts(spark: SparkSession) -> tuple[str, str]:
    """The address to listen on at the driver, and the one that executors reach it by."""
    if is_connect(spark):
        server = _connect_host(spark)
        here = "127.0.0.1" if server in LOOPBACK else address_towards(server)
        return here, here
    reached = spark.conf.get("spark.driver.host", None) or socket.gethostbyname(socket.gethostname())
    bind = spark.conf.get("spark.driver.bindAddress", None) or reached
    return bind.strip("[]"), reached.strip("[]")


@contextmanager
def _small_batches(spark: SparkSession) -> Iterator[None]:
    """Arrow batches of a few megabytes whatever the row width; the session gets its setting back."""
    before = spark.conf.get(_BATCH_CONF, None)
    spark.conf.set(_BATCH_CONF, str(_BATCH_BYTES))
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(_BATCH_CONF)
        else:
            spark.conf.set(_BATCH_CONF, before)
