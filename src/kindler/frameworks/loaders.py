"""Data loaders of the user's own: which of their batches fall to a rank, pass after pass.

A table names the modules that read them, imported on first use; entry points `kindler.loaders` extend it.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any, Literal

import cloudpickle
import numpy as np

from kindler.errors import ConfigError
from kindler.frameworks.rng import Drawing

_WORKS = (
    "a torch DataLoader, a tf.data.Dataset, a keras PyDataset, or an iterable of batches (x, y) or"
    " (x, y, sample_weight)"
)
_ENDLESS = (itertools.count, itertools.cycle, itertools.repeat)


@dataclass(frozen=True, slots=True)
class LoaderSharding:
    """How batches are divided between ranks.

    Attributes:
        rank: The rank that asks.
        size: Number of ranks.
        seed: Fixes, with the number of the pass, every random order.
        unit: What a rank takes: "rows" of each batch, if batches are those of all ranks together; whole
            "batches"; or "samples", to make batches of its own.
    """

    rank: int
    size: int
    seed: int
    unit: Literal["samples", "rows", "batches"] = "samples"

    @property
    def whole(self) -> bool:
        """Each rank takes part of the rows of each batch."""
        return self.unit == "rows"

    def drawing(self, number: int) -> Drawing:
        """The same on all ranks."""
        return Drawing(self.seed, number)

    def share(
        self, items: Iterator[Any], drawing: AbstractContextManager[Any], *, whole: bool
    ) -> Iterator[Any]:
        for place in itertools.count():
            try:
                with drawing:
                    item = next(items)
            except StopIteration:
                return
            if whole or place % self.size == self.rank:
                yield item

    def share_of(self, length: int) -> int:
        """With every size-th item."""
        return max(0, -(-(length - self.rank) // self.size))


@dataclass(frozen=True, slots=True)
class _Kind:
    module: str
    opens: str = "open_loader"
    packs: str = "pack_loader"

    def call(self, function: str, *args: Any) -> Any:
        return getattr(importlib.import_module(self.module), function)(*args)


_KERAS = "kindler.frameworks.keras.loaders"
_KINDS = {  # by the package and the name of a class
    "torch.DataLoader": _Kind("kindler.frameworks.torch.loaders"),
    "tensorflow.DatasetV2": _Kind(_KERAS, "DatasetStream", "pack_dataset"),
    "keras.PyDataset": _Kind(_KERAS, "IndexedStream", "pickled"),
    "tf_keras.Sequence": _Kind(_KERAS, "IndexedStream", "pickled"),
}


@cache
def _kinds_of_others() -> dict[str, _Kind]:
    """Entry points, named like the rows above, of modules with `open_loader` and `pack_loader`."""
    return {entry.name: _Kind(entry.value) for entry in entry_points(group="kindler.loaders")}


def _kind_of(made: Any) -> _Kind | None:
    names = [f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(made).__mro__]
    return next(
        (kinds[name] for kinds in (_KINDS, _kinds_of_others()) for name in names if name in kinds), None
    )


def is_loader(made: Any) -> bool:
    """Imports nothing."""
    return _kind_of(made) is not None


def packed(loader: Any) -> Callable[[], Any]:
    """The returned function can be sent to workers, and gives the loader there."""
    kind = _kind_of(loader)
    assert kind is not None
    made: Callable[[], Any] = kind.call(kind.packs, loader)
    return made


def pickled(loader: Any) -> Callable[[], Any]:
    try:
        return partial(cloudpickle.loads, cloudpickle.dumps(loader))
    except Exception as exc:
        raise ConfigError(cannot_travel(loader, str(exc).partition("\n")[0])) from exc


def cannot_travel(loader: Any, why: str) -> str:
    return (
        f"this {type(loader).__qualname__} cannot be sent to the workers: {why}.\n"
        "Hint: pass a function of (config, batch_size) that makes it there."
    )


def open_stream(make: Callable[[], Any], sharding: LoaderSharding, *, title: str) -> LoaderStream:
    made = make()
    kind = _kind_of(made)
    if kind is not None:
        stream: LoaderStream = kind.call(kind.opens, made, sharding)
        return stream
    data = isinstance(made, str | bytes | Mapping | tuple | np.ndarray) or hasattr(made, "columns")
    if data or not isinstance(made, Iterable):
        raise ConfigError(
            f"{title} must return {_WORKS}; it returned an object of type {type(made).__qualname__}."
            + ("\nHint: arrays and frames need no function; pass them as data." if data else "")
        )
    return _Iterated(made, make, sharding)


def says_sharded(*things: Any) -> bool:
    return any(getattr(thing, "sharded", False) is True for thing in things)


class LoaderStream:
    """One rank's batches of a loader that all ranks read whole, unless it says that it is sharded.

    Attributes:
        cut: Whether this rank's rows must still be cut from each batch.
        fresh: Whether every batch has its own memory, which nobody writes to later.
    """

    fresh = False

    def __init__(self, made: Any, sharding: LoaderSharding) -> None:
        self._made, self._sharding = made, sharding
        sharded = says_sharded(made)
        self.cut = sharding.whole and sharding.size > 1 and not sharded
        self._takes_all = sharded or self.cut
        self._draws_alike = not sharded  # all ranks read all of it

    def length(self) -> float | None:
        """Return the batches in one pass: a whole number, `math.inf`, or None if unknown."""
        raise NotImplementedError

    def _share_of(self, length: int) -> int:
        return length if self._takes_all else self._sharding.share_of(length)

    def batches(self, number: int) -> Generator[Any, None, None]:
        """Yield the pass of this number; None is a step without rows for this rank. Close it when done."""
        drawing: AbstractContextManager[Any] = nullcontext()
        if self._draws_alike:
            drawing = self._sharding.drawing(number)
        with drawing:
            items = iter(self._opened(number))
        try:
            yield from self._sharding.share(items, drawing, whole=self._takes_all)
        finally:
            del items  # its worker processes end with it

    def _opened(self, number: int) -> Iterable[Any]:
        made: Iterable[Any] = self._made
        return made

    def close(self) -> None:
        """Leave no process behind; may be called again."""


class _Iterated(LoaderStream):
    def __init__(self, made: Iterable[Any], make: Callable[[], Any], sharding: LoaderSharding) -> None:
        super().__init__(made, sharding)
        self._make, self._once = make, iter(made) is made
        self._length: float | None = None
        if isinstance(made, _ENDLESS):
            self._length = math.inf
        elif isinstance(made, Sized):
            self._length = self._share_of(len(made))

    def length(self) -> float | None:
        return self._length

    def _opened(self, number: int) -> Iterable[Any]:
        made: Iterable[Any] = self._make() if self._made is None else self._made
        if self._once:
            self._made = None
        return made

    def close(self) -> None:
        self._made = None
