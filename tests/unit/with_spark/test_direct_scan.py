"""A frame is read from its files only where that gives the rows of the frame."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from kindler.data import parquet
from kindler.errors import DataError
from kindler.estimator.inputs.local import opener
from kindler.spark.direct import plain_parquet
from tests.unit.with_spark.direct_facts import CASES, CLASSIC, outcome, reason
from tests.whole import WHOLE

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("name", [*CASES, *CLASSIC])
def test_a_frame_that_is_more_than_its_files_is_refused(tmp_path: Path, spark: Any, name: str) -> None:
    case = {**CASES, **CLASSIC}[name]

    found = outcome(spark, case, str(tmp_path))

    assert (found is None) == (case.refused is None)
    assert (case.refused or "") in (found or "")


TYPES = {
    "long": pa.int64(),
    "int": pa.int32(),
    "short": pa.int16(),
    "double": pa.float64(),
    "float": pa.float32(),
    "boolean": pa.bool_(),
    "array<float>": pa.list_(pa.float32()),
    "array<long>": pa.list_(pa.int64()),
}


NAMES = ["x", "X", "y", "a.b", "a b", "k"]


NUMBERS = st.lists(st.sampled_from([0, 1, 7, None]), min_size=1, max_size=4)


STEPS: dict[str, Callable[[Any], Any]] = {
    "reversed": lambda f: f.select(*[F.col(f"`{name}`") for name in reversed(f.columns)]),
    "fewer": lambda f: f.select(*[F.col(f"`{name}`") for name in f.columns[:2]]),
    "renamed": lambda f: f.toDF(*f.columns[1:], f.columns[0]),
    "aliased": lambda f: f.alias("other").select("other.*"),
    "kept": lambda f: f.where(F.lit(True)),
    "filtered": lambda f: f.where(F.col(f"`{f.columns[0]}`").isNotNull()),
    "limited": lambda f: f.limit(3),
    "doubled": lambda f: f.union(f),
    "computed": lambda f: f.withColumn(f.columns[0], F.lit(5)),
    "cast": lambda f: f.withColumn(f.columns[0], F.col(f"`{f.columns[0]}`").cast("string").cast("long")),
    "distinct": lambda f: f.dropDuplicates(),
    "hinted": lambda f: f.hint("broadcast"),
}


@st.composite
def files(draw: st.DrawFn) -> list[pa.Table]:
    """Tables that may differ in the types of their columns, in their order, and in which they have."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    first = {name: draw(st.sampled_from(list(TYPES))) for name in names}
    made = []
    for _ in range(draw(st.integers(1, 3))):
        here = dict(first)
        if made and draw(st.integers(0, 3)) == 0:
            here[names[0]] = draw(st.sampled_from(list(TYPES)))
        if made and draw(st.integers(0, 3)) == 0:
            here.pop(names[-1])
        values = draw(NUMBERS)
        columns = {
            name: [_value(TYPES[kind], v) for v in values]
            for name, kind in draw(st.permutations(list(here.items())))
        }
        made.append(pa.table({name: pa.array(c, TYPES[here[name]]) for name, c in columns.items()}))
    return [table for table in made if table.num_columns] or [made[0]]


def _value(kind: pa.DataType, number: int | None) -> Any:
    if number is None or pa.types.is_boolean(kind):
        return None if number is None else bool(number)
    return [number, 1] if pa.types.is_list(kind) else number


@settings(
    max_examples=30 if WHOLE else 12,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    tables=files(),
    folder=st.sampled_from(["", "", "k=3", "X=1"]),
    steps=st.lists(st.sampled_from(list(STEPS)), max_size=2),
    merge=st.booleans(),
    schema=st.sampled_from([None, None, "x long, y double", "X long, x int", "k long, y float"]),
    again=st.integers(0, 4),
)
def test_whatever_is_read_from_files_is_what_spark_reads(
    tmp_path_factory: pytest.TempPathFactory,
    spark: Any,
    tables: list[pa.Table],
    folder: str,
    steps: list[str],
    merge: bool,
    schema: str | None,
    again: int,
) -> None:
    root = tmp_path_factory.mktemp("table")
    Path(root, folder).mkdir(exist_ok=True)
    for number, table in enumerate(tables):
        pq.write_table(table, Path(root, folder, f"{number}.parquet"))
    reader = spark.read.option("mergeSchema", str(merge).lower())
    try:
        frame = (reader.schema(schema) if schema else reader).parquet(*[str(root)] * (2 if again == 0 else 1))
        for step in steps:
            frame = STEPS[step](frame)
        names = list(dict.fromkeys(frame.columns))
    except PySparkException:
        return  # no frame at all: ambiguous names, types that do not merge

    for name in names:
        event("from files" if reason(frame, [name]) is None else "through Spark")


def many_files(folder: Path, count: int = 300) -> str:
    folder.mkdir()
    for number in range(count):
        pq.write_table(pa.table({"x": [float(number)], "y": [number]}), folder / f"part-{number:03}.parquet")
    return str(folder)


def test_footers_of_many_files_are_read_by_tasks_of_spark(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(file: str) -> None:
        raise AssertionError(f"the driver opened {file}")

    folder = many_files(tmp_path / "many")
    monkeypatch.setattr(parquet, "_open", opened)

    scan = plain_parquet(spark.read.parquet(folder), ["x"], must=True)
    named = parquet.inspect(folder, opener(spark))

    assert scan is not None
    assert scan.files.rows == named.rows == 300
    assert named.files == tuple(f"{folder}/part-{number:03}.parquet" for number in range(300))
    assert named.row_groups == ((1,),) * 300
    assert len({id(schema) for schema in named.schemas}) == 1


def test_one_of_many_files_that_is_not_parquet_is_named(tmp_path: Path, spark: Any) -> None:
    folder = many_files(tmp_path / "many")
    Path(folder, "part-123.parquet").write_bytes(b"no footer here")

    with pytest.raises(DataError, match=r"part-123\.parquet is not a Parquet file"):
        parquet.inspect(folder, opener(spark))
