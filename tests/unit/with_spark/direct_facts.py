"""Frames of every kind, to be read both ways: a frame that is accepted as a plain scan has its files' rows.

Used on a classic session and, in a program of its own, on Spark Connect.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kindler.data import parquet
from kindler.errors import ConfigError
from kindler.spark.direct import plain_parquet
from tests.whole import WHOLE

COLUMNS = "id AS x; id + 10 AS label"
LONG_AGO = datetime.date(1500, 3, 1)


@dataclass(frozen=True)
class Case:
    """A frame and what becomes of it.

    Attributes:
        frame: Makes it, given the session and an empty folder.
        names: The columns wanted.
        refused: Part of the reason why it is not a plain scan; None where it is one.
        connect: The same on Connect, where that differs.
        settings: What the session is set to meanwhile.
    """

    frame: Callable[[Any, str], Any]
    names: Sequence[str]
    refused: str | None = None
    connect: str | None = None
    settings: Sequence[tuple[str, str]] = ()


def reason(frame: Any, names: Sequence[str]) -> str | None:
    """Why the frame is refused; None after its rows were found to be those of its files."""
    try:
        scan = plain_parquet(frame, names, must=True)
    except ConfigError as exc:
        assert plain_parquet(frame, names) is None
        return str(exc).partition("; ")[2]
    assert scan is not None
    table = pa.Table.from_batches(list(parquet.scan(scan.files, names, 0, scan.files.rows)))
    quoted = ["`" + name.replace("`", "``") + "`" for name in names]
    expected = frame.select(*quoted).toArrow().rename_columns(list(names))
    assert rows(table) == rows(expected)
    return None


def rows(table: pa.Table) -> list[str]:
    """Rows as sorted text: NaN equals NaN, and an instant is its microseconds whatever its time zone."""
    columns = [_plain(table.column(i)).to_pylist() for i in range(table.num_columns)]
    return sorted(map(repr, zip(*columns, strict=True)))


def _plain(column: Any) -> Any:
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.int64())
    return column.cast(pa.int32()) if pa.types.is_date(column.type) else column


def written(spark: Any, folder: str, select: str = COLUMNS) -> str:
    """Ten rows in two files."""
    path = f"{folder}/t"
    spark.range(0, 10, 1, 2).selectExpr(*select.split(";")).write.parquet(path)
    return path


def by_arrow(folder: str, name: str = "t", **columns: Any) -> str:
    path = Path(folder, name)
    path.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path / f"{len(list(path.iterdir()))}.parquet")
    return str(path)


def scan(select: str = COLUMNS, **options: Any) -> Callable[[Any, str], Any]:
    def made(spark: Any, folder: str) -> Any:
        return spark.read.options(**options).parquet(written(spark, folder, select))

    return made


def over(change: Callable[[Any], Any], select: str = COLUMNS) -> Callable[[Any, str], Any]:
    return lambda spark, folder: change(scan(select)(spark, folder))


def partition_in_files_too(spark: Any, folder: str) -> Any:
    path = Path(folder, "t", "k=7")
    path.mkdir(parents=True)
    pq.write_table(pa.table({"x": [1, 2], "k": [1, 2]}), path / "a.parquet")
    return spark.read.parquet(str(path.parent))


def partitioned(spark: Any, folder: str) -> Any:
    spark.range(10).selectExpr("id AS x", "id % 2 AS k").write.partitionBy("k").parquet(f"{folder}/t")
    return spark.read.parquet(f"{folder}/t")


def twice(spark: Any, folder: str) -> Any:
    path = written(spark, folder)
    return spark.read.parquet(path, path)


def legacy_dates(spark: Any, folder: str) -> Any:
    spark.conf.set("spark.sql.parquet.datetimeRebaseModeInWrite", "LEGACY")
    try:
        spark.createDataFrame([(LONG_AGO,)], "x date").write.parquet(f"{folder}/t")
    finally:
        spark.conf.unset("spark.sql.parquet.datetimeRebaseModeInWrite")
    return spark.read.parquet(f"{folder}/t")


def old_instants(spark: Any, folder: str) -> Any:
    times = "timestamp'1500-03-01 01:02:03.000004' AS x; timestamp'2026-07-01 00:00:00' AS label"
    return spark.read.parquet(written(spark, folder, times))


def dates_of_others(spark: Any, folder: str) -> Any:
    return spark.read.parquet(by_arrow(folder, x=[LONG_AGO]))


def types_differ(spark: Any, folder: str) -> Any:
    for values in (pa.array([1, 2], pa.int32()), pa.array([2**40], pa.int64())):
        path = by_arrow(folder, x=values)
    return spark.read.schema("x long").parquet(path)


def one_file_lacks_it(spark: Any, folder: str) -> Any:
    by_arrow(folder, x=[1.0], y=[1.0])
    return spark.read.option("mergeSchema", "true").parquet(by_arrow(folder, y=[2.0]))


def names_differ_in_case(spark: Any, folder: str) -> Any:
    return spark.read.schema("x long").parquet(by_arrow(folder, x=[1], X=[2]))


def other_case(spark: Any, folder: str) -> Any:
    return spark.read.schema("X long").parquet(written(spark, folder))


def swapped(frame: Any) -> Any:
    from pyspark.sql import functions as F

    return frame.select(F.col("x").alias("label"), F.col("label").alias("x"))


def changed_meanwhile(spark: Any, folder: str) -> Any:
    path = by_arrow(folder, x=[1, 2, 3])
    frame = spark.read.parquet(path)
    pq.write_table(pa.table({"x": list(range(1000))}), Path(path, "0.parquet"))
    return frame


def cached_then_changed(spark: Any, folder: str) -> Any:
    path = by_arrow(folder, x=[1, 2, 3])
    frame = spark.read.parquet(path)
    plain_parquet(frame, ["x"], must=True)
    frame.cache().count()
    pq.write_table(pa.table({"x": [4, 5, 6]}), Path(path, "0.parquet"))
    return frame


def deleted(spark: Any, folder: str) -> Any:
    path = by_arrow(folder, x=[1, 2, 3])
    by_arrow(folder, x=[4])
    frame = spark.read.parquet(path)
    Path(path, "0.parquet").unlink()
    return frame


def sql_view(spark: Any, folder: str) -> Any:
    scan()(spark, folder).createOrReplaceTempView("direct_facts")
    return spark.sql("SELECT /*+ REPARTITION(3) */ label, x FROM direct_facts")


def of_arrow(**columns: Any) -> Callable[[Any, str], Any]:
    return lambda spark, folder: spark.read.parquet(by_arrow(folder, **columns))


def of_schema(schema: str, **columns: Any) -> Callable[[Any, str], Any]:
    return lambda spark, folder: spark.read.schema(schema).parquet(by_arrow(folder, **columns))


FLOATS = pa.array([[1.0, float("nan")], [2.0, -0.0]], pa.list_(pa.float32()))
KINDS = "; ".join(
    f"cast(id AS {kind}) AS {kind.partition('(')[0]}_"
    for kind in ("byte", "short", "int", "long", "float", "double", "decimal(10,2)", "boolean")
)

STRUCT = "id AS x; named_struct('label', id) AS meta; -1L AS label"

CASES = {
    "a plain scan": Case(scan(), ["x", "label"]),
    "chosen columns": Case(over(lambda f: f.select("label", "x")), ["x"]),
    "chosen twice": Case(over(lambda f: f.select("label", "x").select(f["x"])), ["x"]),
    "all numbers": Case(scan(KINDS), [part.split(" AS ")[2] for part in KINDS.split("; ")]),
    "arrays": Case(of_arrow(x=FLOATS), ["x"]),
    "fixed arrays": Case(of_arrow(x=FLOATS.cast(pa.list_(pa.float32(), 2))), ["x"]),
    "nested arrays": Case(scan("array(array(id, 1), array(2, 3)) AS x; id AS label"), ["x"]),
    "binary": Case(of_arrow(x=[b"ab", b"cd"]), ["x"]),
    "nulls": Case(of_arrow(x=pa.array([1, None])), ["x"]),
    "odd names": Case(
        of_arrow(**{"a.b": [1], "a`b": [2], "a b": [3], "ä#1": [4]}), ["a.b", "a`b", "a b", "ä#1"]
    ),
    "a folder with signs in its name": Case(
        lambda s, f: s.read.parquet(by_arrow(f, "t %20 +=ä#&", x=[1])), ["x"]
    ),
    "folders as other columns": Case(partitioned, ["x"]),
    "old instants": Case(old_instants, ["x", "label"]),
    "merged schemas": Case(lambda s, f: s.read.option("mergeSchema", "true").parquet(written(s, f)), ["x"]),
    "the schema of the files": Case(of_schema("x long", x=[1, 2]), ["x"]),
    "the same path twice": Case(twice, ["x"], connect="more than one path"),
    # What follows goes through Spark.
    "a column of folders": Case(partitioned, ["k"], "'k' is"),
    "a column of folders and files": Case(partition_in_files_too, ["k"], "'k' is taken from folder names"),
    "a field beside a column of its name": Case(
        over(lambda f: f.select("x", "meta.label"), STRUCT),
        ["label"],
        "computes columns",
    ),
    "renamed": Case(
        over(lambda f: f.withColumnRenamed("x", "y")), ["y"], "computes columns", "a step of kind"
    ),
    "swapped names": Case(over(swapped), ["x"], "computes columns"),
    "renamed by position": Case(
        over(lambda f: f.toDF("label", "x")), ["x"], "computes columns", "a step of kind"
    ),
    "two of one name": Case(over(lambda f: f.select("x", "x")), ["x"], "several columns called 'x'"),
    "two names that differ in case": Case(names_differ_in_case, ["x"], "several columns called 'x'"),
    "a name in another case": Case(other_case, ["X"], "'X' is not stored"),
    "computed": Case(over(lambda f: f.selectExpr("x + 1 AS x")), ["x"], "computes columns"),
    "the file's name": Case(
        over(lambda f: f.select("x", "_metadata.file_size")), ["file_size"], "computes columns"
    ),
    "filtered": Case(over(lambda f: f.where("x > 2")), ["x"], "a step of kind"),
    "limited": Case(over(lambda f: f.limit(3)), ["x"], "a step of kind"),
    "sampled": Case(over(lambda f: f.sample(0.5, 1)), ["x"], "a step of kind"),
    "distinct": Case(over(lambda f: f.distinct()), ["x"], "a step of kind"),
    "a union with itself": Case(over(lambda f: f.union(f)), ["x"], "a step of kind"),
    "repartitioned in SQL": Case(sql_view, ["x"], "a step of kind"),
    "cached": Case(cached_then_changed, ["x"], "InMemoryRelation", "InMemoryTableScan"),
    "a wider type": Case(of_schema("x long", x=pa.array([1], pa.int32())), ["x"], "int64 in the frame"),
    "a wider type in one file": Case(types_differ, ["x"], "int64 in the frame and int32"),
    "unsigned integers": Case(
        of_arrow(x=pa.array([2**31], pa.uint32())), ["x"], "int64 in the frame and uint32"
    ),
    "another scale": Case(
        of_schema("x decimal(12,4)", x=pa.array([1], pa.decimal128(10, 2))), ["x"], "decimal128(12, 4)"
    ),
    "instants read as local times": Case(
        of_schema("x timestamp_ntz", x=pa.array([1], pa.timestamp("us", "UTC"))), ["x"], "timestamp[us] in"
    ),
    "a column that one file lacks": Case(one_file_lacks_it, ["x"], "'x' is not stored"),
    "a column that no file has": Case(of_schema("x long, y long", x=[1]), ["y"], "'y' is not stored"),
    "dates of the old calendar": Case(legacy_dates, ["x"], "the calendar from before 1582"),
    "dates of another writer": Case(dates_of_others, ["x"], "the calendar from before 1582"),
    "a mode for dates": Case(scan(datetimeRebaseMode="LEGACY"), ["x"], "options ['datetimerebasemode']"),
    "files that may be missing": Case(
        scan(ignoreMissingFiles="true"), ["x"], "options ['ignoremissingfiles']"
    ),
    "files that may be corrupt": Case(
        scan(), ["x"], "ignoreCorruptFiles=true", settings=[("spark.sql.files.ignoreCorruptFiles", "true")]
    ),
    "columns found by number": Case(
        scan(),
        ["x"],
        "fieldId.read.enabled=true",
        settings=[("spark.sql.parquet.fieldId.read.enabled", "true")],
    ),
    "a column called _metadata": Case(of_arrow(x=[1], _metadata=[2]), ["x"], "a column with a reserved name"),
}

# Decided by the footers of files, or by the kind of a step as others are: the same code for every session.
_ALIKE = {
    *("arrays", "fixed arrays", "nested arrays", "binary", "nulls", "old instants", "merged schemas"),
    *("the schema of the files", "a wider type", "a wider type in one file", "unsigned integers"),
    *("another scale", "instants read as local times", "a column that one file lacks"),
    *("a column that no file has", "dates of the old calendar", "dates of another writer"),
    *("two names that differ in case", "sampled", "distinct", "a union with itself"),
}
ON_CONNECT = [name for name in CASES if WHOLE or name not in _ALIKE]

CLASSIC = {  # Connect looks for files anew whenever the frame is computed
    "a file that has gone": Case(deleted, ["x"], "cannot be read from this process"),
    "a file that has grown": Case(changed_meanwhile, ["x"], "has changed since the DataFrame was created"),
}


def outcome(spark: Any, case: Case, folder: str) -> str | None:
    for key, value in case.settings:
        spark.conf.set(key, value)
    try:
        return reason(case.frame(spark, folder), case.names)
    finally:
        spark.catalog.clearCache()
        for key, _ in case.settings:
            spark.conf.unset(key)
