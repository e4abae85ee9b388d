"""The table of syncs: one is a row, and its code loads on first use. What it promises is in `contract.py`."""

from __future__ import annotations

from kindler.registry import Registry, Spec

__all__ = ["SYNCS"]

SYNCS = Registry(
    "sync",
    [Spec(name="allreduce", target="kindler.sync.allreduce:AllReduce")],
    group="kindler.syncs",
)
