"""Which group of workers goes with which framework: the rows where `frameworks/` and `sync/` meet."""

from __future__ import annotations

from kindler.registry import Registry, Spec

__all__ = ["SYNCS"]

SYNCS = Registry(
    "sync",
    [
        Spec(
            name="allreduce/torch",
            target="kindler.sync.allreduce_torch:Group",
            package="torch",
            extra="torch",
        ),
        Spec(name="allreduce/keras", target="kindler.sync.allreduce_host:HostGroup"),
    ],
)
