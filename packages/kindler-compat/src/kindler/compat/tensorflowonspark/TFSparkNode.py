"""One node's start, for programs and tests that call it themselves: `TFCluster.run` does more, and better.

Only what runs in the foreground is here. Rows are fed by `TFCluster.train` and `TFCluster.inference`.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kindler.compat.tensorflowonspark import reservation, util
from kindler.compat.tensorflowonspark.TFNode import TFNodeContext
from kindler.errors import ConfigError

_KUBERNETES = "SPARK_EXECUTOR_POD_IP"


def run(
    fn: Callable[[Any, Any], Any],
    tf_args: Any,
    cluster_meta: Mapping[str, Any],
    tensorboard: bool = False,
    log_dir: str | None = None,
    queues: Sequence[str] = (),
    background: bool = False,
) -> Callable[[Iterable[int]], list[Any]]:
    """A function for `mapPartitions` that runs `fn(tf_args, ctx)` as the node whose number it is given.

    `cluster_meta` has "cluster_template" (role -> numbers of its nodes), "server_addr" of a
    `reservation.Server`, "default_fs" and "working_dir"; `log_dir` and `queues` are without effect.
    """
    if background or tensorboard:
        raise ConfigError("TFSparkNode.run runs programs in the foreground.\nHint: TFCluster.run(...).")

    def start(numbers: Iterable[int]) -> list[Any]:
        (number,) = numbers
        job_name, task_index = _role(cluster_meta["cluster_template"], number)
        with socket.socket() as held:
            held.bind(("", 0))
            known = _registered(cluster_meta["server_addr"], number, job_name, task_index, held)
            spec = _get_cluster_spec(known)
            _choose_gpus(tf_args, spec, job_name, task_index)
            os.environ["TF_CONFIG"] = json.dumps(
                {"cluster": spec, "task": {"type": job_name, "index": task_index}}
            )
        ctx = TFNodeContext(
            executor_id=number,
            job_name=job_name,
            task_index=task_index,
            cluster_spec=spec,
            defaultFS=cluster_meta.get("default_fs", "file://"),
            working_dir=cluster_meta.get("working_dir", "."),
        )
        fn(tf_args, ctx)
        return []

    return start


def _role(template: Mapping[str, Sequence[int]], number: int) -> tuple[str, int]:
    for job_name, numbers in template.items():
        if number in numbers:
            return job_name, list(numbers).index(number)
    raise ConfigError(f"node {number} has no role in {dict(template)}.")


def _registered(
    server: Any, number: int, job_name: str, task_index: int, held: socket.socket
) -> list[dict[str, Any]]:
    client = reservation.Client(server)
    try:
        client.register(
            {
                "executor_id": number,
                "host": util.get_ip_address(),
                "job_name": job_name,
                "task_index": task_index,
                "port": held.getsockname()[1],
            }
        )
        return sorted(client.await_reservations(), key=lambda known: int(known["executor_id"]))
    finally:
        client.close()


def _get_cluster_spec(sorted_cluster_info: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    spec: dict[str, list[str]] = {}
    for node in sorted_cluster_info:
        spec.setdefault(node["job_name"], []).append(f"{node['host']}:{node['port']}")
    return spec


def _choose_gpus(tf_args: Any, spec: Mapping[str, Sequence[str]], job_name: str, task_index: int) -> None:
    """Set which GPUs TensorFlow sees: those that Spark gave, else free ones, one by default."""
    asked = util.requested_gpus(tf_args)
    chosen: list[str] = []
    if asked != 0 and util.is_gpu_available():
        chosen = _gpus_of_task()
        if not chosen and _KUBERNETES not in os.environ:
            me = spec[job_name][task_index]
            here = me.rpartition(":")[0]
            neighbours = [n for nodes in spec.values() for n in nodes if n.rpartition(":")[0] == here]
            chosen = util.get_gpus(asked or 1, neighbours.index(me), format=util.AS_LIST)
        chosen = chosen[:asked] if asked else chosen
    if asked and len(chosen) < asked:
        raise ConfigError(f"num_gpus={asked}, but {len(chosen)} are available for {job_name}:{task_index}.")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)


def _gpus_of_task() -> list[str]:
    from pyspark import TaskContext

    if TaskContext.get() is None:  # asked outside of a task, the class would make one up
        return []
    given = TaskContext().resources() or {}
    return list(given["gpu"].addresses) if "gpu" in given else []
