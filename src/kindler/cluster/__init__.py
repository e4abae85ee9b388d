"""Run your own TensorFlow, PyTorch or JAX program as a cluster: `run(main_fun, args, workers)`.

`main_fun(args, ctx)` runs on every node; `ctx` says who the node is and where the others are. Importing this
loads neither a framework nor Spark.
"""

from __future__ import annotations

from kindler.cluster.cluster import Cluster, run
from kindler.cluster.context import Context
from kindler.cluster.feed import DataFeed

__all__ = ["Cluster", "Context", "DataFeed", "run"]
