"""Models in memory: which version a name means now, loaded once, swapped when another takes its place.

A name is looked up again while requests come: after `refresh_s` beside them, so that none waits, and before
an answer only if nobody asked for a while. When another version has taken its place, that one is loaded and
called once before it serves; until then the old one does. A version that cannot be loaded changes nothing,
and is tried again after a while that doubles each time.
What was taken out of memory answers the requests it has, and is gone when the last of them is.

A model is loaded and called by processes of its own (`model_pool.py`), or, without isolation, here.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

from kindler.errors import KindlerError, MissingExtraError, NotFoundError, UntrustedError, fresh
from kindler.models.loaded import load
from kindler.models.predictor import Predictor
from kindler.omega import Omega
from kindler.sandbox.child import RemoteError
from kindler.sandbox.process import ProcessLost, SandboxProcess
from kindler.serve.batching import MOST_LOST, Batcher
from kindler.serve.http_errors import Problem, as_problem
from kindler.serve.model_pool import Lost, ModelPool
from kindler.serve.model_process import DescribedModel, described, warmed
from kindler.serve.model_start import DevicePlacement, Devices, limits_of, start_of
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats, VersionStats
from kindler.serve.threads import Threads
from kindler.store import Version

_log = logging.getLogger("kindler.serve")
_LONGEST_STALE = 4  # times `refresh_s`: older than that is not served without a look
_MOST_KNOWN = 4096
_LOADS = 2
_FILES_OF_A_PROCESS = 8  # descriptors that a model's process takes here, with some to spare
_MOVES = 4
_GPU_GROWTH, _GPU_SPARE = 4, 4 << 30  # what a process may say that it has of a GPU, by its files
_FIRST_WAIT_S, _LONGEST_WAIT_S = 2.0, 300.0  # before a version that could not be loaded is tried again

Name: TypeAlias = tuple[str, str, str | None]  # bucket, name, version: as the client wrote them
Key: TypeAlias = tuple[str, str, int]
_Found = TypeVar("_Found")


@dataclass(slots=True, eq=False)
class Resident:
    """A version in memory.

    Attributes:
        version: Which.
        servable: The model.
        batcher: The queue in front of it.
        stats: Its counters.
        size: What it takes of the memory for models.
        pool: Its processes; None if it is in the server's own.
        device: Where it computes, "cpu" or "cuda:N"; None if that is left to its code.
        used: When it was last asked.
    """

    version: Version
    servable: Predictor
    batcher: Batcher
    stats: VersionStats
    size: int
    pool: ModelPool | None = None
    device: str | None = None
    used: float = field(default_factory=time.monotonic)

    @property
    def device_bytes(self) -> int:
        """What it takes of its GPU's memory."""
        return 0 if self.pool is None else self.pool.device_bytes


@dataclass(slots=True, eq=False)
class _Known:
    resident: Resident
    checked: float
    looking: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class _Failed:
    """A version that could not be loaded, and when that is tried again."""

    problem: Problem
    wait_s: float
    until: float


