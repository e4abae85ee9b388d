"""Ranks that have torch loaded, with one thread each; see `tests/ranks.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests import ranks
from tests.ranks import GangWorker

__all__ = ["GangWorker", "run_ranks"]


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, hosts: Sequence[str] | None = None
) -> list[Any]:
    """Run `function(worker, *args)` on `size` processes and return what each returned."""
    preload = ("torch", "torch._dynamo")
    return ranks.run_ranks(size, function, *args, hosts=hosts, preload=preload, prepare="gang:one_thread")


def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
