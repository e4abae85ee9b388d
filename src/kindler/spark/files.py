"""Work on files that Spark can see: by the driver, or by tasks where there are many or it may see none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import cloudpickle
import pyarrow as pa
from pyspark.sql import SparkSession

from kindler.data.parquet import each_here
from kindler.spark.sent_tasks import sent_task
from kindler.spark.session import is_connect
from kindler.spark.slots import slots
from kindler.spark.versions import to_arrow

_Result = TypeVar("_Result")
_ANSWERS = "number bigint, answer binary"
_FEW = 256  # as many are opened by the driver before tasks would have started


def at_files(spark: SparkSession, call: Callable[[], _Result]) -> _Result:
    """Call where the files are: here, or in a task if this is only a client, which may not see them."""
    return _in_tasks(spark, lambda _: call(), [""])[0] if is_connect(spark) else call()


def each_file(spark: SparkSession, call: Callable[[str], _Result], files: Sequence[str]) -> list[_Result]:
    """`call(file)` for each file, in order: here for a few of them, in tasks of Spark for many."""
    return _in_tasks(spark, call, files) if len(files) > _FEW else each_here(call, files)


def _in_tasks(spark: SparkSession, call: Callable[[str], _Result], files: Sequence[str]) -> list[_Result]:
    def outcome(file: str) -> bytes:
        try:
            ended: tuple[_Result | None, Exception | None] = (call(file), None)
        except Exception as error:  # noqa: BLE001  # raised again by the driver
            ended = (None, error)
        return bytes(cloudpickle.dumps(ended))

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            own = [files[number] for number in batch.column(0).to_pylist()]
            answers = pa.array(each_here(outcome, own), pa.binary())
            yield pa.RecordBatch.from_arrays([batch.column(0), answers], ["number", "answer"])

    parts = min(len(files), slots(spark))
    table = to_arrow(
        spark.range(0, len(files), 1, parts).mapInArrow(sent_task(task), "number bigint, answer binary")
    )
    results = []
    for answer in table.sort_by("number").column("answer"):
        result, error = cloudpickle.loads(answer.as_py())
        if error is not None:
            raise error
        results.append(result)
    return results