class Residents:
    """The models of a server.

    Args:
        omega: The store.
        settings: How much memory, how fresh.
        looks: Where names that are known are looked up again.
        asks: Where other names are looked up, which may be many that there are not.
        loads: Where models are read. Only a few at a time are; one that takes too long is not waited for.
        stats: The counters.
        lacking: Why processes cannot be sandboxed here; None if they can.
    """

    def __init__(
        self,
        omega: Omega,
        settings: ServeSettings,
        *,
        looks: Executor,
        asks: Executor,
        loads: Executor,
        stats: Stats,
        lacking: str | None = None,
    ) -> None:
        self._omega = omega
        self._settings = settings
        self._looks = looks
        self._asks = asks
        self._loads = loads
        self._stats = stats
        self._known: OrderedDict[Name, _Known] = OrderedDict()
        self._loaded: OrderedDict[Key, Resident] = OrderedDict()
        self._loading: dict[Key, asyncio.Task[Resident]] = {}
        self._threads: WeakSet[Threads] = WeakSet()
        self._pools: WeakSet[ModelPool] = WeakSet()
        self._moves = Threads(_MOVES, "kindler-move")
        self._lacking = lacking
        self._devices = Devices(settings)
        self._room = asyncio.Semaphore(_LOADS)
        self._failed: OrderedDict[Key, _Failed] = OrderedDict()
        self._missing: OrderedDict[Name, tuple[float, NotFoundError]] = OrderedDict()
        self._unloaded: set[tuple[str, str]] = set()  # buckets and names that somebody does not want served

    def at_hand(self, name: Name) -> Resident | None:
        """The version that a name means, if it is in memory and was looked up lately."""
        known = self._known.get(name)
        if known is None:
            return None
        now = time.monotonic()
        age = now - known.checked
        if age > self._settings.refresh_s:
            if age > self._settings.refresh_s * _LONGEST_STALE:
                return None
            self._look_again(name, known)
        known.resident.used = now
        return known.resident

    async def find(self, name: Name) -> Resident:
        """The version that a name means, loaded if it is not.

        Raises:
            KindlerError: There is none, or the name cannot be one.
            Problem: It cannot be loaded.
        """
        found = self.at_hand(name)
        if found is not None:
            return found
        self._check_unloaded(name[0], name[1])
        known = self._known.get(name)
        if known is not None:
            await asyncio.shield(self._look_again(name, known))
            known = self._known.get(name)
            if known is not None:
                return known.resident
        resident = await self._load(await self._asked(name))
        _remember(self._known, name, _Known(resident, time.monotonic()))
        return resident

    async def _asked(self, name: Name) -> Version:
        """The version that a name means which nobody asked for lately."""
        until, error = self._missing.get(name, (0.0, None))
        if error is not None and time.monotonic() < until:
            raise fresh(error)
        try:
            return await self.version(name, self._asks)
        except NotFoundError as exc:
            _remember(self._missing, name, (time.monotonic() + self._settings.refresh_s, fresh(exc)))
            raise

    async def version(self, name: Name, executor: Executor | None = None) -> Version:
        """The version that a name means now, by the store."""
        bucket, text, version = name
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            executor or self._looks, lambda: self._omega[bucket].models.metadata(text, version=version)
        )

    async def numbers(self, version: Version) -> list[int]:
        """The numbers of all versions of a model, oldest first, by the store."""
        history = partial(self._omega.store.history, version.address)
        found = await asyncio.get_running_loop().run_in_executor(self._looks, history)
        return [number for number, _ in found]

    async def moved(self, bucket: str, name: str) -> None:
        """An alias of a name was moved here: returns when what it means now serves."""
        for key in [key for key in self._failed if key[:2] == (bucket, name)]:
            del self._failed[key]  # whoever moves an alias wants it to be tried
        for (other, text, version), known in list(self._known.items()):
            if other == bucket and text.partition("@")[0].rstrip("^") == name:
                if known.looking is not None:
                    await asyncio.shield(known.looking)  # it may have looked too early
                await asyncio.shield(self._look_again((other, text, version), known))

    async def load(self, bucket: str, name: str) -> Resident:
        """Load a model, also one that was unloaded."""
        found = await self.version((bucket, name, None))
        self._unloaded.discard((bucket, found.name))
        return await self.find((bucket, name, None))

    async def unload(self, bucket: str, name: str) -> None:
        """Take all versions of a model out of memory, and refuse its requests until `load`.

        Raises:
            NotFoundError: There is no such model.
        """
        found = await self.version((bucket, name, None))
        self._unloaded.add((bucket, found.name))
        for key in [key for key in self._loaded if key[:2] == (bucket, found.name)]:
            self._evict(self._loaded[key])
        self._count()

    def _check_unloaded(self, bucket: str, name: str) -> None:
        if self._unloaded and self.is_unloaded(bucket, name):
            raise Problem(503, f"the model {name[:200]!r} was unloaded from this server.")

    def is_unloaded(self, bucket: str, name: str) -> bool:
        """Whether a model was unloaded, and not loaded again."""
        return (bucket, name.partition("@")[0].rstrip("^")) in self._unloaded

    def shown(self) -> list[Resident]:
        """What is in memory, the one that was used last first."""
        return sorted(self._loaded.values(), key=lambda resident: -resident.used)

    @property
    def rows_waiting(self) -> int:
        """Rows in all queues."""
        return sum(resident.batcher.rows_waiting for resident in self._loaded.values())

    def close(self) -> None:
        """Forget everything."""
        for task in [*self._loading.values(), *(k.looking for k in self._known.values() if k.looking)]:
            task.cancel()
        for pool in list(self._pools):
            pool.close()
        for threads in [*self._threads, self._moves]:
            threads.shutdown(cancel_futures=True)
        self._known.clear()
        self._loaded.clear()

    def _look_again(self, name: Name, known: _Known) -> asyncio.Task[None]:
        if known.looking is None:
            known.looking = asyncio.create_task(self._refresh(name, known))
        return known.looking

    async def _refresh(self, name: Name, known: _Known) -> None:
        try:
            version = await self.version(name)
            if _key(version) != _key(known.resident.version):
                known.resident = await self._load(version)
        except NotFoundError:
            self._known.pop(name, None)
        except (KindlerError, Problem) as exc:
            _log.warning("%s stays at version %s: %s", name[1], known.resident.version.number, exc)
        finally:
            known.checked = time.monotonic()
            known.looking = None

    async def _load(self, version: Version) -> Resident:
        key = _key(version)
        found = self._loaded.get(key)
        if found is not None:
            self._loaded.move_to_end(key)
            return found
        task = self._loading.get(key)
        failed = self._failed.get(key)
        if task is None and failed is not None and time.monotonic() < failed.until:
            raise fresh(failed.problem)
        if task is None:
            task = asyncio.create_task(self._loaded_now(version))
            self._loading[key] = task
            task.add_done_callback(lambda done: self._load_ended(key, done))
        # A client that goes away must not stop what others wait for.
        try:
            resident = await asyncio.wait_for(asyncio.shield(task), self._settings.timeout_s)
        except asyncio.TimeoutError:
            raise Problem(504, f"{version} is still being loaded.", {"retry-after": "5"}) from None
        self._check_unloaded(version.bucket, version.name)  # since the load has ended
        return resident

    def _load_ended(self, key: Key, done: asyncio.Task[Resident]) -> None:
        self._loading.pop(key, None)
        if not done.cancelled():
            done.exception()  # whoever waits has it; nobody may be left

    async def _loaded_now(self, version: Version) -> Resident:
        key = _key(version)
        try:
            if self._settings.isolation == "none":
                resident = self._here(version, *await self._in_turn(self._read_in_thread(version)))
            else:
                resident = await self._apart(version)
        except Exception as exc:
            self._stats.loads.labels("failed").inc()
            problem = _not_loaded(version, exc)
            before = self._failed.get(key)
            wait_s = _FIRST_WAIT_S if before is None else min(2 * before.wait_s, _LONGEST_WAIT_S)
            _remember(self._failed, key, _Failed(fresh(problem), wait_s, time.monotonic() + wait_s))
            raise problem from exc
        self._failed.pop(key, None)
        self._check_unloaded(version.bucket, version.name)  # while it was being loaded
        self._stats.loads.labels("loaded").inc()
        self._loaded[key] = resident
        self._make_room(resident)
        return resident

    def _here(self, version: Version, servable: Predictor, joins: dict[str, bool | None]) -> Resident:
        """A model in this process."""
        stats = self._stats.version(shown_name(version), version.number)
        threads = Threads(self._settings.batches + MOST_LOST, f"kindler-call-{version.name}")
        self._threads.add(threads)
        batcher = Batcher(
            servable.call,
            # Threads of its own: if it hangs, nobody else waits.
            executor=threads,
            settings=self._settings,
            joins=joins,
            observe=stats.measured,
            steady=servable.steady,
        )
        return Resident(version, servable, batcher, stats, max(version.size, servable.size))

    async def _apart(self, version: Version) -> Resident:
        """A model in processes of its own."""
        place = self._devices.place(version, self._device_bytes())
        limits = limits_of(version, self._settings, place)
        pool = ModelPool(
            str(version),
            partial(self._process, version, place),
            most=limits.processes,
        )
        self._pools.add(pool)
        started = time.perf_counter()
        model: DescribedModel = await self._in_turn(pool.open())
        _log.info("loaded %s in %.2f s", version, time.perf_counter() - started)
        stats = self._stats.version(shown_name(version), version.number)
        pool.when_lost = stats.lost
        batcher = Batcher(remote=pool, settings=self._settings, joins=model.joins, observe=stats.measured)
        # Whoever still has the batcher has requests in it; the pool must not be what keeps it.
        pump = weakref.WeakMethod(batcher.pump)
        pool.when_free = partial(_call_if_there, pump)
        weakref.finalize(batcher, _close_soon, pool, asyncio.get_running_loop()).atexit = False
        # As it is seen from here: what the process says of itself may be anything.
        size = max(version.size, pool.own_bytes)
        return Resident(version, model.predictor, batcher, stats, size, pool, device=place.name(model.device))

    async def _process(
        self, version: Version, place: DevicePlacement, lost: Lost
    ) -> tuple[SandboxProcess, DescribedModel]:
        """Start a process that has loaded a version; its files are there as long as that takes."""
        loop = asyncio.get_running_loop()
        with ExitStack() as later:
            held = ExitStack()
            later.callback(self._beside, held.close)
            folder = await loop.run_in_executor(
                self._loads, held.enter_context, self._omega.store.files(version)
            )
            start = start_of(version, folder, self._settings, lacking=self._lacking, place=place)
            process, said = await SandboxProcess.started(
                start, loads=self._loads, moves=self._moves, lost=lost
            )
            try:
                model = described(said)
            except Exception as exc:
                process.end()
                raise ProcessLost(f"sent a malformed reply ({exc})", malformed=True) from exc
            most = _GPU_GROWTH * version.size + _GPU_SPARE
            return process, replace(model, device_bytes=min(model.device_bytes, most))

    def _beside(self, work: Callable[[], None]) -> None:
        try:
            self._loads.submit(work)
        except RuntimeError:
            work()  # the server is stopping

    async def _in_turn(self, loading: Coroutine[Any, Any, _Found]) -> _Found:
        """Wait for what loads a model, once it is its turn."""
        loop = asyncio.get_running_loop()
        try:
            await self._room.acquire()
        except BaseException:
            loading.close()
            raise
        held = [True]

        def let_go() -> None:
            if held and held.pop():
                self._room.release()

        timer = loop.call_later(self._settings.timeout_s, let_go)  # it may never end
        try:
            return await loading
        finally:
            timer.cancel()
            let_go()

    async def _read_in_thread(self, version: Version) -> tuple[Predictor, dict[str, bool | None]]:
        return await asyncio.get_running_loop().run_in_executor(self._loads, self._read, version)

    def _read(self, version: Version) -> tuple[Predictor, dict[str, bool | None]]:
        started = time.perf_counter()
        servable = load(self._omega.store, version, trusted=self._settings.trusted).predictor
        alone = version.name in self._settings.alone or version.attributes.get("batching") is False
        joins = warmed(servable, alone=alone)
        _log.info("loaded %s in %.2f s", version, time.perf_counter() - started)
        return servable, joins

    def _make_room(self, newest: Resident) -> None:
        while others := [r for r in self._crowded(newest.device) if r is not newest]:
            self._evict(min(others, key=lambda r: (r.batcher.rows_waiting > 0, r.used)))
        self._count()

    def _crowded(self, device: str | None) -> list[Resident]:
        """Models of which one has to go: all if they take too much memory or too many files, else those of a
        full GPU."""
        every = list(self._loaded.values())
        if sum(r.size for r in every) > self._settings.memory_bytes:
            return every
        processes = sum(r.pool.slots for r in every if r.pool is not None)
        if processes * _FILES_OF_A_PROCESS > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            return every
        room, there = self._devices.room(device), [r for r in every if r.device == device]
        return there if room is not None and sum(r.device_bytes for r in there) > room else []

    def _device_bytes(self) -> dict[int, int]:
        """What models take of each GPU, by its number."""
        taken: dict[int, int] = {}
        for resident in self._loaded.values():
            number = (resident.device or "").partition(":")[2]
            if number:
                taken[int(number)] = taken.get(int(number), 0) + max(1, resident.device_bytes)
        return taken

    def _count(self) -> None:
        self._stats.loaded.set(len(self._loaded))
        self._stats.loaded_bytes.set(sum(r.size for r in self._loaded.values()))
        self._stats.count_devices(
            (shown_name(r.version), r.version.number, r.device, r.device_bytes) for r in self._loaded.values()
        )

    def _evict(self, resident: Resident) -> None:
        del self._loaded[_key(resident.version)]
        for name in [name for name, known in self._known.items() if known.resident is resident]:
            del self._known[name]
        _log.info("took %s out of memory", resident.version)


