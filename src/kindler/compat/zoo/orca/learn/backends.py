"""Orca's names of backends, and what they mean here."""

from __future__ import annotations

from collections.abc import Sequence

from kindler.compat.zoo.orca.errors import InvalidInput
from kindler.sync.registry import SYNCS

__all__ = ["BACKENDS", "sync_of"]

# Every one of them computes the same steps: they differ in who holds the state of the optimizer.
BACKENDS = {
    "bigdl": "sharded",
    "spark": "allreduce",
    "ray": "allreduce",
    "torch_distributed": "allreduce",
    "horovod": "allreduce",
    "tf2": "allreduce",
}


def sync_of(backend: str, known: Sequence[str]) -> str:
    """The sync that a backend stands for.

    Args:
        backend: Orca's name.
        known: The names that this estimator takes.

    Raises:
        InvalidInput: It takes none of this name.
    """
    if backend not in known:
        raise InvalidInput(
            f"Only {', '.join(known)} backend are supported for now; received backend={backend!r}."
        )
    sync = BACKENDS[backend]
    return sync if sync in SYNCS.names else "allreduce"
