"""Small helpers of TensorFlowOnSpark's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kindler.cluster.node import assign_gpus
from kindler.engine.placement import address_towards

__all__ = ["find_in_path", "get_ip_address", "read_executor_id", "single_node_env", "write_executor_id"]

_EXECUTOR_ID = "executor_id"
_ELSEWHERE = "8.8.8.8"  # nothing is sent there


def get_ip_address() -> str:
    """The address under which others reach this machine."""
    return address_towards(_ELSEWHERE)


def find_in_path(path: str, file_name: str) -> str | bool:
    """The first file of that name in folders that are joined by ":"; False where there is none."""
    for folder in path.split(os.pathsep):
        candidate = Path(folder) / file_name
        if candidate.is_file():
            return str(candidate)
    return False


def write_executor_id(num: int) -> None:
    Path(_EXECUTOR_ID).write_text(str(num))


def read_executor_id() -> int:
    return int(Path(_EXECUTOR_ID).read_text())


def single_node_env(num_gpus: int = -1, worker_index: int = -1, nodes: Sequence[str] = ()) -> None:
    """Prepare this process for TensorFlow without a cluster: which GPUs it sees.

    Args:
        num_gpus: How many it needs; -1 is what there is.
        worker_index: This process's number among those of its machine.
        nodes: Not needed.
    """
    os.environ.pop("TF_CONFIG", None)
    assign_gpus(None if num_gpus < 0 else num_gpus, position=max(worker_index, 0), nodes=1)
