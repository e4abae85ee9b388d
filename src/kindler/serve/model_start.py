"""How a version's processes are started: what they are forked from, what they get, what they may take."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kindler import jail
from kindler.engine.fork_server import Recipe
from kindler.engine.placement import usable_cores
from kindler.frameworks.keras import backends
from kindler.models.registry import MODEL_KINDS, Row
from kindler.serve.devices import Seat
from kindler.serve.model_process import Start
from kindler.serve.settings import ServeSettings
from kindler.store import Version

_OWN_PRELOAD = ("kindler.serve._model_process_main", "kindler.models.loaded")
_GPU_PROCESSES = 2
_ANYWHERE = Seat()
_MOST_PROCESSES = 8  # that "auto" means; each has the whole model
_IDLE_S = 3600.0
_LEAST_OUTPUTS = 1 << 30
# Memory that a large batch took is given back: a server lives long, and has many models.
_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one version may take.

    Attributes:
        memory_bytes: Of each of its processes.
        call_s: Seconds for a call.
        processes: How many at most.
    """

    memory_bytes: int
    call_s: float
    processes: int


def limits_of(version: Version, settings: ServeSettings, seat: Seat = _ANYWHERE) -> Limits:
    """The server's limits, or lower ones that were stored with the version (`attributes={"limits": ...}`)."""
    row = MODEL_KINDS.row(version.kind, version.meta)
    asked = version.attributes.get("limits")
    asked = asked if isinstance(asked, Mapping) else {}
    return Limits(
        int(_lower(settings.model_memory_bytes or settings.memory_bytes, asked.get("memory_bytes"))),
        _lower(settings.timeout_s, asked.get("timeout_s")),
        int(_lower(settings.processes or _automatic(row, seat), asked.get("processes"))),
    )


def start_of(
    version: Version,
    folder: Path,
    settings: ServeSettings,
    *,
    lacking: str | None,
    seat: Seat = _ANYWHERE,
) -> Start:
    """How to start a process for a version.

    Args:
        version: Which.
        folder: Where its files lie while it is loaded.
        settings: The server's.
        lacking: Why processes cannot be locked in here; None if they can.
        seat: Where it is to compute.

    Raises:
        UntrustedError: It would have to be locked in.
    """
    row, limits = MODEL_KINDS.row(version.kind, version.meta), limits_of(version, settings, seat)
    kind, meta = version.kind, version.meta
    jailed = not settings.trusted and MODEL_KINDS.locked_in(str(version), kind, meta, lacking)
    threads = max(1, usable_cores() // limits.processes)
    environment = {**_MEMORY, **_threads(threads)}
    if row.family == "keras":
        environment["KERAS_BACKEND"] = backends.backend_of(None, None)
    if jailed:
        environment["HOME"] = jail.NOWHERE
    recipe = Recipe(
        preload=(*_OWN_PRELOAD, *_preload(row)),
        environment=tuple(sorted(environment.items())),
        idle_s=_IDLE_S,
        inherits=jail.ENVIRONMENT if jailed else None,
    )
    order: dict[str, Any] = {
        "kind": version.kind,
        "folder": str(folder),
        "meta": dict(version.meta),
        "trusted": settings.trusted,
        "jailed": jailed,
        "memory_bytes": limits.memory_bytes,
        "alone": version.name in settings.alone or version.attributes.get("batching") is False,
        "device": seat.asked,
    }
    return Start(
        recipe=recipe,
        environment=dict(seat.environment),
        order=order,
        load_s=settings.load_s,
        call_s=limits.call_s,
        memory_bytes=limits.memory_bytes,
        output_bytes=max(settings.queue_bytes, _LEAST_OUTPUTS),
    )


def _automatic(row: Row, seat: Seat) -> int:
    """All cores; half as many where a call keeps several busy, as one process alone is the fastest then.

    On a GPU two: while one computes, the other's batch is on its way there or back.
    """
    if seat.gpu is not None:
        return _GPU_PROCESSES
    cores = usable_cores()
    return max(1, min(_MOST_PROCESSES, cores // 2 if row.threads else cores))


def _threads(count: int) -> dict[str, str]:
    """A process's share of the cores, as the libraries read it; what the user has set counts."""
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    return {name: str(count) for name in names if name not in os.environ}


def _lower(own: float, asked: Any) -> float:
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not asked > 0:
        return own
    return min(own, asked)


def _preload(row: Row) -> tuple[str, ...]:
    """What is installed of it."""
    if any(importlib.util.find_spec(name.partition(".")[0]) is None for name in row.loaded):
        return ()
    others = [name for name in row.preload if not name.startswith("kindler.")]
    if any(importlib.util.find_spec(name.partition(".")[0]) is None for name in others):
        return ()
    return row.preload
