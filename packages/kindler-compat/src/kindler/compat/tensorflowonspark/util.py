"""Small helpers of TensorFlowOnSpark's: `util`, `gpu_info` and `compat`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kindler.cluster.node import assign_gpus, claim, free_gpus
from kindler.engine.placement import address_towards, machine_gpus
from kindler.errors import ConfigError

MAX_RETRIES = 3
AS_STRING = "string"
AS_LIST = "list"
_EXECUTOR_ID = Path("executor_id")
_ELSEWHERE = "8.8.8.8"  # nothing is sent there


def get_ip_address() -> str:
    return address_towards(_ELSEWHERE)


def find_in_path(path: str, file_name: str) -> str | bool:
    """The first file of that name in folders that are joined by ":"; False where there is none."""
    candidates = (Path(folder) / file_name for folder in path.split(os.pathsep))
    return next((str(file) for file in candidates if file.is_file()), False)


def write_executor_id(num: int) -> None:
    _EXECUTOR_ID.write_text(str(num))


def read_executor_id() -> int:
    return int(_EXECUTOR_ID.read_text())


def single_node_env(num_gpus: int = -1, worker_index: int = -1, nodes: Sequence[str] = ()) -> None:
    """Prepare this process for TensorFlow without a cluster; `nodes` is not needed."""
    os.environ.pop("TF_CONFIG", None)
    assign_gpus(None if num_gpus < 0 else num_gpus, position=max(worker_index, 0), nodes=1)


def is_gpu_available() -> bool:
    return bool(machine_gpus())


def get_gpus(num_gpu: int = 1, worker_index: int = -1, format: str = AS_STRING) -> Any:  # noqa: A002
    """Free GPUs, which this process claims: no other node of this user gets them."""
    free = free_gpus(machine_gpus())
    start = max(worker_index, 0) * num_gpu % max(1, len(free))
    chosen = claim([*free[start:], *free[:start]], num_gpu)
    if len(chosen) < num_gpu:
        raise ConfigError(f"num_gpu={num_gpu}: {len(chosen)} are free on this machine.")
    return chosen if format == AS_LIST else ",".join(chosen)


def requested_gpus(tf_args: Any) -> int | None:
    """`num_gpus` of a program's arguments: a namespace or a dict; None where they do not say."""
    number = tf_args.get("num_gpus") if hasattr(tf_args, "get") else getattr(tf_args, "num_gpus", None)
    return None if number is None else int(number)


def export_saved_model(model: Any, export_dir: str, is_chief: bool = False) -> None:
    """Save a model; nodes that are not the chief save to a temporary folder, because all must save."""
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(model, export_dir if is_chief else folder)


def disable_auto_shard(options: Any) -> None:
    import tensorflow as tf

    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
