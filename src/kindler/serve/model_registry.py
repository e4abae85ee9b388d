"""Models in memory: which version a name means now, loaded once, swapped when another takes its place.

A name is looked up again while requests come: after `refresh_s` beside them, so that none waits, and before
an answer only if nobody asked for a while. When another version has taken its place, that one is loaded and
called once before it serves; until then the old one does. A version that cannot be loaded changes nothing,
and is tried again after a while that doubles each time.
What was taken out of memory answers the requests it has, and is gone when the last of them is.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from kindler.errors import KindlerError, NotFoundError, fresh
from kindler.serve.auth import bare_name
from kindler.serve.http_errors import Problem
from kindler.serve.model_loading import LoadedModel, ModelLoader
from kindler.serve.payloads import PayloadLog
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats, shown_name
from kindler.storage import Store
from kindler.store import Version

__all__ = ["LoadedModel", "ModelRegistry", "Name", "shown_name"]

_log = logging.getLogger("kindler.serve")
_LONGEST_STALE = 4  # times `refresh_s`: older than that is not served without a look
_MAX_KNOWN = 4096
_FILES_OF_A_PROCESS = 8  # descriptors that a model's process takes here, with some to spare
_FIRST_WAIT_S, _LONGEST_WAIT_S = 2.0, 300.0  # before a version that could not be loaded is tried again

Name: TypeAlias = tuple[str, str, str | None]  # bucket, name, version: as the client wrote them
Key: TypeAlias = tuple[str, str, int]
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Known:
    """What a name meant, and when that was looked up."""

    model: LoadedModel
    checked: float
    refreshing: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class _Failed:
    """A name that was not found, or a version that could not be loaded, and when that is tried again."""

    error: Problem | NotFoundError
    wait_s: float
    until: float


class ModelRegistry:
    def __init__(
        self,
        storage: Store,
        settings: ServeSettings,
        *,
        catalog_threads: Executor,
        lookup_threads: Executor,
        load_threads: Executor,
        stats: Stats,
        unsandboxed: str | None = None,
        payloads: PayloadLog | None = None,
    ) -> None:
        self.storage = storage
        self.settings = settings
        self.stats = stats
        self._catalog_threads = catalog_threads
        self._lookup_threads = lookup_threads
        self._loader = ModelLoader(storage, settings, load_threads, stats, unsandboxed, payloads)
        self._known: OrderedDict[Name, _Known] = OrderedDict()
        self._loaded: dict[Key, LoadedModel] = {}
        self._loading: dict[Key, asyncio.Task[LoadedModel]] = {}
        self._failed: OrderedDict[Key | Name, _Failed] = OrderedDict()
        self._unloaded: set[tuple[str, str]] = set()  # buckets and names that somebody does not want served

    def at_hand(self, name: Name) -> LoadedModel | None:
        """The version that a name means, if it is in memory and was looked up lately."""
        known = self._known.get(name)
        if known is None:
            return None
        now = time.monotonic()
        age = now - known.checked
        if age > self.settings.refresh_s:
            if age > self.settings.refresh_s * _LONGEST_STALE:
                return None
            self._refresh(name, known)
        known.model.used = now
        return known.model

    async def find(self, name: Name) -> LoadedModel:
        """The version that a name means, loaded if it is not."""
        loaded = self.at_hand(name)
        if loaded is not None:
            return loaded
        self._check_unloaded(name[0], name[1])
        known = self._known.get(name)
        if known is not None:
            await asyncio.shield(self._refresh(name, known))
            known = self._known.get(name)
            if known is not None:
                return known.model
        self._check_failed(name)
        try:
            version = await self.version(name, self._lookup_threads)
        except NotFoundError as exc:
            self._remember_failure(name, exc, self.settings.refresh_s)
            raise
        loaded = await self._load(version)
        _remember(self._known, name, _Known(loaded, time.monotonic()))
        return loaded

    async def version(self, name: Name, threads: Executor | None = None) -> Version:
        """The version that a name means now, by the store."""
        bucket, text, version = name
        return await self._in_catalog(
            lambda: self.storage[bucket].models.metadata(text, version=version), threads
        )

    async def numbers(self, version: Version) -> list[int]:
        """The numbers of all versions of a model, oldest first, by the store."""
        history = await self._in_catalog(lambda: self.storage.store.history(version.address))
        return [number for number, _ in history]

    async def default_name(self) -> str:
        """The model of requests that name none."""
        if self.settings.model is not None:
            return self.settings.model
        names = await self._in_catalog(self.storage.models.list)
        if len(names) != 1:
            raise Problem(
                404,
                f"the store has {len(names)} models, but the server has no default model."
                " Hint: start it with --model NAME, or use /models/NAME/invocations.",
            )
        return names[0]

    async def check_ready(self) -> list[str]:
        """The models that hang, if others still answer."""
        await self._in_catalog(lambda: self.storage.buckets)
        loaded = self.loaded()
        stuck = [str(model.version) for model in loaded if model.batcher.is_stuck]
        default = bare_name(self.settings.model or "")
        defaults = [m for m in loaded if m.version.name == default and m.version.bucket == "default"]
        for models in (loaded, defaults):
            if models and all(model.batcher.is_stuck for model in models):
                raise Problem(503, f"unresponsive models: {', '.join(stuck)}.")
        return stuck

    async def moved(self, bucket: str, name: str) -> None:
        """A tag of a name was moved here: returns when what it means now serves."""
        for key in [key for key in self._failed if (key[0], bare_name(key[1])) == (bucket, name)]:
            del self._failed[key]  # whoever moves a tag wants it to be tried
        for (other, text, version), known in list(self._known.items()):
            if other == bucket and bare_name(text) == name:
                if known.refreshing is not None:
                    await asyncio.shield(known.refreshing)  # it may have looked too early
                await asyncio.shield(self._refresh((other, text, version), known))

    async def load(self, bucket: str, name: str) -> LoadedModel:
        """Load a model, also one that was unloaded."""
        version = await self.version((bucket, name, None))
        self._unloaded.discard((bucket, version.name))
        return await self.find((bucket, name, None))

    async def unload(self, bucket: str, name: str) -> None:
        """Take all versions of a model out of memory, and reject its requests until `load`."""
        version = await self.version((bucket, name, None))
        self._unloaded.add((bucket, version.name))
        for key in [key for key in self._loaded if key[:2] == (bucket, version.name)]:
            self._evict(self._loaded[key])
        self._count()

    def is_unloaded(self, bucket: str, name: str) -> bool:
        """Whether a model was unloaded, and not loaded again."""
        return (bucket, bare_name(name)) in self._unloaded

    def loaded(self) -> list[LoadedModel]:
        """What is in memory, the one that was used last first."""
        return sorted(self._loaded.values(), key=lambda model: -model.used)

    @property
    def rows_waiting(self) -> int:
        return sum(model.batcher.rows_waiting for model in self._loaded.values())

    def close(self) -> None:
        for task in [*self._loading.values(), *(k.refreshing for k in self._known.values() if k.refreshing)]:
            task.cancel()
        self._loader.close()
        self._known.clear()
        self._loaded.clear()

    async def _in_catalog(self, read: Callable[[], _T], threads: Executor | None = None) -> _T:
        return await asyncio.get_running_loop().run_in_executor(threads or self._catalog_threads, read)

    def _check_unloaded(self, bucket: str, name: str) -> None:
        if self._unloaded and self.is_unloaded(bucket, name):
            raise Problem(503, f"the model {name[:200]!r} was unloaded from this server.")

    def _check_failed(self, key: Key | Name) -> None:
        failed = self._failed.get(key)
        if failed is not None and time.monotonic() < failed.until:
            raise fresh(failed.error)

    def _remember_failure(self, key: Key | Name, error: Problem | NotFoundError, wait_s: float) -> None:
        _remember(self._failed, key, _Failed(fresh(error), wait_s, time.monotonic() + wait_s))

    def _refresh(self, name: Name, known: _Known) -> asyncio.Task[None]:
        async def refresh() -> None:
            try:
                version = await self.version(name)
                if _key(version) != _key(known.model.version):
                    known.model = await self._load(version)
            except NotFoundError:
                self._known.pop(name, None)
            except (KindlerError, Problem) as exc:
                _log.warning("%s stays at version %s: %s", name[1], known.model.version.number, exc)
            finally:
                known.checked = time.monotonic()
                known.refreshing = None

        if known.refreshing is None:
            known.refreshing = asyncio.create_task(refresh())
        return known.refreshing

    async def _load(self, version: Version) -> LoadedModel:
        key = _key(version)
        if (loaded := self._loaded.get(key)) is not None:
            return loaded
        task = self._loading.get(key)
        if task is None:
            self._check_failed(key)
            task = self._loading[key] = asyncio.create_task(self._load_now(version))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # if nobody waits
        # A client that goes away must not stop what others wait for.
        try:
            loaded = await asyncio.wait_for(asyncio.shield(task), self.settings.timeout_s)
        except asyncio.TimeoutError:
            raise Problem(504, f"{version} is still loading.", {"retry-after": "5"}) from None
        self._check_unloaded(version.bucket, version.name)  # since the load has ended
        return loaded

    async def _load_now(self, version: Version) -> LoadedModel:
        key = _key(version)
        try:
            loaded = await self._loader.load(version, self._device_bytes())
        except Problem as problem:
            before = self._failed.get(key)
            wait_s = _FIRST_WAIT_S if before is None else min(2 * before.wait_s, _LONGEST_WAIT_S)
            self._remember_failure(key, problem, wait_s)
            raise
        finally:
            del self._loading[key]
        self._failed.pop(key, None)
        self._check_unloaded(version.bucket, version.name)  # while it was being loaded
        self.stats.loads["loaded"] += 1
        self._loaded[key] = loaded
        while others := [model for model in self._crowded(loaded.device) if model is not loaded]:
            self._evict(min(others, key=lambda model: (model.batcher.rows_waiting > 0, model.used)))
        self._count()
        return loaded

    def _crowded(self, device: str | None) -> list[LoadedModel]:
        """Models of which one is evicted: all if they take too much memory or too many files, else those of a
        full GPU."""
        every = list(self._loaded.values())
        if sum(model.size for model in every) > self.settings.memory_bytes:
            return every
        processes = sum(model.pool.processes for model in every)
        if processes * _FILES_OF_A_PROCESS > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            return every
        room, there = self._loader.devices.room(device), [m for m in every if m.device == device]
        return there if room is not None and sum(m.device_bytes for m in there) > room else []

    def _device_bytes(self) -> dict[int, int]:
        """What models take of each GPU, by its number."""
        taken: dict[int, int] = {}
        for model in self._loaded.values():
            number = (model.device or "").partition(":")[2]
            if number:
                taken[int(number)] = taken.get(int(number), 0) + max(1, model.device_bytes)
        return taken

    def _count(self) -> None:
        self.stats.count_loaded(
            (shown_name(m.version), m.version.number, m.size, m.device, m.device_bytes)
            for m in self._loaded.values()
        )

    def _evict(self, model: LoadedModel) -> None:
        del self._loaded[_key(model.version)]
        for name in [name for name, known in self._known.items() if known.model is model]:
            del self._known[name]
        _log.info("evicted %s from memory", model.version)


def _remember(known: OrderedDict[Any, Any], name: Any, value: Any) -> None:
    known[name] = value
    known.move_to_end(name)
    while len(known) > _MAX_KNOWN:
        known.popitem(last=False)


def _key(version: Version) -> Key:
    return version.bucket, version.name, version.number
