"""Data of which `fit` and `evaluate` take the first steps only, and creators with a config of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from kindler.compat.zoo.orca.errors import InvalidInput
from kindler.data.arrays import is_spark_frame
from kindler.frameworks.creators import call, positional
from kindler.xshards import XShards

__all__ = ["configured", "first_steps"]


def configured(data: Any, data_config: Mapping[str, Any] | None) -> Any:
    """A creator whose config has these entries as well; other data has none to read."""
    return _Configured(data, dict(data_config)) if data_config and _creates(data) else data


def first_steps(data: Any, steps: int | None, batch_size: int, argument: str) -> Any:
    """The first so many batches of data; None is all of them.

    Args:
        data: A Spark DataFrame, an `XShards`, or a creator.
        steps: How many steps of all workers together.
        batch_size: Rows of a step over all workers.
        argument: What the number of steps is called, for complaints.

    Raises:
        InvalidInput: It is not a number of steps, or data that has its own steps.
    """
    if steps is None or data is None:
        return data
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidInput(f"{argument} must be a whole number of at least 1; received {steps!r}.")
    if is_spark_frame(data):
        return data.limit(steps * batch_size)
    if isinstance(data, XShards):
        return XShards.from_shards([data.head(steps * batch_size)], home=data.home)
    if _creates(data):
        return _FirstSteps(data, steps)
    raise InvalidInput(
        f"{argument} needs a DataFrame, an XShards or a function that makes data; received"
        f" {type(data).__qualname__}.\nHint: shorten the loader, or make it in a function."
    )


def _creates(data: Any) -> bool:
    return callable(data) and not hasattr(data, "element_spec") and not hasattr(data, "__iter__")


class _Configured:
    def __init__(self, creator: Callable[..., Any], config: dict[str, Any]) -> None:
        self.creator, self.config = creator, config

    def __call__(self, config: Mapping[str, Any], batch_size: int, rank: int, workers: int) -> Any:
        return _called(self.creator, {**config, **self.config}, batch_size, rank, workers)


class _FirstSteps:
    def __init__(self, creator: Callable[..., Any], steps: int) -> None:
        self.creator, self.steps = creator, steps

    def __call__(self, config: Mapping[str, Any], batch_size: int, rank: int, workers: int) -> Any:
        made = _called(self.creator, config, batch_size, rank, workers)
        own = _is_distributed(made)
        # Otherwise it has the batches of all workers, each of one worker's size.
        batches = self.steps * (1 if own else workers)
        return made.take(batches) if hasattr(made, "element_spec") else _Batches(made, batches, own)


class _Batches:
    """The first batches of an iterable.

    Attributes:
        sharded: Whether they are this worker's alone.
    """

    def __init__(self, batches: Any, count: int, sharded: bool) -> None:
        self._batches, self._count, self.sharded = batches, count, sharded

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._batches), self._count)


def _is_distributed(made: Any) -> bool:
    """Whether it is this worker's part already, as the guide on creators says it."""
    if hasattr(made, "element_spec"):
        return str(made.options().experimental_distribute.auto_shard_policy.name) == "OFF"
    marked = any(getattr(part, "sharded", False) for part in (made, getattr(made, "dataset", None)))
    return marked or type(getattr(made, "sampler", None)).__name__ == "DistributedSampler"


def _called(creator: Callable[..., Any], config: Any, batch_size: int, rank: int, workers: int) -> Any:
    more = (rank, workers) if positional(creator) == 4 else ()
    return call(creator, config, batch_size, *more)
