"""torch's DataLoader on several ranks, with the user's sampler, collate function and worker processes.

A loader that is sharded (a DistributedSampler, or `sharded = True` on it or its dataset) is left alone.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from kindler.frameworks.loaders import LoaderSharding, LoaderStream, pickled, says_sharded
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


def open_loader(loader: DataLoader[Any], sharding: LoaderSharding) -> LoaderStream:
    samplers = (loader.sampler, *_nested(loader.batch_sampler))
    own = any(isinstance(sampler, DistributedSampler) for sampler in samplers)
    if own or says_sharded(loader, loader.dataset):
        return _DataLoaderStream(loader, sharding)
    if type(loader).__iter__ is not DataLoader.__iter__:  # what it does on the way is its own affair
        return _DataLoaderStream(loader, sharding, every=True, shared=True)
    if isinstance(loader.dataset, IterableDataset):
        return _iterable(loader, sharding)
    options = _kept(loader)
    if loader.batch_sampler is None:  # each item is a batch
        items = loader.sampler if sharding.whole else _Every(loader.sampler, sharding)
        order = _Order(items, sharding)
        one_by_one: DataLoader[Any] = DataLoader(loader.dataset, batch_size=None, sampler=order, **options)
        return _DataLoaderStream(one_by_one, sharding, cut=sharding.whole)
    options["collate_fn"] = _SomeOrNone(loader.collate_fn)
    order = _Order(_dealt(loader, sharding), sharding)
    return _DataLoaderStream(DataLoader(loader.dataset, batch_sampler=order, **options), sharding)


class _DataLoaderStream(LoaderStream):
    def __init__(
        self,
        loader: DataLoader[Any],
        sharding: LoaderSharding,
        *,
        every: bool = False,
        cut: bool = False,
        shared: bool = False,
    ) -> None:
        """`every`: of the loader's batches this rank has every size-th; `shared`: all ranks read all."""
        super().__init__(loader, sharding)
        self._draws_alike, self._takes_all = shared, sharding.whole or not every
        self.cut = (cut or (every and sharding.whole)) and sharding.size > 1
        self.fresh = loader.batch_sampler is not None  # an item that is a batch may be the dataset's own

    def length(self) -> float | None:
        """Known only for datasets with an index."""
        if isinstance(self._made.dataset, IterableDataset):
            return None  # what such a dataset says of its length is an estimate
        try:
            return self._share_of(len(self._made))
        except TypeError:  # a sampler without a length
            return None

    def _opened(self, number: int) -> DataLoader[Any]:
        loader: DataLoader[Any] = self._made
        for thing in (*_nested(loader.batch_sampler), loader.sampler):
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(number)
        return loader

    def close(self) -> None:
        private.drop_iterator(self._made)


class _Order:
    """Draws the same order on all ranks."""

    def __init__(self, inner: Iterable[Any], sharding: LoaderSharding) -> None:
        self._inner, self._sharding, self._number = inner, sharding, 0
        # Those of torch's own draw once, at their beginning.
        self._draws_always = not _of_torch(inner)

    def set_epoch(self, number: int) -> None:
        self._number = number
        for thing in _nested(self._inner):
            if not isinstance(thing, _Order | _Every) and hasattr(thing, "set_epoch"):
                thing.set_epoch(number)

    def __iter__(self) -> Iterator[Any]:
        drawing = self._sharding.drawing(self._number)
        with drawing:
            items = iter(self._inner)
            first = [] if self._draws_always else list(itertools.islice(items, 1))
        yield from first
        draws: AbstractContextManager[Any] = drawing if self._draws_always else nullcontext()
        yield from self._sharding.share(items, draws, whole=True)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]


class _Every:
    def __init__(self, sampler: Iterable[Any], sharding: LoaderSharding) -> None:
        self.sampler, self._sharding = sampler, sharding

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.sampler, self._sharding.rank, None, self._sharding.size)

    def __len__(self) -> int:
        return self._sharding.share_of(len(self.sampler))  # type: ignore[arg-type]


class _Sliced:
    """Empty for a batch that is too short for this rank."""

    def __init__(self, sampler: Iterable[Any], sharding: LoaderSharding) -> None:
        self.sampler, self._sharding = sampler, sharding

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self.sampler:
            yield list(batch)[self._sharding.rank :: self._sharding.size]

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class _SomeOrNone:
    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        return self._collate(samples) if len(samples) else None


class _EveryItem(IterableDataset[Any]):
    """In all else a proxy for the dataset."""

    def __init__(self, dataset: IterableDataset[Any], sharding: LoaderSharding) -> None:
        object.__setattr__(self, "_own", (dataset, sharding))

    def __iter__(self) -> Iterator[Any]:
        dataset, sharding = self._own
        return itertools.islice(dataset, sharding.rank, None, sharding.size)

    def __getattr__(self, name: str) -> Any:
        if name == "_own":  # asked for while it is unpickled
            raise AttributeError(name)
        return getattr(self._own[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own[0], name, value)  # functions that prepare worker processes write there

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._own


def _iterable(loader: DataLoader[Any], sharding: LoaderSharding) -> LoaderStream:
    if sharding.whole or sharding.size == 1:
        return _DataLoaderStream(loader, sharding, cut=True, shared=True)
    if sharding.unit == "batches":
        return _DataLoaderStream(loader, sharding, every=True, shared=True)
    dataset = _EveryItem(loader.dataset, sharding)  # type: ignore[arg-type]
    options = {**_kept(loader), "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return _DataLoaderStream(DataLoader(dataset, **options), sharding, shared=True)


def _dealt(loader: DataLoader[Any], sharding: LoaderSharding) -> Iterable[Any]:
    batches: Iterable[Any] = loader.batch_sampler or ()
    if sharding.size == 1:
        return batches
    if sharding.whole:
        return _Sliced(batches, sharding)
    if sharding.unit == "batches" or loader.batch_size is None:  # a batch sampler of the user's own
        return _Every(batches, sharding)
    return BatchSampler(_Every(loader.sampler, sharding), loader.batch_size, loader.drop_last)


def _kept(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}


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
