"""Ranks that have torch loaded, with one thread each; see `kindler.testing.ranks`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kindler import RunSettings
from kindler.sync.registry import SYNCS
from kindler.testing import ranks
from kindler.testing.ranks import GangWorker

__all__ = ["PRELOAD", "GangWorker", "attach", "run_ranks"]

# Whatever is not here is imported by every rank of every test. What the first test of a process names counts
# for all, so that all of them name this.
PRELOAD = (
    *("torch", "torch._dynamo", "torchmetrics"),
    *("kindler.frameworks.torch.replica", "kindler.estimator.estimator"),
)


def attach(
    replica: Any,
    worker: GangWorker,
    *,
    strategy: str = "allreduce",
    shared_memory: bool = True,
    **options: Any,
) -> Any:
    """Join the replicas of all ranks, by all-reduce unless another strategy is named."""
    made = SYNCS.load(strategy)(RunSettings(sync_timeout_s=60.0, shared_memory=shared_memory), **options)
    made.attach(replica, worker)
    return made


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, hosts: Sequence[str] | None = None
) -> list[Any]:
    """Run `function(worker, *args)` on `size` processes and return what each returned."""
    return ranks.run_ranks(size, function, *args, hosts=hosts, preload=PRELOAD, prepare="gang:one_thread")


def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
