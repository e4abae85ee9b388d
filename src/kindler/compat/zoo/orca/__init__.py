"""`zoo.orca`: `init_orca_context`, `stop_orca_context`."""

from __future__ import annotations

from typing import Any

from kindler.compat.zoo.common.nncontext import init_nncontext
from kindler.spark.session import stop

__all__ = ["init_orca_context", "stop_orca_context"]


def init_orca_context(
    cluster_mode: str | None = None, cores: Any = None, memory: str | None = None, **options: Any
) -> Any:
    """The running Spark context, or a new one on this machine.

    Args:
        cluster_mode: "local", or None.
        cores: How many cores; None or "*" takes all.
        memory: The memory of Spark, such as "4g".
        options: `conf` is passed on to Spark; `num_nodes`, `runtime`, `init_ray_on_spark` and others are
            accepted without effect.
    """
    given: dict[str, Any] = {
        name: value for name, value in (("cores", cores), ("memory", memory)) if value is not None
    }
    return init_nncontext(options.get("conf"), cluster_mode=cluster_mode or "local", **given)


def stop_orca_context() -> None:
    """Stop the Spark session that `init_orca_context` started."""
    stop()
