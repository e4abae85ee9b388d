"""Supported versions of pyspark, and every private name of pyspark and py4j that Kindler uses. A new
release of pyspark breaks this file or nothing. `tests/unit/with_spark/test_versions.py` touches each name."""

from __future__ import annotations

import importlib
import pickle
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import TYPE_CHECKING, Any

from kindler.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

OLDEST = (3, 5)
"""The oldest version that is supported, of pyspark and of a Spark Connect server."""

_FUNCTIONS_OF_COLUMNS = (4, 1)
_ARROW_METHODS = (4, 0)  # since then a frame becomes Arrow, and Arrow a frame, by public methods


def parse(version: str) -> tuple[int, int]:
    """The first two numbers of a version.

    >>> parse("4.0.0.dev2"), parse("3.5-SNAPSHOT"), parse("unknown")
    ((4, 0), (3, 5), (0, 0))
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def require_pyspark(what: str) -> tuple[int, int]:
    """Return the version of the installed pyspark; raises if it is missing or too old."""
    try:
        pyspark: Any = importlib.import_module("pyspark")
    except ModuleNotFoundError as exc:
        if exc.name != "pyspark":
            raise
        raise MissingExtraError(what=what, package="pyspark", extra="spark") from exc
    complaint = too_old(pyspark.__version__)
    if complaint is not None:
        raise ConfigError(f"{what}: pyspark {complaint}\nHint: pip install 'pyspark>=3.5'")
    return parse(pyspark.__version__)


def too_old(version: str) -> str | None:
    """The end of an error message about an unsupported version; None for a supported one.

    >>> too_old("3.4.1")
    '3.4.1 is too old: Kindler needs Spark 3.5 or newer.'
    >>> too_old("4.0.0")
    """
    if parse(version) >= OLDEST:
        return None
    return f"{version} is too old: Kindler needs Spark {'.'.join(map(str, OLDEST))} or newer."


def takes_columns(spark: SparkSession) -> bool:
    """Whether a function can take single columns as Arrow, not just whole rows: since Spark 4.1."""
    return min(_pyspark(), parse(spark.version)) >= _FUNCTIONS_OF_COLUMNS


def to_arrow(frame: DataFrame) -> pa.Table:
    if hasattr(type(frame), "toArrow"):
        return frame.toArrow()
    import pyarrow as pa

    old: Any = frame
    if is_connect(old):
        table, _ = old._session.client.to_table(old._plan.to_proto(old._session.client))
    else:
        batches = old._collect_as_arrow()
        schema = batches[0].schema if batches else _arrow_schema(old.schema)
        table = pa.Table.from_batches(batches, schema)
    utc = [field.with_type(_in_utc(field.type)) for field in table.schema]  # as later versions give them
    return table.cast(pa.schema(utc))


def from_arrow(spark: SparkSession, table: pa.Table, schema: StructType | None = None) -> DataFrame:
    if _pyspark() >= _ARROW_METHODS:
        frame: DataFrame = (
            spark.createDataFrame(table) if schema is None else spark.createDataFrame(table, schema)
        )
        return frame
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(table.schema) if schema is None else schema
    wanted = table.rename_columns(list(schema.names)).cast(_arrow_schema(schema))
    return (
        _local_relation(spark, wanted, schema) if is_connect(spark) else _through_file(spark, wanted, schema)
    )


def _through_file(spark: Any, table: pa.Table, schema: StructType) -> DataFrame:
    """Classic 3.5: the way of a pandas frame, from where it has become Arrow."""
    from pyspark.sql import DataFrame
    from pyspark.sql.pandas.serializers import ArrowStreamSerializer

    if not table.num_rows:
        empty: DataFrame = spark.createDataFrame([], schema)
        return empty
    rows = int(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch"))
    utils, context = spark._jvm.PythonSQLUtils, spark.sparkContext
    batches = context._serialize_to_jvm(
        table.to_batches(max_chunksize=rows if rows > 0 else None),
        ArrowStreamSerializer(),
        utils.readArrowStreamFromFile,
        spark._jvm.ArrowIteratorServer,
    )
    return DataFrame(utils.toDataFrame(batches, schema.json(), spark._jsparkSession), spark)


def _local_relation(spark: Any, table: pa.Table, schema: StructType) -> DataFrame:
    dataframe: Any = importlib.import_module("pyspark.sql.connect.dataframe")
    plan: Any = importlib.import_module("pyspark.sql.connect.plan")
    frame: DataFrame = dataframe.DataFrame.withPlan(plan.LocalRelation(table, schema=schema.json()), spark)
    return frame


def one_partition(rows: Any, number: int) -> list[Any]:
    """The rows of one partition of an RDD, by a job of its own; small ones, as they pass through the JVM."""
    context = rows.context
    numbers = context._gateway.new_array(context._jvm.int, 1)
    numbers[0] = number
    (batches,) = rows._jrdd.collectPartitions(numbers)
    return [row for batch in batches for row in pickle.loads(batch)]


def add_tag(spark: SparkSession, tag: str) -> None:
    if _has_tags(spark):
        spark.addTag(tag)
    else:
        spark.sparkContext.addJobTag(tag)


def interrupt_tag(spark: SparkSession, tag: str) -> None:
    if _has_tags(spark):
        spark.interruptTag(tag)
    else:
        spark.sparkContext.cancelJobsWithTag(tag)


def condition_of(error: Any) -> str | None:
    ask = getattr(error, "getCondition", None) or error.getErrorClass
    name: str | None = ask()
    return name


def _has_tags(spark: Any) -> bool:
    return is_connect(spark) or _pyspark() >= _ARROW_METHODS


def _pyspark() -> tuple[int, int]:
    import pyspark

    return parse(pyspark.__version__)


def is_connect(thing: Any) -> bool:
    return type(thing).__module__.startswith("pyspark.sql.connect")


def active_context() -> Any:
    from pyspark import SparkContext

    return SparkContext._active_spark_context


def has_gateway() -> bool:
    from pyspark import SparkContext

    return SparkContext._gateway is not None


def take_gateway() -> Any:
    """Detach the connection to the JVM, so that a next session starts another JVM."""
    from pyspark import SparkContext

    gateway, SparkContext._gateway, SparkContext._jvm = SparkContext._gateway, None, None
    return gateway


@contextmanager
def noting_jvms(launched: list[Popen[bytes]]) -> Iterator[None]:
    """Append each JVM that pyspark launches within the block, at once."""
    java_gateway: Any = importlib.import_module("pyspark.java_gateway")
    launch = java_gateway.Popen

    def noted(*args: Any, **options: Any) -> Any:
        with _interrupts_deferred():  # between the fork and our knowing of it, nobody else would end it
            launched.append(launch(*args, **options))
        return launched[-1]

    java_gateway.Popen = noted
    try:
        yield
    finally:
        java_gateway.Popen = launch


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # it is ignored, or not raised on this thread
        return
    deferred: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: deferred.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if deferred:
            handler(*deferred[0])


def spark_home() -> Path:
    from pyspark.find_spark_home import _find_spark_home

    return Path(_find_spark_home())


def java_context(context: Any) -> Any:
    """None once the context was stopped."""
    return getattr(context, "_jsc", None)


def temporary_folder(context: Any) -> Path:
    """pyspark's folder below spark.local.dir, which Spark removes if nobody else can."""
    return Path(context._temp_dir)


