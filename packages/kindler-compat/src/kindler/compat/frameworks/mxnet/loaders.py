"""Batches of MXNet's own: functions of `(config, kv)`, data iterators, and Gluon's DataLoader.

Every n-th batch is a rank's, of iterators that are the same on all of them. A function that asks `kv` for its
rank makes that rank's own part, which is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import cloudpickle

from kindler.errors import ConfigError
from kindler.frameworks.creators import call, title
from kindler.frameworks.loaders import LoaderSharding, cannot_travel, is_loader, says_sharded


class WorkerStore:
    """What a data creator gets as `kv`: the part of MXNet's kvstore that such functions ask for."""

    type = "dist_sync"  # as MXNet calls training in step

    def __init__(self, rank: int, workers: int) -> None:
        self._rank, self.num_workers = rank, workers
        self.asked = False  # which worker this is

    @property
    def rank(self) -> int:
        self.asked = True
        return self._rank


class Creator:
    """A function of `(config, kv)` in the form that Kindler calls. Travels without importing MXNet."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__qualname__ = title(function).removesuffix("()")
        self._packed = _packed(function)

    def __call__(self, config: dict[str, Any], batch_size: int, rank: int, workers: int) -> Any:
        """What the function makes on this worker; `config["batch_size"]` is the worker's share."""
        store = WorkerStore(rank, workers)
        loader = call(_unpacked(self._packed), {**config, "batch_size": batch_size}, store)
        if store.asked and not says_sharded(loader):
            loader.sharded = True
        return loader


def adapt(data: Any) -> Any:
    """Functions in the form that Kindler calls; anything else as it is."""
    return Creator(data) if callable(data) and not is_loader(data) else data


def pack_loader(loader: Any) -> Callable[[], Any]:
    """A loader as a function that gives it elsewhere."""
    return partial(_unpacked, _packed(loader))


def _packed(value: Any) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(value)
        return data
    except Exception as exc:
        raise ConfigError(cannot_travel(value, str(exc).partition("\n")[0])) from exc


class LoaderStream:
    """One rank's batches."""

    fresh = True  # arrays are copied out of MXNet's memory

    def __init__(self, loader: Any, sharding: LoaderSharding) -> None:
        self._loader, self._sharding = loader, sharding
        self._sharded = says_sharded(loader)
        self.cut = sharding.whole and not self._sharded and sharding.size > 1

    def length(self) -> float | None:
        try:
            length = len(self._loader)
        except TypeError:
            return None
        return length if self._sharded or self.cut else self._sharding.share_of(length)

    def batches(self, number: int) -> Generator[Any, None, None]:
        """One pass; what it draws is the same on all ranks."""
        drawing = self._sharding.drawing(number)
        with drawing:
            if hasattr(self._loader, "reset"):
                self._loader.reset()
            items: Iterator[Any] = iter(self._loader)
        yield from map(_arrays, self._sharding.share(items, drawing, whole=self._sharded or self.cut))

    def close(self) -> None:
        """Iterators have nothing to close."""


def _arrays(batch: Any) -> Any:
    """A batch as (x, y), without the rows that fill up the last one."""
    if not hasattr(batch, "pad"):
        return _numpy(batch)
    rows = batch.data[0].shape[0] - (batch.pad or 0)
    parts = [[array.asnumpy()[:rows] for array in arrays or []] for arrays in (batch.data, batch.label)]
    x, y = (part[0] if len(part) == 1 else tuple(part) for part in parts)
    return (x, y) if parts[1] else (x,)


def _numpy(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_numpy(part) for part in value)
    return value.asnumpy() if hasattr(value, "asnumpy") else value


open_loader = LoaderStream


def _unpacked(packed: bytes) -> Any:
    import kindler.compat.frameworks.mxnet.library  # noqa: F401 - before user code imports MXNet

    return cloudpickle.loads(packed)
