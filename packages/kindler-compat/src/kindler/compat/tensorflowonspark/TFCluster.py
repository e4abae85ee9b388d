"""`TFCluster.run`: a cluster of `map_fun(args, ctx)` on Spark's executors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kindler import RunSettings
from kindler.cluster import cluster as clusters
from kindler.cluster.context import Context
from kindler.compat.tensorflowonspark.TFNode import TFNodeContext
from kindler.compat.tensorflowonspark.util import requested_gpus
from kindler.data.arrays import is_spark_frame
from kindler.errors import ConfigError
from kindler.spark.executors import resolve_workers
from kindler.spark.feeding import session_of

_DEFAULT_EPOCHS = 10  # what TensorFlowOnSpark makes of 0


class InputMode:
    TENSORFLOW = 0
    SPARK = 1


@dataclass(frozen=True)
class _Main:
    """`map_fun` as the program of a node."""

    map_fun: Any
    release_port: bool
    master_node: str = "chief"

    @property
    def __wrapped__(self) -> Any:
        return self.map_fun

    def __call__(self, args: Any, ctx: Context) -> Any:
        if isinstance(args, list):
            sys.argv = args
        if self.release_port:
            ctx.release_ports()
        return self.map_fun(args, self._context(ctx))

    def _context(self, ctx: Context) -> TFNodeContext:
        return TFNodeContext.of(ctx, hold_port=not self.release_port, master_node=self.master_node)


class TFCluster:
    def __init__(self, cluster: clusters.Cluster, sc: Any, input_mode: int, num_executors: int) -> None:
        self.cluster = cluster
        self.sc = sc
        self.input_mode = input_mode
        self.num_executors = num_executors
        self.cluster_id = cluster.run_id
        self.cluster_info = [
            {
                "executor_id": node.rank,
                "host": node.host,
                "job_name": node.role,
                "task_index": node.index,
                "port": node.ports[0],
            }
            for node in cluster.nodes
        ]

    def train(
        self, dataRDD: Any, num_epochs: int = 0, feed_timeout: float = 600, qname: str = "input"
    ) -> None:
        """Feed an RDD, a DataFrame, or every RDD of a DStream, `num_epochs` times; 0 means 10 times."""
        self._check_mode("train")
        assert num_epochs >= 0, "num_epochs cannot be negative"
        epochs = num_epochs or _DEFAULT_EPOCHS
        if hasattr(type(dataRDD), "foreachRDD"):
            dataRDD.foreachRDD(lambda rdd: self.cluster.train(rdd, 1, feed=qname))
        else:
            self.cluster.train(dataRDD, epochs, feed=qname)

    def inference(self, dataRDD: Any, feed_timeout: float = 600, qname: str = "input") -> Any:
        """An RDD of the results: one for each item. It is computed when it is used."""
        self._check_mode("inference")
        return self.cluster.inference(dataRDD.rdd if is_spark_frame(dataRDD) else dataRDD, feed=qname)

    def shutdown(self, ssc: Any = None, grace_secs: float = 0, timeout: float = 259200) -> None:
        """End the feeds and wait for all programs; raises what a node failed with.

        `timeout` are seconds after which nodes are ended; -1 waits. `grace_secs` is not needed.
        """
        if ssc is not None:
            while not ssc.awaitTerminationOrTimeout(1):
                if not self.cluster.is_running:
                    ssc.stop(stopSparkContext=False, stopGraceFully=True)
        self.cluster.shutdown(None if timeout < 0 else timeout)

    def tensorboard_url(self) -> str | None:
        return self.cluster.tensorboard_url()

    def _check_mode(self, what: str) -> None:
        assert self.input_mode == InputMode.SPARK, f"TFCluster.{what} requires InputMode.SPARK"


def run(
    sc: Any,
    map_fun: Any,
    tf_args: Any,
    num_executors: int,
    num_ps: int = 0,
    tensorboard: bool = False,
    input_mode: int = InputMode.TENSORFLOW,
    log_dir: str | None = None,
    driver_ps_nodes: bool = False,
    master_node: str | None = None,
    reservation_timeout: float = 600,
    queues: Sequence[str] = ("input", "output", "error"),
    eval_node: bool = False,
    release_port: bool = True,
) -> TFCluster:
    """Start `map_fun(tf_args, ctx)` on `num_executors` nodes, parameter servers and evaluator included.

    Parameter servers run on executors also with `driver_ps_nodes`. TF_CONFIG is always set.
    """
    if master_node not in (None, "chief", "master"):
        raise ConfigError(
            f"master_node={master_node!r}: must be 'chief', 'master', or None for workers alone."
        )
    if eval_node and input_mode == InputMode.SPARK:
        raise ConfigError("eval_node is not available with InputMode.SPARK: an evaluator receives no data.")
    workers = num_executors - num_ps - eval_node
    if workers < 1:
        raise ConfigError(
            f"num_executors={num_executors} with num_ps={num_ps} and eval_node={eval_node} leaves no worker."
        )
    spark, fed = session_of(sc), input_mode == InputMode.SPARK
    settings = RunSettings(start_timeout_s=reservation_timeout)
    try:
        resolve_workers(spark, num_executors, settings, detached=fed)
    except ConfigError as exc:
        if num_ps and driver_ps_nodes:
            raise ConfigError(
                f"{exc}\nOf num_executors={num_executors} nodes {num_ps} are parameter servers: they run on "
                "executors even with driver_ps_nodes=True, and need a slot each."
            ) from exc
        raise
    cluster = clusters.run(
        _Main(map_fun, release_port, master_node or "chief"),
        tf_args,
        workers,
        spark=spark,
        ps=num_ps,
        chief=master_node is not None,
        evaluator=eval_node,
        input_mode="spark" if fed else "program",
        gpus=requested_gpus(tf_args),
        tensorboard=tensorboard,
        log_dir=log_dir or (f"tensorboard_{sc.applicationId}" if tensorboard else None),
        start_timeout_s=reservation_timeout,
    )
    return TFCluster(cluster, sc, input_mode, num_executors)
