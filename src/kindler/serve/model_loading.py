"""One version of a model made ready to be called: in processes of its own, or without isolation here."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from kindler.errors import KindlerError, MissingExtraError, UntrustedError
from kindler.models.loaded import load
from kindler.models.predictor import Predictor
from kindler.omega import Omega
from kindler.sandbox.child import RemoteError
from kindler.sandbox.process import ProcessLost, SandboxProcess
from kindler.serve.batching import Batcher
from kindler.serve.http_errors import Problem, as_problem
from kindler.serve.local_pool import LocalPool
from kindler.serve.model_pool import Lost, ModelPool
from kindler.serve.model_process import DescribedModel, described, warmed
from kindler.serve.model_start import DevicePlacement, Devices, limits_of, start_of
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats
from kindler.serve.threads import Threads
from kindler.store import Version

_log = logging.getLogger("kindler.serve")
_CONCURRENT_LOADS = 2
_COPY_THREADS = 4
_GPU_GROWTH, _GPU_SPARE = 4, 4 << 30  # what a process may say that it has of a GPU, by its files
_Loaded = TypeVar("_Loaded")


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A version in memory.

    Attributes:
        version: Which.
        predictor: The model.
        batcher: The queue in front of it.
        size: What it takes of the memory for models.
        pool: Its processes; None if it is in the server's own.
        device: Where it computes, "cpu" or "cuda:N"; None if that is left to its code.
        used: When it was last asked.
    """

    version: Version
    predictor: Predictor
    batcher: Batcher
    size: int
    pool: ModelPool | None = None
    device: str | None = None
    used: float = field(default_factory=time.monotonic)

    @property
    def device_bytes(self) -> int:
        """What it takes of its GPU's memory."""
        return 0 if self.pool is None else self.pool.device_bytes


class ModelLoader:
    """Loads versions, a few at a time; one that takes too long is not waited for."""

    def __init__(
        self, omega: Omega, settings: ServeSettings, threads: Executor, stats: Stats, unsandboxed: str | None
    ) -> None:
        self._omega = omega
        self._settings = settings
        self._threads = threads
        self._stats = stats
        self._unsandboxed = unsandboxed
        self.devices = Devices(settings)
        self._copy_threads = Threads(_COPY_THREADS, "kindler-copy")
        self._pools: WeakSet[ModelPool | LocalPool] = WeakSet()
        self._turns = asyncio.Semaphore(_CONCURRENT_LOADS)

    async def load(self, version: Version, device_bytes: Mapping[int, int]) -> LoadedModel:
        """Load a version, and call it once; `device_bytes` is what loaded models have of each GPU."""
        started = time.perf_counter()
        try:
            if self._settings.isolation == "none":
                loaded = await self._load_here(version)
            else:
                loaded = await self._load_apart(version, device_bytes)
        except Exception as exc:
            self._stats.loads["failed"] += 1
            raise _as_problem(version, exc) from exc
        _log.info("loaded %s in %.2f s", version, time.perf_counter() - started)
        return loaded

    def close(self) -> None:
        for pool in list(self._pools):
            pool.close()
        self._copy_threads.shutdown(cancel_futures=True)

    async def _load_here(self, version: Version) -> LoadedModel:
        def read() -> tuple[Predictor, Mapping[str, bool | None]]:
            predictor = load(self._omega.store, version, trusted=self._settings.trusted).predictor
            alone = version.name in self._settings.alone or version.attributes.get("batching") is False
            return predictor, warmed(predictor, alone=alone)

        async def reading() -> tuple[Predictor, Mapping[str, bool | None]]:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)

        predictor, batchable = await self._in_turn(reading())
        pool = LocalPool(predictor.call, self._settings)
        self._pools.add(pool)
        stats = self._stats.version(shown_name(version), version.number)
        batcher = Batcher(pool, self._settings, self._declared(version, batchable), stats.called)
        return LoadedModel(version, predictor, batcher, max(version.size, predictor.size))

    async def _load_apart(self, version: Version, device_bytes: Mapping[int, int]) -> LoadedModel:
        place = self.devices.place(version, device_bytes)
        limits = limits_of(version, self._settings, place)
        pool = ModelPool(str(version), partial(self._process, version, place), most=limits.processes)
        self._pools.add(pool)
        model: DescribedModel = await self._in_turn(pool.open())
        stats = self._stats.version(shown_name(version), version.number)
        pool.when_lost = stats.lost
        batcher = Batcher(pool, self._settings, self._declared(version, model.joins), stats.called)
        # Whoever still has the batcher has requests in it; the pool must not be what keeps it.
        pool.when_free = partial(_call_if_alive, weakref.WeakMethod(batcher.pump))
        weakref.finalize(batcher, _close_soon, pool, asyncio.get_running_loop()).atexit = False
        # As it is seen from here: what the process says of itself may be anything.
        size = max(version.size, pool.own_bytes)
        return LoadedModel(version, model.predictor, batcher, size, pool, place.name(model.device))

    def _declared(self, version: Version, shown: Mapping[str, bool | None]) -> Mapping[str, bool | None]:
        """Which methods can be batched: as the version was stored, or as loading it has shown."""
        if version.attributes.get("batching") is True and version.name not in self._settings.alone:
            return dict.fromkeys(shown, True)
        return shown

    async def _process(
        self, version: Version, place: DevicePlacement, lost: Lost
    ) -> tuple[SandboxProcess, DescribedModel]:
        """Start a process that has loaded a version; its files are there as long as that takes."""
        loop = asyncio.get_running_loop()
        with ExitStack() as later:
            files = ExitStack()
            later.callback(self._close_files, files)
            folder = await loop.run_in_executor(
                self._threads, files.enter_context, self._omega.store.files(version)
            )
            start = start_of(version, folder, self._settings, lacking=self._unsandboxed, place=place)
            process, description = await SandboxProcess.started(
                start, loads=self._threads, moves=self._copy_threads, lost=lost
            )
            try:
                model = described(description)
            except Exception as exc:
                process.end()
                raise ProcessLost(f"sent a malformed reply ({exc})", malformed=True) from exc
            most = _GPU_GROWTH * version.size + _GPU_SPARE
            return process, replace(model, device_bytes=min(model.device_bytes, most))

    def _close_files(self, files: ExitStack) -> None:
        try:
            self._threads.submit(files.close)
        except RuntimeError:
            files.close()  # the server is stopping

    async def _in_turn(self, loading: Coroutine[Any, Any, _Loaded]) -> _Loaded:
        """Wait for what loads a model, once it is its turn."""
        try:
            await self._turns.acquire()
        except BaseException:
            loading.close()
            raise
        taken = [True]

        def release() -> None:
            if taken and taken.pop():
                self._turns.release()

        timer = asyncio.get_running_loop().call_later(self._settings.timeout_s, release)  # it may never end
        try:
            return await loading
        finally:
            timer.cancel()
            release()


def shown_name(version: Version) -> str:
    """A model's name in counters: that of another bucket begins with the bucket's."""
    return version.name if version.bucket == "default" else f"{version.bucket}:{version.name}"


def _as_problem(version: Version, error: Exception) -> Problem:
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
    reason = known.message if known is not None else f"{type(error).__name__}: {error}"
    return Problem(503, f"{version} cannot be loaded: {reason}", {"retry-after": "5"})


def _close_soon(pool: ModelPool, loop: asyncio.AbstractEventLoop) -> None:
    """Whichever thread notices that nobody needs it."""
    try:
        loop.call_soon_threadsafe(pool.close)
    except RuntimeError:
        pass  # the server has ended, and its processes with it


def _call_if_alive(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    call = method()
    if call is not None:
        call()
