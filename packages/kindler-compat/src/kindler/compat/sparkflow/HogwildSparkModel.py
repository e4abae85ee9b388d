"""Training an RDD of rows without stages: the class that SparkFlow's estimator stands on."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession

from kindler.compat.sparkflow.ml_util import handle_features
from kindler.compat.sparkflow.training import Job, build_optimizer, train

__all__ = ["HogwildSparkModel"]


@dataclass(eq=False)
class HogwildSparkModel:
    """Trains a graph on an RDD, asynchronously.

    The parameter server is part of `train`: nothing is started before, no port is fixed, and nothing has to
    be stopped. `master_url`, `serverStartup` and `port` are accepted without effect.
    """

    tensorflowGraph: str | None = None
    iters: int = 1000
    tfInput: str | None = None
    tfLabel: str | None = None
    optimizer: Any = None
    master_url: str | None = None
    serverStartup: int = 8
    acquire_lock: bool = False
    mini_batch: int = -1
    mini_stochastic_iters: int = -1
    shuffle: bool = True
    verbose: int = 0
    partition_shuffles: int = 1
    loss_callback: Callable[[float, int, int], None] | None = None
    port: int = 5000

    @staticmethod
    def determine_master(port: int = 5000) -> str:
        """This machine's address, as SparkFlow wrote it."""
        try:
            return f"{socket.gethostbyname(socket.gethostname())}:{port}"
        except OSError:
            return f"localhost:{port}"

    def start_server(self, *args: Any, **kwargs: Any) -> None:
        """Without effect: `train` has a server for as long as it runs."""

    def stop_server(self) -> None:
        """Without effect."""

    def train(self, rdd: Any) -> list[np.ndarray[Any, Any]]:
        """The trained weights, in the order of `tf.trainable_variables()`.

        Rows of the RDD are features, or features and a label: numbers, arrays or vectors. Each partition is
        one worker's.
        """
        supervised = self.tfLabel is not None

        def row(item: Any) -> tuple[Any, ...]:
            features, labels = handle_features([item], supervised)
            if labels is None:
                return (Vectors.dense(features[0].ravel()),)
            return Vectors.dense(features[0].ravel()), Vectors.dense(labels[0].ravel())

        names = ["features", "label"] if supervised else ["features"]
        frame = SparkSession.builder.getOrCreate().createDataFrame(rdd.map(row), names)
        optimizer = self.optimizer
        job = Job(
            graph=self.tensorflowGraph or "",
            tf_input=self.tfInput or "",
            tf_label=self.tfLabel,
            make_optimizer=lambda: build_optimizer("adam", 0.01) if optimizer is None else optimizer,
            iters=self.iters,
            partitions=rdd.getNumPartitions(),
            mini_batch=self.mini_batch,
            mini_stochastic_iters=self.mini_stochastic_iters,
            lock=self.acquire_lock,
            shuffle=self.shuffle,
            verbose=self.verbose,
            partition_shuffles=self.partition_shuffles,
            loss_callback=self.loss_callback,
        )
        opened = train(job, frame, "features", "label" if supervised else None)
        return [np.asarray(value) for value in opened.sess.run(opened.trained)]
