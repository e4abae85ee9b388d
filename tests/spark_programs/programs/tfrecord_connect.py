"""Write and scan TFRecord files through Spark Connect; prints what was seen as one line of JSON."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pyarrow as pa

import kindler
from kindler import tfrecord
from kindler.errors import ConfigError, DataError


def main(folder: str) -> None:
    spark = kindler.init(cores=2, conf={"spark.api.mode": "connect"})
    rows = 1_000
    table = pa.table(
        {"id": np.arange(rows), "v": list(np.ones((rows, 3), np.float32)), "s": [str(i) for i in range(rows)]}
    )
    frame = spark.createDataFrame(table).repartitionByRange(3, "id")
    path = os.path.join(folder, "rows")
    wrote = tfrecord.write(frame, path)
    back = tfrecord.scan(spark, path)
    seen = {
        "files": [os.path.basename(file) for file in wrote],
        "inside": sorted(os.listdir(path)),
        "same": back.toArrow().select(table.column_names).to_pylist() == table.to_pylist(),
        "count": tfrecord.scan(spark, os.path.relpath(path), columns=["s"]).count(),
    }
    try:
        tfrecord.write(frame, path)
    except ConfigError as error:
        seen["refused"] = str(error)
    try:
        tfrecord.write(spark.sql("select array(1, null) as bad"), os.path.join(folder, "bad"))
    except DataError as error:
        seen["bad"] = [error.column, error.row]
    try:
        tfrecord.scan(spark, os.path.join(folder, "none"))
    except ConfigError as error:
        seen["none"] = str(error)
    seen["left"] = sorted(os.listdir(folder))
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
