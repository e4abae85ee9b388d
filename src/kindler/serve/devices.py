"""Which GPU the processes of a model get, and how much of it loaded models may take.

A model's processes see one GPU or none, so whatever framework it is of finds no other. Nothing here asks
CUDA: the driver's own files say which GPUs there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kindler.engine.placement import FRUGAL, VISIBLE_GPUS, gpu_memory, is_device, machine_gpus
from kindler.errors import ConfigError
from kindler.models.registry import MODEL_KINDS
from kindler.serve.settings import ServeSettings
from kindler.store import Version

_SHARE = 0.9  # of a GPU's memory: contexts of CUDA and batches need some, too


@dataclass(frozen=True, slots=True)
class Seat:
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

    Args:
        settings: What was asked for.

    Raises:
        ConfigError: A GPU was asked for that is not there.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._gpus = machine_gpus()
        self._seated = [0] * len(self._gpus)
        sizes = gpu_memory() if self._gpus and settings.device_memory_bytes is None else {}
        self._room = [
            settings.device_memory_bytes or (int(sizes[gpu] * _SHARE) if gpu in sizes else None)
            for gpu in self._gpus
        ]
        for device in (settings.device, *settings.devices.values()):
            self._check(device)

    def wanted(self, version: Version) -> str:
        """The device of a version: that of its name, else the stored one if the server lets it, else its.

        Raises:
            ConfigError: What was stored is not a device.
        """
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

    def seat(self, version: Version, taken: Mapping[int, int]) -> Seat:
        """Where a version is to compute.

        Args:
            version: Which.
            taken: What loaded models have of each GPU's memory.

        Raises:
            ConfigError: It needs a GPU that is not there.
        """
        device = self.wanted(version)
        self._check(device)
        if not self._gpus:
            return Seat()
        if device == "cpu":
            return Seat("cpu", None, ((VISIBLE_GPUS, ""),))
        row = MODEL_KINDS.row(version.kind, version.meta)
        if device == "auto" and not row.gpus:
            return Seat(otherwise=None if row.takes_any else "cpu")
        kind, _, number = device.partition(":")
        # The emptiest; of several that are being loaded, each begins on another one.
        emptiest = min(range(len(self._gpus)), key=lambda n: (taken.get(n, 0), self._seated[n], n))
        gpu = int(number) if number else emptiest
        self._seated[gpu] += 1
        return Seat(kind, gpu, ((VISIBLE_GPUS, self._gpus[gpu]), *FRUGAL.items()))

    def room(self, device: str | None) -> int | None:
        """What models may take of a GPU's memory together; None for no limit."""
        number = (device or "").partition(":")[2]
        return self._room[int(number)] if number else None

    def _check(self, device: str) -> None:
        kind, _, number = device.partition(":")
        if kind != "cuda" or int(number or 0) < len(self._gpus):
            return
        there = ", ".join(f"cuda:{n}" for n in range(len(self._gpus))) or "none"
        raise ConfigError(f"device {device!r} was asked for; the GPUs of this server are: {there}.")
