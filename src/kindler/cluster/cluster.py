"""`run`: your own program on every node of a gang; and `Cluster`, the driver's handle on it."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import math
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import cloudpickle
import pyarrow as pa

from kindler import limits
from kindler.cluster.blocks import DEFAULT_NAME, INFER, SPOOL, TRAIN, table_of
from kindler.cluster.context import FRAMEWORKS, TRAINING
from kindler.cluster.failures import Failures
from kindler.cluster.feed import VALIDATION
from kindler.cluster.feed_server import CONTROL
from kindler.cluster.feeder import Feeder, FeedJob, NodeAddress, NodeGoneError, answers_of, push_local
from kindler.cluster.node import ranks
from kindler.config import RunSettings
from kindler.data.arrays import is_spark_frame
from kindler.engine import local
from kindler.engine.fork_server import print_line
from kindler.engine.gang import Gang
from kindler.engine.job import GangMember, Job, new_run_id
from kindler.engine.outcome import Outcome
from kindler.errors import (
    ConfigError,
    DataError,
    FeedError,
    KindlerError,
    MissingExtraError,
    StartTimeoutError,
)
from kindler.frameworks.pickling import pickle_for_workers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

InputMode = Literal["program", "spark"]
_MODES = ("program", "spark")
_PROBE_ROWS = 1


def run(
    main_fun: Callable[[Any, Any], Any],
    args: Any = None,
    workers: int = 1,
    *,
    spark: SparkSession | None = None,
    ps: int = 0,
    chief: bool = True,
    evaluator: bool = False,
    evaluator_grace_s: float = 60.0,
    until: Literal["workers", "chief"] = "workers",
    input_mode: InputMode = "program",
    framework: str | None = "tensorflow",
    env: Mapping[str, str] | None = None,
    gpus: int | None = None,
    tensorboard: bool = False,
    log_dir: str | None = None,
    start_timeout_s: float = 120.0,
    settings: RunSettings | None = None,
) -> Cluster:
    """Run `main_fun(args, ctx)` on every node of a new cluster, and return once all nodes have started.

    Each node is a process. TensorFlow programs find `TF_CONFIG`, PyTorch programs `MASTER_ADDR`,
    `MASTER_PORT`, `RANK` and `WORLD_SIZE`, JAX programs `ctx.jax_distributed`; each node's port is held for
    it until the program binds it.

    Args:
        main_fun: The program. See `Cluster.return_values` for what it returns.
        args: Its first argument, any object that can be pickled. A list also becomes `sys.argv`.
        workers: Number of nodes that train, including the chief.
        spark: Run the nodes on the executors of this session, classic or Connect; None runs them as processes
            on this machine, without Spark.
        ps: Number of additional parameter servers. They are stopped when the cluster ends.
        chief: Whether the first training node has the role "chief".
        evaluator: Whether to add an evaluator.
        evaluator_grace_s: Once all others have returned, `ctx.training_ended` is true on the evaluator, and
            it has this long to return before it is stopped.
        until: Whose return ends the cluster: that of all training nodes, or of the chief alone if the others
            only serve it, as under TensorFlow's ParameterServerStrategy.
        input_mode: "program" if the program reads its own data; "spark" if `train` and `inference` feed it.
            Nodes that are fed hold no Spark slots, so the feeding jobs can use all of them.
        framework: "tensorflow", "torch" or "jax": which variables a program finds, and what is imported
            before it starts. None sets and imports nothing.
        env: Additional environment variables for all nodes.
        gpus: GPUs per node. None takes those that Spark assigned to the task, or else an equal share of the
            machine's. No two nodes share a GPU.
        tensorboard: Whether to run TensorBoard next to the first node; see `Cluster.tensorboard_url`.
        log_dir: The folder for TensorBoard to show.
        start_timeout_s: Seconds for all nodes to start.
        settings: Other limits; see `RunSettings`.

    Raises:
        ConfigError: An argument is invalid, or Spark has too few slots.
        StartTimeoutError: Not all nodes started in time. None is left running.
    """
    fed = input_mode == "spark"
    nodes = ranks(
        workers=workers,
        ps=ps,
        chief=chief,
        evaluator=evaluator,
        until=until,
        evaluator_grace_s=evaluator_grace_s,
        fed=fed,
        tensorboard=tensorboard,
    )
    _check(main_fun, input_mode, framework, tensorboard, log_dir)
    run_settings = replace(
        settings or RunSettings(), start_timeout_s=start_timeout_s, stall_timeout_s=math.inf
    )
    default_fs = "file://"
    if spark is not None:
        from kindler.spark.session import default_file_system

        default_fs = default_file_system(spark)
    pickle_for_workers({"main_fun": main_fun, "args": args})  # says which part cannot travel
    options = {
        "framework": framework,
        "gpus": gpus,
        "fed": fed,
        "log_dir": log_dir if tensorboard else None,
        "default_fs": default_fs,
    }
    job = Job(
        ranks=nodes,
        buffers=(json.dumps(options).encode(), cloudpickle.dumps((main_fun, args))),
        environment=tuple(sorted((env or {}).items())),
        preload=("kindler.cluster.node", *_preload(framework, main_fun)),
        settings=run_settings,
    )
    cluster = Cluster(_started(job, spark, fed=fed), spark, fed=fed, tensorboard=tensorboard)
    cluster._await_start(start_timeout_s)
    return cluster


class Cluster:
    """A running cluster, created by `run`. Leaving a `with` block shuts it down.

    Attributes:
        size: The number of nodes.
        run_id: The cluster's name.
    """

    def __init__(self, gang: Gang, spark: SparkSession | None, *, fed: bool, tensorboard: bool) -> None:
        self.size = gang.job.size
        self.run_id = gang.job.run_id
        self._gang = gang
        self._roles = [spec.role for spec in gang.job.ranks]
        self._spark = spark
        self._fed = fed
        self._tensorboard = tensorboard
        self._changed = threading.Condition()
        self._passes: dict[str, int] = {}
        # What nodes have reported: rank, "ready", "feed_closed" or "committed", which feed, which pass.
        self._reports: set[tuple[int, str, str | None, int | None]] = set()
        self._validates = False
        self._failures = Failures(gang)
        if fed and spark is not None:
            from kindler.spark.executors import driver_hosts

            self._failures.serve(*driver_hosts(spark))
            weakref.finalize(self, self._failures.close)
        self._feeding = threading.Lock()
        self._printer = threading.Thread(target=self._follow, name="kindler-cluster-events", daemon=True)
        self._printer.start()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is None:
            self.shutdown()
            return
        try:
            self._raise_failure()
        except KindlerError as cause:
            # A node's own failure instead of what it led to in the driver's program.
            if isinstance(exc, Exception) and cause is not exc:
                raise cause from exc
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self._gang.is_running else "ended"
        return f"<Cluster {self.run_id}: {', '.join(self._roles)}; {state}>"

    @property
    def is_running(self) -> bool:
        """Whether any program is still running."""
        return self._gang.is_running

    @property
    def nodes(self) -> tuple[GangMember, ...]:
        """Role, machine, address and held ports of every node."""
        return self._gang.members()

    def train(
        self,
        data: Any,
        epochs: int = 1,
        *,
        validation: Any = None,
        columns: Sequence[str] | None = None,
        feed: str = "input",
    ) -> None:
        """Push rows to the nodes that train, and return when all have arrived there.

        The nodes read them with `ctx.data_feed().next_batch(n)`. May be called several times; `shutdown`
        tells the programs that no more rows will come.

        Args:
            data: A Spark DataFrame or RDD; pandas, Arrow, a dict of arrays, arrays, or a list of any objects.
            epochs: How often to push all of it.
            validation: Additional data that every training node gets in full, before anything else, and
                keeps: `ctx.data_feed("validation")` reads it any number of times.
            columns: The columns to push; None pushes all.
            feed: The feed's name, for programs with several.

        Raises:
            KindlerError: A node failed, or the data cannot be computed.
        """
        self._check_fed("train")
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise ConfigError(f"epochs={epochs!r}: epochs must be a whole number, 1 or more.")
        if feed == VALIDATION:
            raise ConfigError(f"feed={VALIDATION!r} is filled by train(validation=...).")
        if getattr(data, "isStreaming", False):
            raise ConfigError("train needs data that ends.\nHint: train_stream(frame, checkpoint=...).")
        with self._feeding:
            self._feed_validation(validation, columns)
            for _ in range(epochs):
                if not self._feed_pass(data, feed, columns, kind=TRAIN):
                    return

    def train_stream(
        self,
        frame: DataFrame,
        *,
        checkpoint: str,
        columns: Sequence[str] | None = None,
        feed: str = "input",
        **trigger: Any,
    ) -> Any:
        """Feed every micro-batch of a streaming DataFrame exactly once, across restarts too.

        A micro-batch counts as processed once every training node has committed it with `feed.commit()` or
        with `feed.checkpoint(...)`, which saves the model together with the micro-batch's number.

        Args:
            frame: The streaming DataFrame.
            checkpoint: The folder in which Spark records the stream's progress.
            columns: The columns to push; None pushes all.
            feed: The feed's name.
            trigger: When a micro-batch starts, as for `DataStreamWriter.trigger`, such as
                `availableNow=True`.

        Returns:
            The running streaming query: call `awaitTermination()` or stop it.
        """
        self._check_fed("train_stream")
        if not getattr(frame, "isStreaming", False):
            raise ConfigError(
                "train_stream takes a streaming DataFrame.\nHint: train(data) takes other data."
            )
        from kindler.spark.versions import is_connect

        if self._spark is None or is_connect(self._spark):
            raise ConfigError(
                "train_stream needs a classic session: over Spark Connect a process of the server handles "
                "each micro-batch, and it cannot reach this cluster."
            )

        def each(batch: Any, number: int) -> None:
            with self._feeding:
                self._feed_validation(None, columns)
                self._feed_pass(batch, feed, columns, kind=TRAIN, micro_batch=number)
                self._await_commit(feed, self._passes[feed] - 1)

        writer = frame.writeStream.foreachBatch(each).option("checkpointLocation", checkpoint)
        return (writer.trigger(**trigger) if trigger else writer).start()

    def inference(
        self,
        data: Any,
        schema: Any = None,
        *,
        flat_map: bool = False,
        columns: Sequence[str] | None = None,
        feed: str = "input",
    ) -> Any:
        """Return the rows of `data` with the programs' results: one per row, all columns kept.

        Programs read rows with `next_batch` and answer each batch with `batch_results`. A Spark DataFrame
        gives a lazy DataFrame, to be computed while the cluster runs; an RDD an RDD of the results alone;
        pandas a pandas DataFrame; Arrow and arrays an Arrow table; a list a list.

        Args:
            data: Data of any kind that `train` takes.
            schema: The columns of the results, such as "label int, score double" or a StructType. None infers
                them from the answer to the first row, which the program then sees twice.
            flat_map: Whether programs answer each row with a list of results: the row is repeated for each of
                them, and dropped for an empty list.
            columns: The columns that programs get; None passes all. The result keeps the others anyway.
            feed: The feed's name.

        Raises:
            KindlerError: A node failed.
        """
        self._check_fed("inference")
        feeder = self._feeder(feed, INFER, columns, flat=flat_map)
        if self._spark is not None:
            from kindler.spark import feeding

            if is_spark_frame(data):
                feeder = replace(feeder, fields=self._result_fields(data, schema, feeder))
            if is_spark_frame(data) or feeding.is_rdd(data):
                return feeding.answered(data, self._for_tasks(feeder))
        if schema is not None and not isinstance(schema, pa.Schema):
            raise ConfigError(f"schema={schema!r}: for data on the driver it must be a pyarrow.Schema.")
        with self._naming_the_cause():
            answers = answers_of(data, replace(feeder, fields=schema))
        is_pandas = type(data).__module__.partition(".")[0] == "pandas"
        return answers.to_pandas() if is_pandas and isinstance(answers, pa.Table) else answers

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Wait until all programs have returned, and return their `return_values`.

        Raises:
            KindlerError: A node failed. No process is left then.
            TimeoutError: The programs are still running.
        """
        self._ended(timeout_s)
        self._printer.join()
        return self.return_values

    def shutdown(self, timeout_s: float | None = None) -> list[Any]:
        """Tell the programs that no more rows will come, and wait until they have returned.

        Args:
            timeout_s: The longest time to wait; nodes that still run then are killed. None waits forever.

        Raises:
            KindlerError: A node failed, or did not end in time. No process is left then.
        """
        if self._fed:
            self._tell({"do": "end"})
        try:
            return self.wait(timeout_s)
        except TimeoutError as exc:
            if self._gang.is_running:
                self._gang.abort(f"its programs had not returned {timeout_s:g} s after shutdown")
                return self.wait()
            raise exc

    def stop(self) -> None:
        """Kill all nodes. Never raises."""
        self._gang.abort("the cluster was stopped")
        with contextlib.suppress(Exception):
            self._ended()

    @property
    def return_values(self) -> list[Any]:
        """What `main_fun` returned on each node, by rank; None for nodes that were stopped at the end.

        Raises:
            ConfigError: The cluster is still running.
        """
        if self._gang.is_running:
            raise ConfigError("the cluster is still running.\nHint: wait() or shutdown() first.")
        values: list[Any] = [None] * self.size
        for outcome in self._ended():
            if outcome.kind == "result":
                values[outcome.rank] = cloudpickle.loads(outcome.buffers[0])
        return values

    def tensorboard_url(self) -> str | None:
        """The URL of TensorBoard; None if it was not requested."""
        if not self._tensorboard:
            return None
        first = self._gang.members()[0]
        return f"http://{first.outside_address}:{first.ports[-1]}"

    def _await_start(self, timeout_s: float) -> None:
        if self._spark is not None:
            from kindler.spark.executors import meets_at_driver

            if not meets_at_driver(self._spark, self._gang.job.settings):
                return  # the nodes are out of reach; `wait` tells how they end
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._missing("ready") and self._gang.is_running and time.monotonic() <= deadline:
                self._changed.wait(limits.TICK_S)
        missing = [self._name(rank) for rank in self._missing("ready")]
        if not self._gang.is_running:
            if not self._reports:
                self._ended()  # no program has begun: this is why
        elif missing:
            self.stop()
            raise StartTimeoutError(
                f"of {self.size} nodes these did not start in {timeout_s:g} s: {', '.join(missing)}.\n"
                "Hint: do other jobs occupy Spark's slots? start_timeout_s=... waits longer."
            )

    def _follow(self) -> None:
        for event in self._gang.events():
            if event.kind == "log":
                print_line(f"[{self._name(event.rank)}] {event.fields['line']}")
            elif event.kind == "report":
                name, feed, number = map(event.fields.get, ("name", "feed", "number"))
                with self._changed:
                    self._reports.add((event.rank, str(name), feed, number))
                    self._changed.notify_all()
            elif event.kind == "done":
                self._failures.returned(event.rank)
        self._failures.returned()
        self._notify()

    def _name(self, rank: int) -> str:
        return f"{self._roles[rank]} {self._roles[:rank].count(self._roles[rank])}"

    def _missing(self, report: str, feed: str | None = None, number: int | None = None) -> list[int]:
        """The training nodes that have not reported it."""
        return [rank for rank in sorted(self._training) if (rank, report, feed, number) not in self._reports]

    @property
    def _training(self) -> set[int]:
        return {rank for rank, role in enumerate(self._roles) if role in TRAINING}

    def _check_fed(self, what: str) -> None:
        if not self._fed:
            raise ConfigError(
                f"{what}: the programs of this cluster read their data themselves.\n"
                'Hint: run(..., input_mode="spark").'
            )
        if not self._gang.is_running:
            self._ended()  # its failure, if it failed
            raise ConfigError(f"{what}: all programs of this cluster have returned.")

    def _feeder(
        self,
        feed: str,
        kind: str,
        columns: Sequence[str] | None,
        *,
        pass_number: int | None = None,
        flat: bool = False,
    ) -> Feeder:
        training = [member for member in self._gang.members() if member.role in TRAINING]
        return Feeder(
            nodes=tuple(NodeAddress(m.rank, m.host, m.outside_address, m.ports[1]) for m in training),
            secret=self._gang.job.secret,
            job=new_run_id(),
            feed=feed,
            kind=kind,
            pass_number=pass_number,
            flat=flat,
            columns=None if columns is None else tuple(columns),
        )

    def _feed_validation(self, data: Any, columns: Sequence[str] | None) -> None:
        if self._validates:
            if data is not None:
                raise ConfigError(
                    "pass validation data to the first train() of a cluster: the nodes keep it."
                )
            return
        self._validates = True
        if data is None:
            # There is none: nobody waits for it.
            self._tell({"do": "pass_end", "feed": VALIDATION, "pass": 0})
        else:
            self._feed_pass(data, VALIDATION, columns, kind=SPOOL)

    def _feed_pass(
        self,
        data: Any,
        feed: str,
        columns: Sequence[str] | None,
        *,
        kind: str,
        micro_batch: int | None = None,
    ) -> bool:
        number = self._passes.get(feed, 0)
        self._passes[feed] = number + 1
        if micro_batch is not None:
            self._tell({"do": "begin", "feed": feed, "pass": number, "micro_batch": micro_batch})
        job = self._job_of(data, self._feeder(feed, kind, columns, pass_number=number))
        job.start()
        with self._changed:
            while job.is_alive() and self._gang.is_running and not self._is_closed(feed):
                self._changed.wait(limits.TICK_S)
        if job.is_alive():
            job.stop()
        job.join(self._gang.job.settings.stop_timeout_s)
        if self._is_closed(feed) or not self._gang.is_running:
            self._raise_failure()
            return False
        if job.error is not None:
            if isinstance(job.error, NodeGoneError):
                self._failures.wait(job.error.rank)
            self._raise_failure()
            if not self._gang.is_running:
                return False  # all programs have returned
            raise job.error
        self._tell({"do": "pass_end", "feed": feed, "pass": number})
        return True

    def _job_of(self, data: Any, feeder: Feeder) -> FeedJob:
        if self._spark is not None:
            from kindler.spark import feeding

            if is_spark_frame(data) or feeding.is_rdd(data):
                tag = f"kindler-feed-{feeder.job}"
                return FeedJob(
                    partial(feeding.push, self._spark, data, self._for_tasks(feeder), tag),
                    stop=partial(feeding.stop, self._spark, data, tag),
                    done=self._notify,
                )
        if table_of(data) is None and not hasattr(data, "__iter__"):
            raise ConfigError(
                f"cannot feed {type(data).__name__!r} objects to this cluster.\n"
                "Hint: a Spark DataFrame needs run(..., spark=session); else pandas, Arrow, arrays, a list."
            )
        # It stops by itself when no node takes rows any more.
        return FeedJob(partial(push_local, data, feeder), stop=lambda: None, done=self._notify)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _is_closed(self, feed: str) -> bool:
        return not self._missing("feed_closed", feed)

    def _await_commit(self, feed: str, number: int) -> None:
        with self._changed:
            while self._missing("committed", feed, number):
                if not self._gang.is_running or self._is_closed(feed):
                    break
                self._changed.wait(limits.TICK_S)
            else:
                self._reports -= {(rank, "committed", feed, number) for rank in self._training}
                return
        self._raise_failure()
        raise FeedError(
            "the programs ended before committing this micro-batch; it is fed again when the stream "
            "restarts.\nHint: call feed.commit() after each of feed.micro_batches()."
        )

    def _ended(self, timeout_s: float | None = None) -> list[Outcome]:
        try:
            return self._gang.wait(timeout_s)
        finally:
            if not self._gang.is_running:
                self._failures.close()

    def _raise_failure(self) -> None:
        if not self._gang.is_running:
            self._ended()

    @contextlib.contextmanager
    def _naming_the_cause(self) -> Iterator[None]:
        try:
            yield
        except NodeGoneError as exc:
            self._failures.wait(exc.rank)
            self._raise_failure()
            raise

    def _for_tasks(self, feeder: Feeder) -> Feeder:
        """A feeder for other processes, which ask the driver why a node is gone."""
        failures = self._failures
        return replace(feeder, failures=failures.address, failure_timeout_s=2 * failures.limit_s)

    def _tell(self, order: Mapping[str, Any]) -> None:
        words = json.dumps(order).encode()
        for rank in sorted(self._training):
            with contextlib.suppress(FeedError):  # its program has returned
                self._gang.push(rank, CONTROL, words)

    def _result_fields(self, frame: DataFrame, schema: Any, feeder: Feeder) -> pa.Schema:
        from kindler.spark.feeding import result_schema
        from kindler.spark.versions import to_arrow

        if schema is None:
            fields = self._probe(to_arrow(frame.limit(_PROBE_ROWS)), feeder)
        else:
            fields = schema if isinstance(schema, pa.Schema) else result_schema(schema)
        existing = sorted(set(fields.names) & set(frame.columns))
        if existing:
            raise ConfigError(
                f"inference: the data has columns {existing} already.\n"
                'Hint: schema="another_name type" renames the result columns.'
            )
        return fields

    def _probe(self, rows: pa.Table, feeder: Feeder) -> pa.Schema:
        with self._naming_the_cause():
            answers = list(feeder.infer(rows.to_batches(), partition=0))
        kind = answers[0].column(rows.num_columns).type if answers else pa.null()
        if pa.types.is_null(kind):
            raise DataError(
                "inference: the type of the results cannot be inferred from the first row.\n"
                'Hint: inference(data, schema="result double").'
            )
        return pa.schema(list(kind) if pa.types.is_struct(kind) else [pa.field(DEFAULT_NAME, kind)])


