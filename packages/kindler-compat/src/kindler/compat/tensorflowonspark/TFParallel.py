"""Independent instances of a program on the executors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from kindler.cluster import cluster as clusters
from kindler.cluster.context import Context
from kindler.compat.tensorflowonspark.TFCluster import _Main
from kindler.compat.tensorflowonspark.TFNode import TFNodeContext
from kindler.compat.tensorflowonspark.util import requested_gpus
from kindler.spark.executors import slots
from kindler.spark.feeding import session_of


@dataclass(frozen=True)
class _Instance(_Main):
    """`map_fn` as one of several programs that know nothing of each other."""

    first: int = 0
    count: int = 1

    def _context(self, ctx: Context) -> TFNodeContext:
        os.environ.pop("TF_CONFIG", None)
        seen = super()._context(ctx)
        seen.worker_num = seen.executor_id = self.first + ctx.rank
        seen.num_workers = self.count
        return seen


def run(sc: Any, map_fn: Any, tf_args: Any, num_executors: int, use_barrier: bool = True) -> list[Any]:
    """Run `map_fn(tf_args, ctx)` `num_executors` times and wait; gives what each returned.

    All run at the same time; without `use_barrier` as many at a time as there are slots.
    """
    spark = session_of(sc)
    at_once = num_executors if use_barrier else min(num_executors, max(1, slots(spark)))
    values: list[Any] = []
    for first in range(0, num_executors, at_once):
        instance = _Instance(map_fn, release_port=True, first=first, count=num_executors)
        count = min(at_once, num_executors - first)
        gpus = requested_gpus(tf_args)
        values += clusters.run(instance, tf_args, count, spark=spark, chief=False, gpus=gpus).wait()
    return values