def shown_name(version: Version) -> str:
    """A model's name in counters: that of another bucket begins with the bucket's."""
    return version.name if version.bucket == "default" else f"{version.bucket}:{version.name}"


def _remember(known: OrderedDict[Any, Any], name: Any, value: Any) -> None:
    known[name] = value
    known.move_to_end(name)
    while len(known) > _MOST_KNOWN:
        known.popitem(last=False)


def _key(version: Version) -> Key:
    return version.bucket, version.name, version.number


def _not_loaded(version: Version, error: Exception) -> Problem:
    if isinstance(error, UntrustedError):
        reason = f"the server does not load it: {error.what} was refused: {error.reason}."
        return Problem(403, f"{version} is not served: {reason}")
    if isinstance(error, MissingExtraError):
        return Problem(501, f"{version} cannot be loaded here: {error}")
    if isinstance(error, RemoteError | ProcessLost):
        reason = str(error) if isinstance(error, ProcessLost) else f"{error.name}: {error}"
        _log.error("loading %s failed: %s", version, reason)
        return Problem(503, f"{version} cannot be loaded: {reason[:500]}", {"retry-after": "5"})
    if not isinstance(error, KindlerError):
        _log.exception("loading %s failed", version, exc_info=error)
    known = as_problem(error)
    shown = known.message if known is not None else f"{type(error).__name__}: {error}"
    return Problem(503, f"{version} cannot be loaded: {shown}", {"retry-after": "5"})


def _close_soon(pool: ModelPool, loop: asyncio.AbstractEventLoop) -> None:
    """Whichever thread notices that nobody needs it."""
    try:
        loop.call_soon_threadsafe(pool.close)
    except RuntimeError:
        pass  # the server has ended, and its processes with it


def _call_if_there(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    call = method()
    if call is not None:
        call()
