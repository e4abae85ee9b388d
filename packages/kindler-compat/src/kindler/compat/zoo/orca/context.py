"""`OrcaContext`: settings of a program, and its Spark session."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kindler.compat.zoo.orca.errors import InvalidInput
from kindler.spark.session import running
from kindler.spark.versions import is_connect

__all__ = ["OrcaContext", "OrcaRayContext"]


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} should either be True or False; received {value!r}.")
    return value


def _read_backend(name: str, value: Any) -> str:
    if str(value).lower() not in ("spark", "pandas"):
        raise InvalidInput(f"{name} must be either spark or pandas; received {value!r}.")
    return str(value).lower()


def _data_store(name: str, value: Any) -> str:
    if not re.fullmatch(r"DRAM|PMEM|DISK_\d+", str(value).upper()):
        raise InvalidInput(f"{name} must be either DRAM or PMEM or DISK_n; received {value!r}.")
    return str(value).upper()


def _size(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InvalidInput(f"shard size should be either None or a positive integer; received {value!r}.")
    return value


class _Setting:
    """A setting, checked when it is set and accepted without effect, unless another part reads it."""

    def __init__(self, default: Any, check: Callable[[str, Any], Any] = _flag) -> None:
        self.value, self.check = default, check

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self.value

    def __set__(self, instance: Any, value: Any) -> None:
        self.value = self.check(self.name, value)


class _Settings(type):
    """Settings are attributes of the class itself, as in Orca."""

    log_output = _Setting(False)
    pandas_read_backend = _Setting("spark", _read_backend)
    _eager_mode = _Setting(True)
    serialize_data_creator = _Setting(False)
    train_data_store = _Setting("DRAM", _data_store)
    _shard_size = _Setting(None, _size)
    barrier_mode = _Setting(True)


class OrcaContext(metaclass=_Settings):
    """Settings of a program, as attributes of the class, and its Spark session.

    Most settings are checked and without effect: what workers print is shown with `verbose=1`, pandas reads
    in the workers, rows are in memory-mapped files, and workers on Spark are a barrier stage.
    """

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
    """A stand-in for Ray's context, which nothing here needs."""

    def __init__(self, runtime: str = "ray", cores: int = 2, num_nodes: int = 1, **options: Any) -> None:
        self.num_ray_nodes, self.ray_node_cpu_cores = num_nodes, cores

    @classmethod
    def get(cls, initialize: bool = True) -> OrcaRayContext:
        return cls()

    def init(self, driver_cores: int = 0) -> OrcaRayContext:
        return self

    def stop(self) -> None: ...
