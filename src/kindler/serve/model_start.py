"""How a version's processes are started: what they are forked from, what they may take, on which GPU.

A model's processes see one GPU or none, so whatever framework it is of finds no other. Nothing here asks
CUDA: the driver's own files say which GPUs there are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kindler.engine.placement import (
    FRUGAL,
    VISIBLE_GPUS,
    gpu_memory,
    is_device,
    machine_gpus,
    usable_cores,
)
from kindler.errors import ConfigError
from kindler.models.loaded import process_recipe
from kindler.models.registry import MODEL_KINDS, Row
from kindler.sandbox.process import Start
from kindler.serve.settings import ServeSettings
from kindler.store import Version

_GPU_PROCESSES = 2
_GPU_SHARE = 0.9  # of a GPU's memory: contexts of CUDA and batches need some, too
_MOST_PROCESSES = 8  # that "auto" means; each has the whole model
_IDLE_S = 3600.0
_LEAST_OUTPUTS = 1 << 30
# Memory that a large batch took is given back: a server lives long, and has many models.
_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


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


_ANYWHERE = DevicePlacement()


@dataclass(frozen=True, slots=True)
class Limits:
    """What one version may take: memory of each process, seconds for a call, processes at most."""

    memory_bytes: int
    call_s: float
    processes: int


def limits_of(version: Version, settings: ServeSettings, place: DevicePlacement = _ANYWHERE) -> Limits:
    """The server's limits, or lower ones that were stored with the version (`attributes={"limits": ...}`)."""
    row = MODEL_KINDS.row(version.kind, version.meta)
    asked = version.attributes.get("limits")
    asked = asked if isinstance(asked, Mapping) else {}
    return Limits(
        int(_lower(settings.model_memory_bytes or settings.memory_bytes, asked.get("memory_bytes"))),
        _lower(settings.timeout_s, asked.get("timeout_s")),
        int(_lower(settings.processes or _automatic(row, place), asked.get("processes"))),
    )


def start_of(
    version: Version,
    folder: Path,
    settings: ServeSettings,
    *,
    lacking: str | None,
    place: DevicePlacement = _ANYWHERE,
) -> Start:
    """How to start a process for a version.

    Args:
        version: Which.
        folder: Where its files lie while it is loaded.
        settings: The server's.
        lacking: Why processes cannot be sandboxed here; None if they can.
        place: Where it is to compute.

    Raises:
        UntrustedError: It would have to be sandboxed.
    """
    limits = limits_of(version, settings, place)
    sandboxed = not settings.trusted and MODEL_KINDS.sandboxed(
        str(version), version.kind, version.meta, lacking
    )
    # A process's share of the cores, as the libraries read it; what the user has set counts.
    threads = str(max(1, usable_cores() // limits.processes))
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    shares = {name: threads for name in names if name not in os.environ}
    return Start(
        recipe=process_recipe(version, sandboxed=sandboxed, idle_s=_IDLE_S, environment=_MEMORY | shares),
        target="kindler.serve.model_process:load",
        options={
            "kind": version.kind,
            "folder": str(folder),
            "meta": dict(version.meta),
            "trusted": settings.trusted,
            "alone": version.name in settings.alone or version.attributes.get("batching") is False,
            "device": place.asked,
        },
        sandboxed=sandboxed,
        readable=(str(folder),),
        environment=dict(place.environment),
        load_s=settings.load_s,
        call_s=limits.call_s,
        memory_bytes=limits.memory_bytes,
        output_bytes=max(settings.queue_bytes, _LEAST_OUTPUTS),
    )


def _automatic(row: Row, place: DevicePlacement) -> int:
    """All cores; half as many where a call keeps several busy, as one process alone is the fastest then.

    On a GPU two: while one computes, the other's batch is on its way there or back.
    """
    if place.gpu is not None:
        return _GPU_PROCESSES
    cores = usable_cores()
    return max(1, min(_MOST_PROCESSES, cores // 2 if row.threads else cores))


def _lower(own: float, asked: Any) -> float:
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not asked > 0:
        return own
    return min(own, asked)


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
        """Where a version is to compute.

        Args:
            version: Which.
            taken: What loaded models have of each GPU's memory.

        Raises:
            ConfigError: It needs a GPU that is not there, or what was stored is not a device.
        """
        device = self._wanted(version)
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

    def _wanted(self, version: Version) -> str:
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
        there = ", ".join(f"cuda:{n}" for n in range(len(self._gpus))) or "none"
        raise ConfigError(f"device {device!r} was asked for; the GPUs of this server are: {there}.")
