"""`zoo.orca`: `init_orca_context`, `stop_orca_context`, `OrcaContext`.

`bigdl.orca` is the same: `kindler.compat.bigdl.orca` and `kindler.compat.zoo.orca` are one package.
"""

from __future__ import annotations

import warnings
from typing import Any

from kindler.compat.zoo.common.nncontext import init_nncontext
from kindler.compat.zoo.orca.context import OrcaContext, OrcaRayContext
from kindler.compat.zoo.orca.errors import InvalidInput, as_orca
from kindler.spark.session import init, running, stop
from kindler.spark.versions import is_connect

__all__ = ["OrcaContext", "init_orca_context", "stop_orca_context"]

_STARTED_ELSEWHERE = ("spark-submit", "bigdl-submit")
_CLUSTERS = ("yarn", "yarn-client", "yarn-cluster", "k8s", "k8s-client", "k8s-cluster")
_MODES = ("local", *_STARTED_ELSEWHERE, "standalone", *_CLUSTERS)


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

    Args:
        cluster_mode: "local" or None; "standalone" with `master="spark://..."`; or "spark-submit", for a
            program that spark-submit has started, on any cluster.
        runtime: "spark"; "ray" starts nothing, and models are trained by processes of this machine. Analytics
            Zoo has the cores in this place: a number is taken as that.
        cores: How many cores; None or "*" takes all.
        memory: The memory of Spark, such as "4g".
        options: `conf` is passed on to Spark, `master` is that of "standalone"; others, which said how to
            start Spark on YARN and Kubernetes, and Ray, have no effect: spark-submit has them.
        num_nodes, init_ray_on_spark, init_executor_gateway: Without effect.
    """
    if isinstance(runtime, int) or runtime == "*":
        runtime, cores, memory, num_nodes = "spark", runtime, cores, memory or num_nodes
    if runtime == "ray":
        if cluster_mode is not None:
            raise InvalidInput(f"Currently, cluster_mode={cluster_mode!r} is not supported for ray runtime.")
        return OrcaRayContext(cores=2 if cores in (None, "*") else cores, num_nodes=num_nodes)
    if runtime != "spark":
        raise InvalidInput(f"Invalid runtime: {runtime!r}; runtime should be spark or ray.")
    if cluster_mode is not None and cluster_mode not in _MODES:
        raise InvalidInput(f"cluster_mode can only be one of {', '.join(_MODES)}; received {cluster_mode!r}.")
    session = running()
    if session is not None:
        if cluster_mode not in (None, *_STARTED_ELSEWHERE):
            warnings.warn(
                f"cluster_mode={cluster_mode!r} has no effect: the Spark session that runs is used.",
                stacklevel=3,
            )
        return session if is_connect(session) else session.sparkContext
    known = {name: value for name, value in (("cores", cores), ("memory", memory)) if value is not None}
    if cluster_mode == "standalone":
        return _standalone(options, known)
    mode = cluster_mode if cluster_mode not in (None, *_STARTED_ELSEWHERE) else "local"
    return init_nncontext(options.get("conf"), cluster_mode=mode, **known)


def _standalone(options: dict[str, Any], known: dict[str, Any]) -> Any:
    if options.get("master") is None:
        raise InvalidInput(
            "cluster_mode='standalone' needs the master of a cluster: master='spark://host:7077'.\n"
            "Hint: start one with Spark's own sbin/start-all.sh."
        )
    known = {name: value for name, value in known.items() if value != "*"}
    return init(master=options["master"], conf=options.get("conf"), **known).sparkContext


def stop_orca_context() -> None:
    """Stop the Spark session that `init_orca_context` started."""
    stop()
