"""Independent instances of a program, one on each executor."""

from __future__ import annotations

from typing import Any

from kindler.cluster import cluster as clusters
from kindler.compat.tensorflowonspark.TFCluster import _Main
from kindler.spark.feeding import session_of

__all__ = ["run"]


def run(sc: Any, map_fn: Any, tf_args: Any, num_executors: int, use_barrier: bool = True) -> list[Any]:
    """Run `map_fn(tf_args, ctx)` on `num_executors` nodes and wait; gives what each returned.

    They always run at the same time, as with `use_barrier`.
    """
    cluster = clusters.run(
        _Main(map_fn, release_port=True), tf_args, num_executors, spark=session_of(sc), chief=False
    )
    return cluster.wait()
