"""`bigdl.util.common`: tensors and samples, and the Spark context of a program."""

from __future__ import annotations

from typing import Any

from kindler.compat.bigdl.util.arrays import RNG, JTensor, Sample, set_seed
from kindler.compat.zoo import init_nncontext, init_spark_conf


class EvaluatedResult:
    """The result of one validation method: its value, the rows it was computed from, and its name."""

    def __init__(self, result: float, total_num: int, method: str) -> None:
        self.result, self.total_num, self.method = result, total_num, method

    def __repr__(self) -> str:
        return f"Evaluated result: {self.result}, total_num: {self.total_num}, method: {self.method}"


create_spark_conf = init_spark_conf


def get_spark_context(conf: Any = None) -> Any:
    """The running Spark context, or a new one on this machine."""
    return init_nncontext(conf)


def init_engine(*args: Any, **options: Any) -> None:
    """Nothing: workers are started when something is trained, and no Java gateway or log is needed for it."""


init_executor_gateway = redirect_spark_logs = redire_spark_logs = show_bigdl_info_logs = init_engine


def get_dtype(bigdl_type: str) -> str:
    """The dtype of arrays: "float32"."""
    return "float32"


def get_node_and_core_number(bigdl_type: str = "float") -> tuple[int, int]:
    """The nodes of the running Spark, and the cores of each."""
    context = get_spark_context()
    nodes = int(context.getConf().get("spark.executor.instances", "1"))
    return nodes, max(1, context.defaultParallelism // nodes)


def to_list(a: Any) -> list[Any]:
    """A list as it is, and anything else as a list of one."""
    return a if isinstance(a, list) else [a]


def to_sample_rdd(x: Any, y: Any, numSlices: int | None = None) -> Any:
    """An RDD of `Sample`s, in so many partitions, of features and labels, a row an element."""
    pairs = get_spark_context().parallelize(list(zip(x, y, strict=True)), numSlices)
    return pairs.map(lambda pair: Sample.from_ndarray(*pair))


__all__ = ["RNG", "EvaluatedResult", "JTensor", "Sample", "create_spark_conf", "get_dtype", "set_seed"]
__all__ += [
    "get_node_and_core_number",
    "get_spark_context",
    "init_engine",
    "init_executor_gateway",
    "to_list",
]
__all__ += ["redire_spark_logs", "redirect_spark_logs", "show_bigdl_info_logs", "to_sample_rdd"]
