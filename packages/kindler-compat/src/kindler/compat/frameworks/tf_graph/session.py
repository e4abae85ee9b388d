"""Sessions: which one a graph's values are in, and how those of workers are configured."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from kindler.compat.frameworks.tf_graph.variables import graph_variables, initialized
from kindler.errors import ConfigError
from kindler.frameworks.devices import missing_gpu, quiet_without_gpu


def session_of(graph: Any, sess: Any, *, known: set[str]) -> Any:
    """The session that holds a graph's values; what has been added to the graph since gets its first value.

    Args:
        graph: The graph.
        sess: The user's session; None takes the default one, if it is one of this graph, or else makes one
            and initializes all variables.
        known: Names of the variables that the graph had before an optimizer was added.

    Raises:
        ConfigError: The session is one of another graph.
    """
    variables = graph_variables(graph)
    if sess is None:
        current = tf.get_default_session()
        sess = current if current is not None and current.graph is graph else None
    if sess is None:
        sess = tf.Session(graph=graph)
        initialized(sess, variables.values())
        tables = graph.get_collection("table_initializer")
        if tables:
            sess.run(tables)
        return sess
    if getattr(sess, "graph", None) is not graph:
        raise ConfigError(
            "sess is a session of another graph than the one that the inputs are in.\n"
            "Hint: tf.Session(graph=inputs.graph) makes one of the same graph."
        )
    initialized(sess, (variable for name, variable in variables.items() if name not in known))
    return sess


def worker_config(given: bytes, *, device: str, local_rank: int, threads: int | None) -> Any:
    """The user's configuration, completed with what the worker was given.

    Args:
        given: A `tf.ConfigProto` as bytes, or nothing.
        device: "auto", "cpu", "cuda" or "cuda:0".
        local_rank: The worker's number on its host, which chooses the GPU.
        threads: Compute threads; None leaves TensorFlow's default.
    """
    config = tf.ConfigProto.FromString(given) if given else tf.ConfigProto(allow_soft_placement=True)
    if threads is not None:
        config.intra_op_parallelism_threads = config.intra_op_parallelism_threads or threads
        config.inter_op_parallelism_threads = config.inter_op_parallelism_threads or threads
    if device == "cpu":
        config.device_count["GPU"] = 0
    elif not config.gpu_options.visible_device_list:
        with quiet_without_gpu():
            gpus = len(tf.config.list_physical_devices("GPU"))
        if not gpus and device.startswith("cuda"):
            raise missing_gpu(device, "TensorFlow", "tensorflow[and-cuda]")
        number = int(device.partition(":")[2]) if ":" in device else local_rank % max(gpus, 1)
        if gpus:
            config.gpu_options.visible_device_list = str(number)
            config.gpu_options.allow_growth = True
    return config
