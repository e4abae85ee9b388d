"""One version of a model made ready to be called: in processes of its own, or without isolation here.

A model's processes see one GPU or none, so whatever framework it is of finds no other. Nothing here asks
CUDA: the driver's own files say which GPUs there are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakSet

from kindler.data.drift import DriftRule
from kindler.data.statistics import STATISTICS, Statistics
from kindler.engine.placement import FRUGAL, VISIBLE_GPUS, gpu_memory, is_device, machine_gpus, usable_cores
from kindler.errors import ConfigError, KindlerError, MissingExtraError, UntrustedError
from kindler.models.loaded import load, process_recipe
from kindler.models.predictor import BatchPlan, Predictor
from kindler.models.registry import MODEL_KINDS
from kindler.models.signature import Signature
from kindler.sandbox.child import RemoteError
from kindler.sandbox.process import ProcessLost, SandboxProcess, Start
from kindler.serve.answers import Answers
from kindler.serve.batching import Batcher
from kindler.serve.drift import DriftWindow
from kindler.serve.http_errors import Problem, as_problem
from kindler.serve.model_pool import LocalPool, Lost, ModelPool, Pool
from kindler.serve.model_process import DescribedModel, described, readied
from kindler.serve.payloads import PayloadLog, PayloadSample
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats, shown_name
from kindler.serve.threads import Threads
from kindler.storage import Store
from kindler.store import Version
from kindler.types import GENERATING

_log = logging.getLogger("kindler.serve")
_CONCURRENT_LOADS = 2
_COPY_THREADS = 4
_GPU_GROWTH, _GPU_SPARE = 4, 4 << 30  # what a process may say that it has of a GPU, by its files
_GPU_CALLS = 2  # of a process that can copy a batch while it computes another
_GPU_PROCESSES = (
    2  # of a model that cannot: while one computes, the other's batch is on its way there or back
)
_GPU_SHARE = 0.9  # of a GPU's memory: contexts of CUDA and batches need some, too
_MAX_PROCESSES = 8  # if not set; each has the whole model
_IDLE_S = 3600.0
_LEAST_OUTPUTS = 1 << 30
# Memory that a large batch took is given back: a server lives long, and has many models.
_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A version in memory.

    Attributes:
        batcher: The queue in front of it.
        pool: What runs its calls.
        size: What it takes of the memory for models.
        device: Where it computes, "cpu" or "cuda:N"; None if that is left to its code.
        plan: How it was prepared for batches.
        used: When it was last asked.
        drift: The rows it is asked, beside those it was trained on; None if these are not known.
        answers: The prompts that it answers, if it generates text.
        payloads: What keeps some of its requests; None if that is off.
    """

    version: Version
    predictor: Predictor
    batcher: Batcher
    pool: Pool
    size: int
    device: str | None
    plan: BatchPlan
    used: float = field(default_factory=time.monotonic)
    drift: DriftWindow | None = None
    answers: Answers | None = None
    payloads: PayloadSample | None = None

    @property
    def device_bytes(self) -> int:
        """What it takes of its GPU's memory."""
        return self.pool.device_bytes


