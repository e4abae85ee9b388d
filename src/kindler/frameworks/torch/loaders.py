"""torch's DataLoader on several ranks, with the user's sampler, collate function and worker processes.

A loader that is sharded (a DistributedSampler, or `sharded = True` on it or its dataset) is left alone.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from kindler.frameworks.loaders import Dealing, pickled, says_sharded
from kindler.frameworks.torch import private

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def pack_loader(loader: DataLoader[Any]) -> Callable[[], Any]:
    idle = copy.copy(loader)
    private.drop_iterator(idle)  # worker processes that it keeps stay here
    return pickled(idle)


def open_loader(loader: DataLoader[Any], dealing: Dealing) -> LoaderStream:
    if says_sharded(loader, loader.dataset) or _has_distributed_sampler(loader):
        return LoaderStream(loader, dealing)
    if type(loader).__iter__ is not DataLoader.__iter__:  # what it does on the way is its own affair
        return LoaderStream(loader, dealing, every=True, shared=True)
    if isinstance(loader.dataset, IterableDataset):
        return _iterable(loader, dealing)
    options = _kept(loader)
    if loader.batch_sampler is None:  # each item is a batch
        items = loader.sampler if dealing.whole else _Every(loader.sampler, dealing)
        order = _Order(items, dealing)
        one_by_one: DataLoader[Any] = DataLoader(loader.dataset, batch_size=None, sampler=order, **options)
        return LoaderStream(one_by_one, dealing, cut=dealing.whole)
    options["collate_fn"] = _SomeOrNone(loader.collate_fn)
    order = _Order(_dealt(loader, dealing), dealing)
    return LoaderStream(DataLoader(loader.dataset, batch_sampler=order, **options), dealing)


class LoaderStream:
    def __init__(
        self,
        loader: DataLoader[Any],
        dealing: Dealing,
        *,
        every: bool = False,
        cut: bool = False,
        shared: bool = False,
    ) -> None:
        """`every`: of the loader's batches this rank has every size-th; `shared`: all ranks read all."""
        self._loader, self._dealing, self._shared = loader, dealing, shared
        self._every = every and not dealing.whole
        self.cut = (cut or (every and dealing.whole)) and dealing.size > 1
        self.fresh = loader.batch_sampler is not None  # an item that is a batch may be the dataset's own

    def length(self) -> float | None:
        """Known only for datasets with an index."""
        if isinstance(self._loader.dataset, IterableDataset):
            return None  # what such a dataset says of its length is an estimate
        try:
            length = len(self._loader)
        except TypeError:  # a sampler without a length
            return None
        return self._dealing.share_of(length) if self._every else length

    def batches(self, number: int) -> Generator[Any, None, None]:
        self._announce(number)
        drawing: AbstractContextManager[Any] = nullcontext()
        if self._shared:
            drawing = self._dealing.drawing(number)
        with drawing:
            items: Iterator[Any] = iter(self._loader)
        try:
            yield from self._dealing.share(items, drawing, whole=not self._every)
        finally:
            del items  # its worker processes end with it

    def close(self) -> None:
        private.drop_iterator(self._loader)

    def _announce(self, number: int) -> None:
        for thing in (*_nested(self._loader.batch_sampler), self._loader.sampler):
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(number)


class _Order:
    """Draws the same order on all ranks."""

    def __init__(self, inner: Iterable[Any], dealing: Dealing) -> None:
        self._inner, self._dealing, self._number = inner, dealing, 0
        # Those of torch's own draw once, at their beginning.
        self._draws_always = not _of_torch(inner)

    def set_epoch(self, number: int) -> None:
        self._number = number
        for thing in _nested(self._inner):
            if not isinstance(thing, _Order | _Every) and hasattr(thing, "set_epoch"):
                thing.set_epoch(number)

    def __iter__(self) -> Iterator[Any]:
        drawing = self._dealing.drawing(self._number)
        with drawing:
            items = iter(self._inner)
            first = [] if self._draws_always else list(itertools.islice(items, 1))
        yield from first
        draws: AbstractContextManager[Any] = drawing if self._draws_always else nullcontext()
        yield from self._dealing.share(items, draws, whole=True)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]


class _Every:
    def __init__(self, sampler: Iterable[Any], dealing: Dealing) -> None:
        self.sampler, self._dealing = sampler, dealing

    def __iter__(self) -> Iterator[Any]:
        for place, item in enumerate(self.sampler):
            if place % self._dealing.size == self._dealing.rank:
                yield item

    def __len__(self) -> int:
        return self._dealing.share_of(len(self.sampler))  # type: ignore[arg-type]


class _Sliced:
    """Empty for a batch that is too short for this rank."""

    def __init__(self, sampler: Iterable[Any], dealing: Dealing) -> None:
        self.sampler, self._dealing = sampler, dealing

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self.sampler:
            yield list(batch)[self._dealing.rank :: self._dealing.size]

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class _SomeOrNone:
    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        return self._collate(samples) if len(samples) else None


class _EveryItem(IterableDataset[Any]):
    """In all else a proxy for the dataset."""

    def __init__(self, dataset: IterableDataset[Any], dealing: Dealing) -> None:
        object.__setattr__(self, "_own", (dataset, dealing))

    def __iter__(self) -> Iterator[Any]:
        dataset, dealing = self._own
        for place, item in enumerate(dataset):
            if place % dealing.size == dealing.rank:
                yield item

    def __getattr__(self, name: str) -> Any:
        if name == "_own":  # asked for while it is unpickled
            raise AttributeError(name)
        return getattr(self._own[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own[0], name, value)  # functions that prepare worker processes write there

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._own


def _iterable(loader: DataLoader[Any], dealing: Dealing) -> LoaderStream:
    if dealing.whole or dealing.size == 1:
        return LoaderStream(loader, dealing, cut=True, shared=True)
    if dealing.unit == "batches":
        return LoaderStream(loader, dealing, every=True, shared=True)
    dataset = _EveryItem(loader.dataset, dealing)  # type: ignore[arg-type]
    options = {**_kept(loader), "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return LoaderStream(DataLoader(dataset, **options), dealing, shared=True)


def _dealt(loader: DataLoader[Any], dealing: Dealing) -> Iterable[Any]:
    batches: Iterable[Any] = loader.batch_sampler or ()
    if dealing.size == 1:
        return batches
    if dealing.whole:
        return _Sliced(batches, dealing)
    if dealing.unit == "batches" or loader.batch_size is None:  # a batch sampler of the user's own
        return _Every(batches, dealing)
    return BatchSampler(_Every(loader.sampler, dealing), loader.batch_size, loader.drop_last)


def _kept(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}


def _has_distributed_sampler(loader: DataLoader[Any]) -> bool:
    samplers = [loader.sampler, *_nested(loader.batch_sampler)]
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def _nested(sampler: Any) -> list[Any]:
    samplers = []
    while sampler is not None:
        samplers.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return samplers


def _of_torch(sampler: Any) -> bool:
    return all(
        isinstance(thing, _Every | _Sliced) or type(thing).__module__.startswith("torch.")
        for thing in _nested(sampler)
    )
