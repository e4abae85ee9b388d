"""TFRecord files of DataFrames: written and read by the tasks, row for row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kindler import tfrecord
from kindler.errors import ConfigError, DataError

pytestmark = pytest.mark.spark


def test_a_frame_is_written_one_file_a_partition_and_scanned_in_order(spark: Any, tmp_path: Path) -> None:
    rows = 5_000
    table = pa.table(
        {
            "id": np.arange(rows),
            "flag": np.arange(rows) % 3 == 0,
            "v": list(np.random.default_rng(0).random((rows, 4), np.float32)),
            "s": pa.array([None if i % 5 == 0 else f"é{i}" for i in range(rows)]),
            "raw": pa.array([bytes([i % 256, 255]) for i in range(rows)]),
            "many": [[f"w{k}" for k in range(i % 4)] for i in range(rows)],
            "a.b": np.arange(rows) * 0.5,
        }
    )
    frame = spark.createDataFrame(table).repartitionByRange(5, "id")
    path = tmp_path / "rows"

    wrote = tfrecord.write(frame, path)
    back = tfrecord.scan(spark, path, schema=table.schema)

    assert wrote == [str(path / f"part-0000{i}.tfrecord") for i in range(5)]
    assert sorted(p.name for p in path.iterdir()) == ["_SUCCESS", *(Path(file).name for file in wrote)]
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]
    # No list is empty that was not: with the schema given, rows are the same one by one.
    assert back.toArrow().to_pylist() == table.to_pylist()
    assert tfrecord.read(path, schema=table.schema).to_pylist() == table.to_pylist()


def test_scan_infers_reads_gzip_and_takes_only_what_is_asked(spark: Any, tmp_path: Path) -> None:
    data = {"x": np.arange(100), "y": np.ones((100, 2, 3), np.float32), "z": np.arange(100) * 0.5}
    tfrecord.write(data, tmp_path / "rows", rows_per_file=30, compression="gzip")

    found = tfrecord.scan(spark, tmp_path / "rows")
    shaped = tfrecord.scan(spark, tmp_path / "rows", schema={"y": ("float32", (2, 3)), "x": "int32"})

    assert found.schema.simpleString() == "struct<x:bigint,y:array<float>,z:float>"
    assert shaped.schema.simpleString() == "struct<y:array<float>,x:int>"
    assert [row.x for row in found.collect()] == list(range(100))
    assert shaped.filter("x > 89").count() == 10
    assert tfrecord.scan(spark, tmp_path / "rows", columns=["z"]).columns == ["z"]
    assert found.rdd.getNumPartitions() == 4


def test_empty_partitions_write_no_file_and_lose_no_row(
    partitioned: Callable[..., Any], spark: Any, tmp_path: Path
) -> None:
    frame = partitioned([[], [(1,), (2,)], [], [(3,)], []], "x long")

    wrote = tfrecord.write(frame, tmp_path / "rows", compression="gzip")

    assert [Path(file).name for file in wrote] == ["part-00001.tfrecord.gz", "part-00003.tfrecord.gz"]
    assert [row.x for row in tfrecord.scan(spark, tmp_path / "rows").collect()] == [1, 2, 3]


def test_a_frame_without_rows_is_a_folder_without_files(spark: Any, tmp_path: Path) -> None:
    assert tfrecord.write(spark.range(0), tmp_path / "rows") == []
    assert [p.name for p in (tmp_path / "rows").iterdir()] == ["_SUCCESS"]


def test_what_is_there_is_replaced_only_when_asked(spark: Any, tmp_path: Path) -> None:
    tfrecord.write(spark.range(5), tmp_path / "rows")
    with pytest.raises(ConfigError, match="already exists(.|\n)*overwrite=True"):
        tfrecord.write(spark.range(9), tmp_path / "rows")
    assert tfrecord.read(tmp_path / "rows").num_rows == 5

    tfrecord.write(spark.range(9), tmp_path / "rows", overwrite=True)
    assert tfrecord.read(tmp_path / "rows").num_rows == 9
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]


def test_a_bad_value_is_named_by_partition_and_row_and_leaves_nothing(
    partitioned: Callable[..., Any], tmp_path: Path
) -> None:
    frame = partitioned([[([1, 2],)], [([3],), ([4, None],)]], "x array<long>")
    with pytest.raises(DataError) as caught:
        tfrecord.write(frame, tmp_path / "rows")
    assert (caught.value.column, caught.value.row) == ("x", "1 of partition 1")
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_fails_leaves_nothing_and_what_was_there_before(spark: Any, tmp_path: Path) -> None:
    from pyspark.sql import functions as F

    tfrecord.write(spark.range(5), tmp_path / "rows")
    failing = spark.range(100).withColumn(
        "y", F.when(F.col("id") == 99, F.raise_error(F.lit("no"))).otherwise(1)
    )
    with pytest.raises(Exception, match="no"):
        tfrecord.write(failing.select("id", F.col("y").cast("long")), tmp_path / "rows", overwrite=True)
    assert tfrecord.read(tmp_path / "rows").num_rows == 5
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]


def test_types_without_a_place_are_refused_before_anything_starts(spark: Any, tmp_path: Path) -> None:
    frame = spark.sql("select 1 as fine, timestamp'2020-01-01' as t, cast(1 as decimal(5, 2)) as d")
    with pytest.raises(DataError, match="column 't'(.|\n)*cast it to an integer"):
        tfrecord.write(frame, tmp_path / "rows")
    with pytest.raises(DataError, match="column 'd'(.|\n)*cast it to a float"):
        tfrecord.write(frame.drop("t"), tmp_path / "rows")
    assert tfrecord.write(frame, tmp_path / "rows", columns=["fine"]) == [
        str(tmp_path / "rows" / "part-00000.tfrecord")
    ]


def test_a_damaged_file_is_named_when_the_frame_is_computed(spark: Any, tmp_path: Path) -> None:
    (file,) = tfrecord.write({"x": np.arange(2000)}, tmp_path / "rows.tfrecord")
    content = bytearray(Path(file).read_bytes())
    content[-10] ^= 1
    Path(file).write_bytes(content)
    frame = tfrecord.scan(spark, file, schema={"x": "int64"})
    with pytest.raises(Exception, match=f"record 1999 of {file}"):
        frame.collect()