class ModelLoader:
    """Loads versions, a few at a time; one that takes too long is not waited for.

    `unsandboxed` is why processes cannot be sandboxed here; None if they can.
    """

    def __init__(
        self,
        storage: Store,
        settings: ServeSettings,
        threads: Executor,
        stats: Stats,
        unsandboxed: str | None,
        payloads: PayloadLog | None,
    ) -> None:
        self._storage = storage
        self._settings = settings
        self._threads = threads
        self._stats = stats
        self._unsandboxed = unsandboxed
        self._payloads = payloads
        self.devices = Devices(settings)
        self._copy_threads = Threads(_COPY_THREADS, "kindler-copy")
        self._pools: WeakSet[Pool] = WeakSet()
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
        loaded.drift = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._window, version, loaded.predictor.signature
        )
        if self._payloads is not None:
            counts = self._stats.version(shown_name(version), version.number).payloads
            loaded.payloads = self._payloads.sample(version, loaded.predictor.signature, counts)
        _log.info("loaded %s in %.2f s", version, time.perf_counter() - started)
        return loaded

    def close(self) -> None:
        for pool in list(self._pools):
            pool.close()
        self._copy_threads.shutdown(cancel_futures=True)

    def _window(self, version: Version, signature: Signature) -> DriftWindow | None:
        """Statistics that cannot be read keep nobody from predicting."""
        settings, files = self._settings, [file for file in version.files if file.path == STATISTICS]
        if not settings.drift_rows or not files or not version.meta.get("statistics"):
            return None
        try:
            with self._storage.store.stage() as folder:
                self._storage.store.copy_files(replace(version, files=tuple(files)), folder)
                known = Statistics.read(folder / STATISTICS)
        except (KindlerError, OSError) as exc:
            _log.warning("the drift of %s is not watched: %s", version, exc)
            return None
        rule = DriftRule(psi=settings.drift_psi, ks=settings.drift_ks)
        return DriftWindow(known, signature, rule, settings.drift_rows)

    async def _load_here(self, version: Version) -> LoadedModel:
        def read() -> DescribedModel:
            predictor = load(self._storage.store, version, trusted=self._settings.trusted).predictor
            stored = _prepared(version, self._settings)
            batchable, plan = readied(predictor, stored, most_rows=self._settings.batch_rows)
            return DescribedModel(predictor, batchable, plan=plan)

        loop = asyncio.get_running_loop()
        model = await self._in_turn(lambda: loop.run_in_executor(self._threads, read))
        pool = LocalPool(model.predictor.call, self._settings, step=model.predictor.step)
        return self._ready(version, model, pool, None)

    async def _load_apart(self, version: Version, device_bytes: Mapping[int, int]) -> LoadedModel:
        place = self.devices.place(version, device_bytes)
        start, processes = start_of(version, self._settings, place, self._unsandboxed)
        pool = ModelPool(str(version), partial(self._process, version, start), most=processes)
        self._pools.add(pool)
        model = await self._in_turn(pool.open)
        if model.calls > 1 and self._settings.processes is None:
            pool.most = 1  # more would only take turns on the GPU
        return self._ready(version, model, pool, place.name(model.device))

    def _ready(self, version: Version, model: DescribedModel, pool: Pool, device: str | None) -> LoadedModel:
        self._pools.add(pool)
        stats = self._stats.version(shown_name(version), version.number)
        batcher = Batcher(pool, self._settings, model.batchable, stats.called, sizes=model.plan.sizes)
        pool.when_lost = stats.lost
        answers = None
        if (model.predictor.text or {}).get("task") in GENERATING:
            answers = Answers(pool, self._settings, stats.model, keep=batcher)
        # Whoever still has the batcher has requests in it; the pool must not be what keeps it.
        queues = [weakref.ref(queue) for queue in (batcher, answers) if queue is not None]

        def pump() -> None:
            for queue in queues:
                if (found := queue()) is not None:
                    found.pump()

        pool.when_free = pump
        weakref.finalize(batcher, _close_soon, pool, asyncio.get_running_loop()).atexit = False
        # What a process says of itself may be anything: its size is what is seen from here.
        size = max(version.size, pool.own_bytes, model.predictor.size)
        return LoadedModel(version, model.predictor, batcher, pool, size, device, model.plan, answers=answers)

    async def _process(
        self, version: Version, start: Start, lost: Lost
    ) -> tuple[SandboxProcess, DescribedModel]:
        """Start a process that has loaded a version; its files are there as long as that takes."""
        files = self._storage.store.files(version)
        folder = str(await asyncio.get_running_loop().run_in_executor(self._threads, files.__enter__))
        try:
            start = replace(start, options={**start.options, "folder": folder}, readable=(folder,))
            process, description = await SandboxProcess.started(
                start, loads=self._threads, moves=self._copy_threads, lost=lost
            )
        finally:
            leave = partial(files.__exit__, None, None, None)
            try:
                self._threads.submit(leave)
            except RuntimeError:
                leave()  # the server is stopping
        try:
            model = described(description)
        except Exception as exc:
            process.end()
            raise ProcessLost(f"sent a malformed reply ({exc})", malformed=True) from exc
        most = _GPU_GROWTH * version.size + _GPU_SPARE
        return process, replace(model, device_bytes=min(model.device_bytes, most))

    async def _in_turn(self, begin: Callable[[], Awaitable[DescribedModel]]) -> DescribedModel:
        """Load a model once it is its turn; others get theirs even if that never ends."""
        async with self._turns:
            loading = asyncio.ensure_future(begin())
            try:
                await asyncio.wait([loading], timeout=self._settings.timeout_s)
            except asyncio.CancelledError:
                loading.cancel()
                raise
        return await loading


