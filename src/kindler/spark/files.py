"""Work on files that Spark can see: by the driver on a classic session, by a task for a client of Connect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pyarrow as pa
from pyspark.sql import SparkSession

from kindler.errors import KindlerError
from kindler.spark.session import is_connect

__all__ = ["at_files"]


def at_files(spark: SparkSession, call: Callable[[], Any]) -> Any:
    """Call where the files are: here, or in a task if this is only a client, which may not see them."""
    if not is_connect(spark):
        return call()

    def task(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in rows:
            try:
                result: tuple[Any, KindlerError | None] = (call(), None)
            except KindlerError as error:
                result = (None, error)
            yield pa.RecordBatch.from_arrays([pa.array([cloudpickle.dumps(result)], pa.binary())], ["result"])

    answer = spark.range(0, 1, 1, 1).mapInArrow(task, "result binary").toArrow()
    value, error = cloudpickle.loads(answer.column(0)[0].as_py())
    if error is not None:
        raise error
    return value
