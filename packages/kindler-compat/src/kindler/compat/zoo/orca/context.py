"""`OrcaContext`: settings of a program, and its Spark session."""

from __future__ import annotations

import re
from typing import Any

from kindler.compat.zoo.orca.errors import InvalidInput
from kindler.spark.session import running
from kindler.spark.versions import is_connect

__all__ = ["OrcaContext", "OrcaRayContext"]


class _Settings(type):
    """Settings are properties of the class itself, as in Orca."""

    _log_output = False
    _pandas_read_backend = "spark"
    _eager = True
    _serialize_data_creator = False
    _train_data_store = "DRAM"
    _rows_of_shards: int | None = None
    _barrier_mode = True

    @property
    def log_output(cls) -> bool:
        """Accepted without effect: what workers print is shown with `verbose=1`."""
        return cls._log_output

    @log_output.setter
    def log_output(cls, value: bool) -> None:
        cls._log_output = _flag("log_output", value)

    @property
    def pandas_read_backend(cls) -> str:
        """Accepted without effect: pandas reads in the workers."""
        return cls._pandas_read_backend

    @pandas_read_backend.setter
    def pandas_read_backend(cls, value: str) -> None:
        name = str(value).lower()
        if name not in ("spark", "pandas"):
            raise InvalidInput(f"pandas_read_backend must be either spark or pandas; received {value!r}.")
        cls._pandas_read_backend = name

    @property
    def _eager_mode(cls) -> bool:
        return cls._eager

    @_eager_mode.setter
    def _eager_mode(cls, value: bool) -> None:
        cls._eager = _flag("_eager_mode", value)

    @property
    def serialize_data_creator(cls) -> bool:
        """Accepted without effect: use a lock of your own in creators that download."""
        return cls._serialize_data_creator

    @serialize_data_creator.setter
    def serialize_data_creator(cls, value: bool) -> None:
        cls._serialize_data_creator = _flag("serialize_data_creator", value)

    @property
    def train_data_store(cls) -> str:
        """Accepted without effect: rows are in memory-mapped files, of which the system keeps what fits."""
        return cls._train_data_store

    @train_data_store.setter
    def train_data_store(cls, value: str) -> None:
        name = str(value).upper()
        if name not in ("DRAM", "PMEM") and not re.fullmatch(r"DISK_\d+", name):
            raise InvalidInput(f"train_data_store must be either DRAM or PMEM or DISK_n; received {value!r}.")
        cls._train_data_store = name

    @property
    def _shard_size(cls) -> int | None:
        return cls._rows_of_shards

    @_shard_size.setter
    def _shard_size(cls, value: int | None) -> None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidInput(f"shard size should be either None or a positive integer; received {value!r}.")
        cls._rows_of_shards = value

    @property
    def barrier_mode(cls) -> bool:
        """Accepted without effect: workers on Spark are a barrier stage."""
        return cls._barrier_mode

    @barrier_mode.setter
    def barrier_mode(cls, value: bool) -> None:
        cls._barrier_mode = _flag("barrier_mode", value)


class OrcaContext(metaclass=_Settings):
    """Settings of a program, as attributes of the class, and its Spark session."""

    @staticmethod
    def get_spark_session() -> Any:
        """The running session."""
        session = running()
        if session is None:
            raise InvalidInput(
                "No active SparkContext. Please create a SparkContext first: init_orca_context()."
            )
        return session

    @staticmethod
    def get_spark_context() -> Any:
        """Its Spark context; with Spark Connect, which has none, the session."""
        session = OrcaContext.get_spark_session()
        return session if is_connect(session) else session.sparkContext

    get_sql_context = get_spark_session

    @staticmethod
    def get_ray_context() -> OrcaRayContext:
        """A stand-in: nothing here runs on Ray."""
        return OrcaRayContext()


class OrcaRayContext:
    """A stand-in for Ray's context, which nothing here needs.

    Attributes:
        num_ray_nodes: Nodes.
        ray_node_cpu_cores: Cores of each.
    """

    def __init__(self, runtime: str = "ray", cores: int = 2, num_nodes: int = 1, **options: Any) -> None:
        self.num_ray_nodes, self.ray_node_cpu_cores = num_nodes, cores

    @classmethod
    def get(cls, initialize: bool = True) -> OrcaRayContext:
        """A context."""
        return cls()

    def init(self, driver_cores: int = 0) -> OrcaRayContext:
        """Nothing."""
        return self

    def stop(self) -> None:
        """Nothing."""


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} should either be True or False; received {value!r}.")
    return value