def _as_problem(version: Version, error: Exception) -> Problem:
    if isinstance(error, UntrustedError):
        reason = f"the server does not load it: {error.what} was rejected: {error.reason}."
        return Problem(403, f"{version} is not served: {reason}")
    if isinstance(error, MissingExtraError):
        return Problem(501, f"{version} cannot be loaded here: {error}")
    known = as_problem(error)
    if isinstance(error, RemoteError | ProcessLost):
        reason = (str(error) if isinstance(error, ProcessLost) else f"{error.name}: {error}")[:500]
        _log.error("loading %s failed: %s", version, reason)
    else:
        reason = known.message if known is not None else f"{type(error).__name__}: {error}"
        if not isinstance(error, KindlerError):
            _log.exception("loading %s failed", version, exc_info=error)
    return Problem(503, f"{version} cannot be loaded: {reason}", {"retry-after": "5"})


def _close_soon(pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
    """Whichever thread notices that nobody needs it."""
    try:
        loop.call_soon_threadsafe(pool.close)
    except RuntimeError:
        pass  # the server has ended, and its processes with it


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """Where the processes of a version compute.

    Attributes:
        asked: What a process asks its framework for: "cpu", "cuda", or "auto" if the CPU will do; None
            leaves everything as it is, on a machine without GPUs.
        gpu: The number of its GPU among those of the server; None for none.
        environment: Variables of the process.
        otherwise: The device of a process that was asked for none; None if the model's own code decides.
    """

    asked: str | None = None
    gpu: int | None = None
    environment: tuple[tuple[str, str], ...] = ()
    otherwise: str | None = "cpu"

    def name(self, device: str | None) -> str | None:
        """What a device of the process is called in the server: "cpu" or "cuda:N"."""
        if device == "cuda":
            return self.otherwise if self.gpu is None else f"cuda:{self.gpu}"
        return device or self.otherwise


class Devices:
    """The GPUs of a server.

    Raises:
        ConfigError: A GPU was asked for that is not there.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._gpus = machine_gpus()
        self._placed = [0] * len(self._gpus)
        sizes = gpu_memory() if self._gpus and settings.device_memory_bytes is None else {}
        self._room = [
            settings.device_memory_bytes or (int(sizes[gpu] * _GPU_SHARE) if gpu in sizes else None)
            for gpu in self._gpus
        ]
        for device in (settings.device, *settings.devices.values()):
            self._check(device)

    def place(self, version: Version, taken: Mapping[int, int]) -> DevicePlacement:
        """Where a version is to compute; `taken` is what loaded models have of each GPU's memory.

        Raises:
            ConfigError: It needs a GPU that is not there, or what was stored is not a device.
        """
        device = self._device_of(version)
        self._check(device)
        if not self._gpus:
            return DevicePlacement()
        if device == "cpu":
            return DevicePlacement("cpu", None, ((VISIBLE_GPUS, ""),))
        row = MODEL_KINDS.row(version.kind, version.meta)
        if device == "auto" and not row.gpus:
            return DevicePlacement(otherwise=None if row.takes_any else "cpu")
        kind, _, number = device.partition(":")
        # The emptiest; of several that are being loaded, each begins on another one.
        emptiest = min(range(len(self._gpus)), key=lambda n: (taken.get(n, 0), self._placed[n], n))
        gpu = int(number) if number else emptiest
        self._placed[gpu] += 1
        return DevicePlacement(kind, gpu, ((VISIBLE_GPUS, self._gpus[gpu]), *FRUGAL.items()))

    def room(self, device: str | None) -> int | None:
        """What models may take of a GPU's memory together; None for no limit."""
        number = (device or "").partition(":")[2]
        return self._room[int(number)] if number else None

    def _device_of(self, version: Version) -> str:
        """The device of its name, else the stored one if the server lets it, else the server's."""
        named = self._settings.devices.get(version.name)
        stored, own = version.attributes.get("device"), self._settings.device
        if named is not None or stored is None:
            return named or own
        if not is_device(stored):
            raise ConfigError(
                f"{version} was stored with attributes device={stored!r}; it must be 'auto', 'cpu', 'cuda' or"
                " 'cuda:N'."
            )
        return str(stored) if own == "auto" or stored == "cpu" else own

    def _check(self, device: str) -> None:
        kind, _, number = device.partition(":")
        if kind != "cuda" or int(number or 0) < len(self._gpus):
            return
        gpus = ", ".join(f"cuda:{n}" for n in range(len(self._gpus))) or "none"
        raise ConfigError(f"device {device!r} was requested; the GPUs of this server are: {gpus}.")


def _prepared(version: Version, settings: ServeSettings) -> dict[str, Any]:
    """How a model is made ready, as the server or whoever stored it says: whether requests may share calls
    (None if neither does), its inputs, its precision."""
    stored = version.attributes
    batching = stored.get("batching")
    if version.name in settings.alone:
        batching = False
    return {
        "batching": batching if isinstance(batching, bool) else None,
        "inputs": stored.get("inputs"),
        "precision": stored.get("precision"),
    }


def start_of(
    version: Version, settings: ServeSettings, place: DevicePlacement, unsandboxed: str | None
) -> tuple[Start, int]:
    """How to start a process for a version, but for its files, and how many there may be.

    What it may take are the server's limits, or lower ones that were stored with the version
    (`attributes={"limits": ...}`). `unsandboxed` is why processes cannot be sandboxed here.

    Raises:
        UntrustedError: It would have to be sandboxed.
    """
    row = MODEL_KINDS.row(version.kind, version.meta)
    stored = version.attributes.get("limits")
    stored = stored if isinstance(stored, Mapping) else {}

    def lower(own: float, name: str) -> float:
        limit = stored.get(name)
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
            return own
        return min(own, limit)

    cores = usable_cores()
    processes = _GPU_PROCESSES if place.gpu is not None else min(_MAX_PROCESSES, cores)
    if place.gpu is None and row.threads:  # a call keeps several cores busy
        processes = min(_MAX_PROCESSES, max(1, cores // 2))
    processes = max(1, int(lower(settings.processes or processes, "processes")))
    sandboxed = not settings.trusted and MODEL_KINDS.sandboxed(
        str(version), version.kind, version.meta, unsandboxed
    )
    # A process's share of the cores, as the libraries read it; what the user has set counts.
    threads = str(max(1, cores // processes))
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    shares = {name: threads for name in names if name not in os.environ}
    start = Start(
        recipe=process_recipe(version, sandboxed=sandboxed, idle_s=_IDLE_S, environment=_MEMORY | shares),
        target="kindler.serve.model_process:load",
        options={
            "kind": version.kind,
            "meta": dict(version.meta),
            "trusted": settings.trusted,
            "prepared": _prepared(version, settings),
            "batch_rows": settings.batch_rows,
            "device": place.asked,
        },
        sandboxed=sandboxed,
        environment=dict(place.environment),
        load_s=settings.load_s,
        call_s=lower(settings.timeout_s, "timeout_s"),
        memory_bytes=int(lower(settings.model_memory_bytes or settings.memory_bytes, "memory_bytes")),
        output_bytes=max(settings.queue_bytes, _LEAST_OUTPUTS),
        calls=1 if place.gpu is None else _GPU_CALLS,
    )
    return start, processes
