"""Which Spark DataFrames are provably nothing but the Parquet files behind them.

Works on classic and Spark Connect frames alike; the JVM gateway is used only to look at a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from kindler.data import parquet
from kindler.errors import ConfigError, KindlerError
from kindler.spark.frames import arrow_types
from kindler.spark.session import is_connect

__all__ = ["plain_parquet"]


def plain_parquet(
    frame: DataFrame, names: Sequence[str], *, must: bool = False
) -> parquet.ParquetFiles | None:
    """The files behind a frame that is provably nothing but a scan of them, or None.

    Args:
        frame: Any DataFrame.
        names: The columns that are wanted from it.
        must: Raise ConfigError with the reason instead of returning None.
    """
    try:
        return _inspect(frame, names)
    except _NotPlain as reason:
        if must:
            raise ConfigError(
                "ingest='direct' needs a frame that is a plain Parquet scan with at most a choice of columns;"
                f" {reason}.\nHint: ingest='auto' or 'inline' takes any frame."
            ) from None
        return None


class _NotPlain(Exception):
    """Why a frame is not a plain scan."""


def _inspect(frame: DataFrame, names: Sequence[str]) -> parquet.ParquetFiles:
    spark = frame.sparkSession
    if frame.isStreaming:
        raise _NotPlain("it is a stream")
    if is_connect(spark):
        _check_connect_plan(frame, spark)
    else:
        _check_classic_plan(frame)
    try:
        files = parquet.inspect(frame.inputFiles())
        schema = parquet.schema(files)
    except (OSError, KindlerError) as exc:
        raise _NotPlain(f"its files cannot be read from here ({exc})") from None
    types = arrow_types(frame)
    for name in names:
        if name not in schema.names:
            raise _NotPlain(f"column {name!r} is not stored in its files")
        _check_type(name, types[name], schema.field(name).type)
    return files


def _check_classic_plan(frame: Any) -> None:
    plan = frame._jdf.queryExecution().optimizedPlan()
    while _class(plan) == "Project":
        expressions = plan.projectList()
        kinds = {_class(expressions.apply(i)) for i in range(expressions.size())}
        if kinds != {"AttributeReference"}:
            raise _NotPlain("it computes columns")
        plan = plan.children().head()
    if _class(plan) != "LogicalRelation" or _class(plan.relation()) != "HadoopFsRelation":
        raise _NotPlain(f"its plan has a step of kind {_class(plan)}")
    if _class(plan.relation().fileFormat()) != "ParquetFileFormat":
        raise _NotPlain(f"its files are read as {_class(plan.relation().fileFormat())}")


def _class(java_object: Any) -> str:
    return str(java_object.getClass().getSimpleName())


def _check_connect_plan(frame: Any, spark: Any) -> None:
    relation = frame._plan.to_proto(spark.client).root
    while (kind := relation.WhichOneof("rel_type")) == "project":
        if any(e.WhichOneof("expr_type") != "unresolved_attribute" for e in relation.project.expressions):
            raise _NotPlain("it computes columns")
        relation = relation.project.input
    if kind != "read" or relation.read.is_streaming or relation.read.WhichOneof("read_type") != "data_source":
        raise _NotPlain(f"its plan has a step of kind {kind}")
    if relation.read.data_source.format.lower() != "parquet" or relation.read.data_source.predicates:
        raise _NotPlain(f"its files are read as {relation.read.data_source.format}")


def _check_type(name: str, wanted: pa.DataType | None, stored: pa.DataType) -> None:
    """A frame may be read under another type than its files have; then Spark must do the reading."""
    if wanted is None or _leaf(wanted) != _leaf(stored):
        raise _NotPlain(f"column {name!r} is {wanted} in the frame and {stored} in its files")


def _leaf(kind: Any) -> tuple[int, str]:
    """How deep the lists go and what is in them, without the names and nullability on the way."""
    depth = 0
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        depth, kind = depth + 1, kind.value_type
    for family in ("timestamp", "decimal", "struct", "string", "binary"):
        if getattr(pa.types, f"is_{family}")(kind):
            return depth, family
    return depth, str(kind)
