"""Delta tables beside Spark: the same rows, the same bits on both engines, and what only Spark can read."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kindler import Columns, Estimator, Table
from kindler.errors import ConfigError
from tests import exact
from tests.unit.data.lake import (
    additions,
    collected,
    commit,
    s3_server,
    shown,
    uploaded,
    with_deletion_vector,
)

deltalake = pytest.importorskip("deltalake")

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]

_ADD = "path string, partitionValues map<string, string>"
_ACTIONS = (
    f"add struct<{_ADD}>, remove struct<path string>,"
    " metaData struct<schemaString string, partitionColumns array<string>>"
)


def table(first: int, last: int) -> pa.Table:
    numbers = np.arange(first, last)
    days = pa.array([f"2026-01-{1 + n % 2:02}" for n in numbers]).cast(pa.date32())
    words = pa.array([[None, "a b", "ü/="][n % 3] for n in numbers])
    return pa.table({"n": numbers, "x": np.sin(numbers), "k": words, "day": days})


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[int]]:
    """A partitioned table whose versions delete rows, add a column and have a deletion vector; with the file
    and the position that its last version deletes."""
    place = tmp_path_factory.mktemp("delta")
    deltalake.write_deltalake(str(place), table(0, 24), partition_by=["k", "day"])
    deltalake.DeltaTable(str(place)).delete("n = 7 OR n = 12")
    wider = table(24, 40).append_column("z", pa.array(np.arange(16) / 4))
    deltalake.write_deltalake(str(place), wider, mode="append", schema_mode="merge")
    added = next(one for one in additions(place / "_delta_log", 2) if one["partitionValues"]["k"] == "a b")
    commit(place / "_delta_log", 3, with_deletion_vector(added, [1]))
    return place, Path(added["path"]).name, [1]


def of_the_log(spark: Any, place: Path, version: int, deleted: tuple[str, list[int]]) -> list[str]:
    """The rows as Spark computes them from the log, without a reader of Delta."""
    commits = [str(place / f"_delta_log/{number:020}.json") for number in range(version + 1)]
    actions = spark.read.schema(_ACTIONS).json(commits).select("*", "_metadata.file_name")
    removed = actions.where("remove IS NOT NULL").groupBy("remove.path").agg(F.max("file_name").alias("gone"))
    added = (
        actions.where("add IS NOT NULL")
        .groupBy("add.path")
        .agg(F.max("file_name").alias("since"), F.max_by("add.partitionValues", "file_name").alias("values"))
    )
    live = added.join(removed, "path", "left").where("gone IS NULL OR gone <= since")
    live = live.select("values", F.regexp_extract("path", "[^/]+$", 0).alias("file"))
    changes = actions.where("metaData IS NOT NULL").agg(F.max_by("metaData", "file_name").alias("newest"))
    newest = changes.first().newest
    schema = StructType.fromJson(json.loads(newest.schemaString))
    stored = StructType([field for field in schema if field.name not in newest.partitionColumns])
    files = spark.read.schema(stored).option("recursiveFileLookup", True).parquet(str(place))
    file, positions = deleted
    values = [
        F.col("values")[field.name].cast(field.dataType).alias(field.name)
        if field.name in newest.partitionColumns
        else field.name
        for field in schema
    ]
    rows = files.select(
        "*", F.col("_metadata.file_name").alias("file"), F.col("_metadata.row_index").alias("row")
    )
    kept = rows.where((F.col("file") != file) | ~F.col("row").isin(positions))
    found = kept.join(live, "file").select(*values)
    return shown(row.asDict() for row in found.collect())


def test_versions_of_a_delta_table_have_the_rows_that_spark_computes_from_its_log(
    spark: Any, delta: tuple[Path, str, list[int]]
) -> None:
    place, file, deleted = delta
    counts = []
    with s3_server("lake") as address:
        uploaded(place, "lake/delta", address)
        options = {
            "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key",
        }  # fmt: skip
        for version in range(4):
            expected = of_the_log(spark, place, version, (file, deleted if version == 3 else []))
            assert collected(Table(place, version=version)) == expected
            stored = Table("s3://lake/delta", format="delta", version=version, options=options)
            assert collected(stored) == expected
            counts.append(len(expected))
    assert counts == [24, 22, 38, 37]


def trained(data: Any, **options: Any) -> Estimator:
    torch.manual_seed(0)
    made = Estimator.from_torch(
        model=torch.nn.Linear(2, 1),
        optimizer=functools.partial(torch.optim.SGD, lr=1e-10),
        loss=torch.nn.MSELoss(),
        workers=2,
        **options,
    )
    columns = Columns(stack_features=True)
    made.fit(data, 2, 8, feature_cols=["n", "day"], label_cols="x", columns=columns, verbose=0)
    return made


def assert_same(one: Estimator, other: Estimator) -> None:
    for ours, theirs in zip(exact.weights(one), exact.weights(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_version_trains_to_the_same_bits_on_both_engines(
    spark: Any, delta: tuple[Path, str, list[int]]
) -> None:
    chosen = Table(delta[0], version=3)
    assert_same(trained(chosen, engine="local"), trained(chosen, engine="spark"))


class OwnDelta(DataSource):
    """A source "delta" of the session, as Delta's jars would bring it."""

    @classmethod
    def name(cls) -> str:
        return "delta"

    def schema(self) -> StructType:
        return from_arrow_schema(pa.schema(opened(self.options).schema().to_arrow()))

    def reader(self, schema: StructType) -> DataSourceReader:
        return Rows(dict(self.options))


class Rows(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self.options = options

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(0), InputPartition(1)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        rows = pa.RecordBatchReader.from_stream(opened(self.options).scan()).read_all().sort_by("n")
        half = len(rows) // 2
        part = rows.slice(0, half) if partition.value == 0 else rows.slice(half)
        yield from part.to_batches()


def opened(options: Any) -> Any:
    chosen = {name.lower(): value for name, value in options.items()}
    return deltalake.DeltaTable(chosen["path"], version=int(chosen["versionasof"]))


def test_what_kindler_cannot_read_itself_goes_through_the_reader_of_the_session_at_the_same_version(
    spark: Any, tmp_path: Path
) -> None:
    place = tmp_path / "table"
    deltalake.write_deltalake(str(place), table(0, 30).drop_columns(["k"]))
    known = Table(place, version=0)
    feature = {"readerFeatures": ["variantType"], "writerFeatures": ["variantType"]}
    commit(place / "_delta_log", 1, [{"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **feature}}])
    with pytest.raises(ConfigError, match=r"(?s)with variantType.*Spark cannot .*: delta\b.*\nHint: read"):
        trained(Table(place))

    spark.dataSource.register(OwnDelta)
    through_spark = trained(str(place))
    assert_same(through_spark, trained(spark.read.format("delta").option("versionAsOf", 1).load(str(place))))
    data = through_spark.lineage[-1]["data"]
    assert data["tables"] == [{"format": "delta", "uri": str(place), "version": 1}]
    assert (data["kind"], through_spark.lineage[-1]["engine"]) == ("table", "spark")
    assert through_spark.predict(Table(place)).count() == 30
    assert trained(known).lineage[-1]["engine"] == "local"  # what needs no Spark goes without it
    with pytest.raises(ConfigError, match=r"(?s)with variantType.*not what was added since"):
        trained(Table(place, since=0))
