"""Which GPUs of this machine are free."""

from __future__ import annotations

from typing import Any

from kindler.cluster.node import claim, free_gpus
from kindler.engine.placement import machine_gpus
from kindler.errors import ConfigError

__all__ = ["AS_LIST", "AS_STRING", "MAX_RETRIES", "get_gpus", "is_gpu_available"]

MAX_RETRIES = 3
AS_STRING = "string"
AS_LIST = "list"


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
