"""Orca's names of backends, and what they mean here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kindler.compat.zoo.orca.errors import InvalidInput
from kindler.sync.registry import SYNCS

__all__ = ["BACKENDS", "check_backend", "sync_of"]

# All of them compute the same steps. With "bigdl" each worker holds a slice of the optimizer's state.
BACKENDS = {
    "bigdl": "sharded",
    "spark": "allreduce",
    "ray": "allreduce",
    "torch_distributed": "allreduce",
    "horovod": "allreduce",
    "tf2": "allreduce",
}


def check_backend(backend: Any, known: Sequence[str]) -> str:
    """The name of a backend that an estimator takes.

    Raises:
        InvalidInput: It takes none of this name.
    """
    if backend not in known:
        raise InvalidInput(
            f"Only {', '.join(known[:-1])} and {known[-1]} backend are supported;"
            f" received backend={backend!r}."
        )
    return str(backend)


def sync_of(backend: str, *, divide: str | None) -> dict[str, Any]:
    """The options of `fit` that a backend stands for.

    Args:
        backend: Orca's name.
        divide: What the optimizer's work can be divided into: "elements" where each element of a parameter
            moves by itself, "" where that is known of its class, None where it is not known.
    """
    sync = BACKENDS[backend]
    if sync != "sharded" or divide is None or sync not in SYNCS.names:
        return {"sync": "allreduce"}
    return {"sync": sync, "sync_options": {"divide": divide} if divide else {}}