def _check(
    main_fun: Any, input_mode: str, framework: str | None, tensorboard: bool, log_dir: str | None
) -> None:
    if not callable(main_fun):
        raise ConfigError(f"main_fun={main_fun!r}: must be a function main_fun(args, ctx).")
    if input_mode not in _MODES:
        raise ConfigError(f"input_mode={input_mode!r}: must be one of {', '.join(map(repr, _MODES))}.")
    if framework is not None and framework not in FRAMEWORKS:
        raise ConfigError(
            f"framework={framework!r}: must be None or one of {', '.join(map(repr, FRAMEWORKS))}."
        )
    if tensorboard and log_dir is None:
        raise ConfigError("tensorboard=True needs log_dir=..., the folder to show.")
    if tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError(what="tensorboard=True", package="tensorboard", extra="tensorboard")


def _preload(framework: str | None, main_fun: Any) -> tuple[str, ...]:
    if framework is None or importlib.util.find_spec(framework) is None:
        return ()
    program = inspect.unwrap(main_fun)
    module = sys.modules.get(getattr(program, "__module__", None) or "")
    try:
        source = inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):  # typed into a shell, say
        return (framework,)
    imports = re.compile(rf"^\s*(import|from)\s+({framework}|keras|tf_keras)\b", re.MULTILINE)
    return (framework,) if imports.search(source) else ()


def _started(job: Job, spark: SparkSession | None, *, fed: bool) -> Gang:
    if spark is None:
        return local.start(job)
    from kindler.spark import engine
    from kindler.spark.executors import check_executors, cores_per_host, resolve_workers

    resolve_workers(spark, job.size, job.settings, detached=fed)
    check_executors(spark)
    return engine.start(replace(job, cores=cores_per_host(spark)), spark=spark, detached=fed)