def concurrent_tasks(spark: Any) -> int:
    """The limit that Spark checks barrier stages against."""
    context = java_context(spark.sparkContext).sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def executor_summaries(spark: Any) -> list[Any]:
    listed = java_context(spark.sparkContext).sc().statusStore().executorList(True)
    return [listed.apply(number) for number in range(listed.size())]


def decommissioned(spark: Any) -> list[str]:
    """The executors that still run and will be taken away."""
    scheduler = java_context(spark.sparkContext).sc().taskScheduler()
    ids = str(scheduler.executorsPendingDecommission().keySet().mkString(","))
    return ids.split(",") if ids else []


def decommission(spark: Any, host: str) -> None:
    """Let Spark start no more tasks on its executors of a host, which is named as Spark does."""
    java_context(spark.sparkContext).sc().schedulerBackend().decommissionExecutorsOnHost(host)


def stage_data(context: Any, stage: int) -> Any:
    """Raises Py4JError for a stage that Spark has not planned yet, or has forgotten."""
    return java_context(context).sc().statusStore().lastStageAttempt(stage)


def optimized_plan(frame: Any) -> Any:
    """With the session's current settings and caches."""
    return frame.select("*")._jdf.queryExecution().optimizedPlan()


def connect_relation(frame: Any) -> Any:
    return frame._plan.to_proto(frame.sparkSession.client).root


def explained(frame: Any) -> str:
    return str(frame._explain_string())


def _arrow_schema(schema: StructType) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema)


def _in_utc(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp("us", "UTC")
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_utc(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_utc(field.type)) for field in kind])
    return kind
