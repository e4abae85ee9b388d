"""How the workers of a run stay in sync: the values of `fit(strategy=...)`.

A name is enough where a strategy has no options, or only defaults: `fit(strategy="fsdp")`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["FSDP", "AllReduce", "Async", "LocalSGD", "Strategy", "Zero1"]


@dataclass(frozen=True, init=False, repr=False)
class Strategy:
    """A strategy by name, with its options; for one that another package adds.

    Args:
        name: Its name: a built-in one, or an entry point of the group `kindler.strategies`.
        options: Its options.
    """

    name: str
    options: Mapping[str, Any]

    def __init__(self, name: str, /, **options: Any) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", options)

    def __repr__(self) -> str:
        own = [repr(self.name)] if type(self) is Strategy else []
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{type(self).__name__}({', '.join([*own, *options])})"


class AllReduce(Strategy):
    """The strategy "allreduce", the default: each step applies the mean of all workers' gradients."""

    def __init__(self) -> None:
        super().__init__("allreduce")


class Zero1(Strategy):
    """The strategy "zero1": like all-reduce, but each worker updates a slice of the weights (PyTorch only).

    Where a lost worker is replaced, the optimizer's state is in memory twice; `RunSettings(max_failures=0)`
    leaves the second copy out.

    Args:
        divide: How the optimizer can be divided: "elements" if it updates each element of a parameter
            independently, "parameters" if it updates each parameter independently. None for torch's own
            optimizers, for which this is known.
        one_copy: Whether workers on a single machine share one copy of the parameters. Faster and smaller,
            but callbacks and the model must not write weights.
    """

    def __init__(
        self, *, divide: Literal["elements", "parameters"] | None = None, one_copy: bool = False
    ) -> None:
        super().__init__("zero1", divide=divide, one_copy=one_copy)


class FSDP(Strategy):
    """The strategy "fsdp": parameters, gradients and optimizer are divided by torch's FSDP2 (PyTorch only).

    Args:
        modules: Names of modules that are gathered separately, so that not all of the model's parameters are
            whole at the same time.
    """

    def __init__(self, *, modules: Sequence[str] = ()) -> None:
        super().__init__("fsdp", modules=modules)


class Async(Strategy):
    """The strategy "async": a parameter server applies each worker's gradients as they come; no worker waits.

    Args:
        lock: Whether weights are read only between updates. Without it (Hogwild), a worker may get weights of
            which only a part has seen an update.
        max_staleness: The most updates between the weights a gradient was computed with and its own update;
            workers wait rather than exceed it. None never waits.
        push_every: Number of batches whose mean gradient is pushed at once.
        shards: Number of servers that share the parameters.
    """

    def __init__(
        self, *, lock: bool = False, max_staleness: int | None = None, push_every: int = 1, shards: int = 1
    ) -> None:
        super().__init__(
            "async", lock=lock, max_staleness=max_staleness, push_every=push_every, shards=shards
        )


class LocalSGD(Strategy):
    """The strategy "local_sgd": workers train on their own, then continue from the mean of their weights.

    Args:
        every_steps: Steps between two averages. None averages at the end of each epoch.
    """

    def __init__(self, *, every_steps: int | None = None) -> None:
        super().__init__("local_sgd", every_steps=every_steps)
