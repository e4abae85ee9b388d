"""`bigdl.util.common`: tensors and samples, and the Spark context of a program."""

from __future__ import annotations

from typing import Any

from kindler.compat.bigdl.util.arrays import JTensor, Sample
from kindler.compat.bigdl.util.rng import RNG, set_seed
from kindler.compat.zoo.common.nncontext import init_nncontext, init_spark_conf

__all__ = [
    "RNG",
    "EvaluatedResult",
    "JTensor",
    "Sample",
    "create_spark_conf",
    "get_dtype",
    "get_node_and_core_number",
    "get_spark_context",
    "init_engine",
    "init_executor_gateway",
    "redire_spark_logs",
    "redirect_spark_logs",
    "set_seed",
    "show_bigdl_info_logs",
    "to_list",
    "to_sample_rdd",
]


class EvaluatedResult:
    """The result of one validation method.

    Attributes:
        result: The value.
        total_num: The rows that it was computed from.
        method: The name of the method.
    """

    def __init__(self, result: float, total_num: int, method: str) -> None:
        self.result, self.total_num, self.method = result, total_num, method

    def __repr__(self) -> str:
        return f"Evaluated result: {self.result}, total_num: {self.total_num}, method: {self.method}"


def create_spark_conf() -> Any:
    """A `SparkConf` for `get_spark_context`; Kindler needs no settings of its own in it."""
    return init_spark_conf()


def get_spark_context(conf: Any = None) -> Any:
    """The running Spark context, or a new one on this machine."""
    return init_nncontext(conf)


def init_engine(bigdl_type: str = "float") -> None:
    """Nothing: workers are started when something is trained."""


def redirect_spark_logs(bigdl_type: str = "float", log_path: str = "") -> None:
    """Nothing: Spark's log level is that of its session."""


redire_spark_logs = redirect_spark_logs


def show_bigdl_info_logs(bigdl_type: str = "float") -> None:
    """Nothing: progress is shown while a model trains."""


def get_dtype(bigdl_type: str) -> str:
    """The dtype of arrays: "float32"."""
    return "float32"


def get_node_and_core_number(bigdl_type: str = "float") -> tuple[int, int]:
    """The nodes of the running Spark, and the cores of each."""
    context = get_spark_context()
    nodes = int(context.getConf().get("spark.executor.instances", "1"))
    return nodes, max(1, context.defaultParallelism // nodes)


def init_executor_gateway(sc: Any, bigdl_type: str = "float") -> None:
    """Nothing: executors need no Java gateway."""


def to_list(a: Any) -> list[Any]:
    """A list as it is, and anything else as a list of one."""
    return a if isinstance(a, list) else [a]


def to_sample_rdd(x: Any, y: Any, numSlices: int | None = None) -> Any:
    """An RDD of `Sample`s.

    Args:
        x: Features, a row an element.
        y: Labels, a row an element.
        numSlices: Partitions; None is Spark's default.
    """
    context = get_spark_context()
    return context.parallelize(list(zip(x, y, strict=True)), numSlices).map(_sample)


def _sample(pair: Any) -> Sample:
    return Sample.from_ndarray(*pair)
