"""Iceberg tables that Spark writes, and their rows at every snapshot as Spark's own reader has them, as JSON.

`python iceberg_tables.py FOLDER JAR...` writes a table in FOLDER, one with deletion vectors, one whose files
are not Parquet, and one at s3://lake/, which Spark sees as a folder.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch

import kindler
from kindler import Columns, Estimator, Table

FOLDER, *JARS = sys.argv[1:]
STACKED = Columns(stack_features=True)
CATALOG = "org.apache.iceberg.spark.SparkCatalog"
CONF = {
    "spark.driver.extraClassPath": ":".join(JARS),
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    **{f"spark.sql.catalog.{name}": CATALOG for name in ("here", "s3")},
    **{f"spark.sql.catalog.{name}.type": "hadoop" for name in ("here", "s3")},
    "spark.sql.catalog.here.warehouse": f"{FOLDER}/here",
    "spark.sql.catalog.s3.warehouse": "s3://lake/iceberg",
    # A folder of this machine under the addresses of an object store.
    "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme",
    "spark.hadoop.fs.viewfs.overload.scheme.target.s3.impl": "org.apache.hadoop.fs.LocalFileSystem",
    "spark.hadoop.fs.viewfs.mounttable.lake.link./iceberg": f"file://{FOLDER}/lake/iceberg",
}
FIRST = """
    INSERT INTO {t}
    SELECT CAST(id AS float) / 8, CONCAT('k ', id % 3), CAST(id AS int), DATE '2026-01-01' FROM RANGE(0, 24)
"""
LATER = """
    INSERT INTO {t}
    SELECT id / 4, IF(id % 5 = 0, NULL, CONCAT('k ', id % 3)), id,
        DATE_ADD(DATE '2026-01-01', CAST(id % 2 AS int)), IF(id % 2 = 0, NULL, id / 2)
    FROM RANGE(24, 40)
"""
CHANGES = (
    FIRST,
    "DELETE FROM {t} WHERE n IN (3, 4, 11)",
    "ALTER TABLE {t} RENAME COLUMN x TO speed",
    "ALTER TABLE {t} ALTER COLUMN speed TYPE double",
    "ALTER TABLE {t} ALTER COLUMN n TYPE bigint",
    "ALTER TABLE {t} ADD COLUMN z double",
    "ALTER TABLE {t} ADD PARTITION FIELD day",
    LATER,
    "DELETE FROM {t} WHERE n IN (5, 25) OR z > 18",
    "UPDATE {t} SET z = -1 WHERE n = 1",
)


def written(spark: Any, name: str, *changes: str, version: int = 2, file: str = "parquet") -> list[Any]:
    """Each snapshot with its rows."""
    modes = ", ".join(f"'write.{kind}.mode' = 'merge-on-read'" for kind in ("delete", "update", "merge"))
    spark.sql(
        f"CREATE TABLE {name} (x float, k string, n int, day date) USING iceberg PARTITIONED BY (k)"
        f" TBLPROPERTIES ('format-version' = '{version}', 'write.format.default' = '{file}', {modes})"
    )
    for change in changes:
        spark.sql(change.format(t=name))
    snapshots = spark.sql(f"SELECT snapshot_id FROM {name}.snapshots ORDER BY committed_at").collect()
    return [[number, rows(spark, name, number)] for (number,) in snapshots]


def rows(spark: Any, name: str, snapshot: int) -> list[Any]:
    frame = spark.read.format("iceberg").option("snapshot-id", snapshot).load(name)
    return [json.loads(row) for row in frame.toJSON().collect()]


def trained(data: Any) -> tuple[list[float], Any]:
    """The weights, and what was recorded of the data."""
    torch.manual_seed(0)
    estimator = Estimator.from_torch(
        model=torch.nn.Linear(1, 1),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        loss=torch.nn.MSELoss(),
        workers=1,
    )
    estimator.fit(data, feature_cols="x", label_cols="n", columns=STACKED, batch_size=8, verbose=0)
    return [p.item() for p in estimator.get_model().parameters()], estimator.lineage[-1]["data"]


if __name__ == "__main__":
    Path(FOLDER, "lake/iceberg").mkdir(parents=True)
    spark = kindler.init(cores=1, conf=CONF)
    seen: dict[str, Any] = {
        "here": written(spark, "here.n.t", *CHANGES),
        "s3": written(spark, "s3.n.t", *CHANGES),
    }
    seen["vectors"] = written(spark, "here.n.v", *CHANGES, version=3)
    ((number, _),) = written(spark, "here.n.orc", FIRST, file="orc")
    frame = spark.read.format("iceberg").option("snapshot-id", number).load("here.n.orc")
    weights, data = trained(Table(f"{FOLDER}/here/n/orc"))
    seen["orc"] = {"snapshot": number, "tables": data["tables"], "equal": weights == trained(frame)[0]}
    sys.stdout.write(json.dumps(seen))
