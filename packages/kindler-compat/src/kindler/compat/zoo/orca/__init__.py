"""`zoo.orca`: `init_orca_context`, `stop_orca_context`, `OrcaContext`; and how Orca's errors are raised.

`bigdl.orca` is the same: `kindler.compat.bigdl.orca` and `kindler.compat.zoo.orca` are one package.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kindler.compat.zoo import init_nncontext
from kindler.errors import ConfigError
from kindler.spark.session import init, running, stop
from kindler.spark.versions import is_connect

__all__ = ["OrcaContext", "init_orca_context", "stop_orca_context"]

_STARTED_ELSEWHERE = ("spark-submit", "bigdl-submit")
_CLUSTERS = ("yarn", "yarn-client", "yarn-cluster", "k8s", "k8s-client", "k8s-cluster")
_MODES = ("local", *_STARTED_ELSEWHERE, "standalone", *_CLUSTERS)

Function = TypeVar("Function", bound=Callable[..., Any])


class InvalidInputError(ConfigError, RuntimeError):
    """An argument that cannot work: a `RuntimeError` as in BigDL 2, a `ValueError` as in Analytics Zoo."""


def as_orca(function: Function) -> Function:
    """Let a function raise `InvalidInputError` where it would raise a plain `ConfigError`."""

    @functools.wraps(function)
    def converted(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ConfigError as exc:
            if isinstance(exc, RuntimeError):
                raise
            raise InvalidInputError(*exc.args) from exc

    return cast("Function", converted)


def refuse_given(function: str, **arguments: Any) -> None:
    """Raise `InvalidInputError` for arguments that would change a result and are not supported."""
    given = {name: value for name, value in arguments.items() if value is not None}
    if given:
        several = ", ".join(f"{name}={value!r:.40}" for name, value in given.items())
        raise InvalidInputError(f"{function}: not supported: {several}.\nHint: leave it out.")


_FLAG = "True|False", "should either be True or False"
_SETTINGS = {  # name -> pattern of its repr, and the rule in words
    **dict.fromkeys(("log_output", "_eager_mode", "serialize_data_creator", "barrier_mode"), _FLAG),
    "pandas_read_backend": ("(?i)'(spark|pandas)'", "must be either spark or pandas"),
    "train_data_store": (r"(?i)'(DRAM|PMEM|DISK_\d+)'", "must be either DRAM or PMEM or DISK_n"),
    "_shard_size": (r"None|[1-9]\d*", "should be either None or a positive integer"),
}


class _Settings(type):
    """Settings are attributes of the class itself, as in Orca."""

    def __setattr__(cls, name: str, value: Any) -> None:
        pattern, rule = _SETTINGS.get(name, (".*", ""))
        if not re.fullmatch(pattern, repr(value), re.DOTALL):
            raise InvalidInputError(f"{name} {rule}; received {value!r}.")
        change = {"pandas_read_backend": str.lower, "train_data_store": str.upper}.get(name)
        super().__setattr__(name, value if change is None else change(value))


class OrcaContext(metaclass=_Settings):
    """Settings of a program, as attributes of the class, and its Spark session.

    Most settings are checked and without effect: what workers print is shown with `verbose=1`, pandas reads
    in the workers, rows are in memory-mapped files, and workers on Spark are a barrier stage.
    """

    log_output = serialize_data_creator = False
    _eager_mode = barrier_mode = True
    pandas_read_backend, train_data_store, _shard_size = "spark", "DRAM", None

    @staticmethod
    def get_spark_session() -> Any:
        session = running()
        if session is None:
            raise InvalidInputError(
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


@as_orca
def init_orca_context(
    cluster_mode: str | None = None,
    runtime: Any = "spark",
    cores: Any = None,
    memory: Any = None,
    num_nodes: Any = 1,
    init_ray_on_spark: bool = False,
    init_executor_gateway: bool = True,
    **options: Any,
) -> Any:
    """The running Spark context, or a new one.

    `cluster_mode` is "local", "standalone" with `master="spark://..."`, or "spark-submit" for a program that
    spark-submit has started, on any cluster. With `runtime="ray"` processes of this machine train models.
    Options other than `conf` and `master` said how to start YARN, Kubernetes and Ray, and have no effect.
    """
    if isinstance(runtime, int) or runtime == "*":  # Analytics Zoo has the cores in this place
        runtime, cores, memory, num_nodes = "spark", runtime, cores, memory or num_nodes
    if runtime == "ray":
        if cluster_mode is not None:
            raise InvalidInputError(
                f"Currently, cluster_mode={cluster_mode!r} is not supported for ray runtime."
            )
        return OrcaRayContext(cores=2 if cores in (None, "*") else cores, num_nodes=num_nodes)
    if runtime != "spark":
        raise InvalidInputError(f"Invalid runtime: {runtime!r}; runtime should be spark or ray.")
    if cluster_mode is not None and cluster_mode not in _MODES:
        raise InvalidInputError(
            f"cluster_mode can only be one of {', '.join(_MODES)}; received {cluster_mode!r}."
        )
    session = running()
    if session is not None:
        if cluster_mode not in (None, *_STARTED_ELSEWHERE):
            warnings.warn(
                f"cluster_mode={cluster_mode!r} has no effect: the running Spark session is used.",
                stacklevel=3,
            )
        return session if is_connect(session) else session.sparkContext
    known = {name: value for name, value in (("cores", cores), ("memory", memory)) if value is not None}
    if cluster_mode != "standalone":
        mode = "local" if cluster_mode in (None, *_STARTED_ELSEWHERE) else cluster_mode
        return init_nncontext(options.get("conf"), cluster_mode=mode, **known)
    if options.get("master") is None:
        raise InvalidInputError(
            "cluster_mode='standalone' needs the master of a cluster: master='spark://host:7077'.\n"
            "Hint: start one with Spark's own sbin/start-all.sh."
        )
    known = {name: value for name, value in known.items() if value != "*"}
    return init(master=options["master"], conf=options.get("conf"), **known).sparkContext


def stop_orca_context() -> None:
    stop()
