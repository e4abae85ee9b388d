"""Where a replica lives, and how rows get there and back; with what a process should import ahead of need."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kindler.errors import ConfigError
from kindler.frameworks.contract import Array
from kindler.frameworks.torch.outputs import flat

__all__ = ["OnTheirWay", "arrays", "has_gpu_build", "held", "preload", "resolve_device", "tensors"]

_MOST_HELD = 3  # a third of the memory that is free, so that the rest is left for training
_CHUNK_BYTES = 64 << 20
_SMALL_BYTES = 64 << 10
_HALF = (torch.bfloat16, torch.float16)


def preload() -> None:
    """Import what the first model and optimizer of a process would; the process can be forked afterwards.

    Nothing is computed here. Even a step of an optimizer on CPU tensors asks CUDA for its devices, and CUDA
    does not work in the forks of a process that has asked.
    """
    import torch._dynamo
    import torch.distributed

    # Adam's moments of units that have died decay into denormal numbers, which CPUs compute ten times
    # slower; forks inherit this. It is set in our own processes alone.
    torch.set_flush_denormal(True)


def has_gpu_build() -> bool:
    """Whether torch was built for CUDA or ROCm; asks no device."""
    return torch.version.cuda is not None or torch.version.hip is not None


def resolve_device(device: str, local_rank: int = 0) -> torch.device:
    """The device that a rank uses: "auto" takes its GPU if there is one.

    Raises:
        ConfigError: A GPU was asked for and is not there.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if count else "cpu"
    try:
        wanted = torch.device(device)
    except RuntimeError as exc:
        raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N'; received {device!r}.") from exc
    if wanted.type != "cuda":
        return wanted
    if not count or (wanted.index or 0) >= count:
        raise ConfigError(f"device {device!r} was asked for; this machine has {count} CUDA devices.")
    return wanted if wanted.index is not None else torch.device("cuda", local_rank % count)


def tensors(columns: tuple[Any, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The arrays on the device."""
    return tuple(_tensor(column, device) for column in columns)


def arrays(outputs: Any) -> list[Array]:
    """A model's outputs as arrays, several in their order; half precision is widened.

    Raises:
        ConfigError: Something else than tensors is among them.
    """
    return [_array(output) for output in flat(outputs)]


def held(
    columns: Sequence[Array], device: torch.device, wanted: bool | str
) -> Sequence[Callable[[slice | Array], Any]] | None:
    """How rows of the columns get to a GPU, as functions that take some; None where they stay as they are.

    Args:
        columns: Rows first.
        device: Where the model is.
        wanted: Whether to keep all of them there; "auto" where they take no more than a third of the memory
            that is free. Otherwise rows are copied when they are taken.
    """
    if device.type != "cuda" or not columns or not all(map(_can_be_held, columns)):
        return None
    size = sum(column.nbytes for column in columns)
    if wanted == "auto":
        wanted = size <= torch.cuda.mem_get_info(device)[0] // _MOST_HELD
    if wanted:
        return [_Held(column, device) for column in columns]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return [_Copied(column, device, stream) for column in columns]


def _can_be_held(column: Array) -> bool:
    """Whether rows of its dtype can be picked on a GPU: those of wide unsigned numbers cannot."""
    return column.dtype.kind in "fib" or column.dtype == np.uint8


class _Held:
    """A column on a GPU."""

    holds = True

    def __init__(self, column: Array, device: torch.device) -> None:
        rows = max(1, _CHUNK_BYTES // max(1, column[:1].nbytes))
        parts = [np.array(column[start : start + rows]) for start in range(0, len(column), rows)]
        first = torch.from_numpy(parts[0] if parts else np.array(column))
        self._rows = torch.empty(column.shape, dtype=first.dtype, device=device)
        for number, part in enumerate(parts):
            self._rows[number * rows : number * rows + len(part)].copy_(torch.from_numpy(part))

    def __call__(self, rows: slice | Array) -> torch.Tensor:
        if isinstance(rows, slice):
            return self._rows[rows].clone()  # a model may write its input
        places = torch.from_numpy(np.ascontiguousarray(rows, np.int64)).to(
            self._rows.device, non_blocking=True
        )
        return self._rows.index_select(0, places)


class _Copied:
    """A column of the host's, whose rows are picked by all threads and copied through pinned memory."""

    def __init__(self, column: Array, device: torch.device, stream: Any) -> None:
        self._rows, self._device, self._stream = _lent(column), device, stream

    def __call__(self, rows: slice | Array) -> OnItsWay:
        if isinstance(rows, slice):
            pinned = self._rows[rows].pin_memory()
        else:
            pinned = torch.empty((len(rows), *self._rows.shape[1:]), dtype=self._rows.dtype, pin_memory=True)
            places = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
            torch.index_select(self._rows, 0, places, out=pinned)
        with torch.cuda.stream(self._stream):
            tensor = pinned.to(self._device, non_blocking=True)
            return OnItsWay(tensor, self._stream.record_event())


@dataclass(frozen=True, slots=True)
class OnItsWay:
    """Rows that another stream copies to a GPU."""

    tensor: torch.Tensor
    copied: Any

    def arrived(self) -> torch.Tensor:
        """The rows; whatever the current stream does next is done after they were copied."""
        stream = torch.cuda.current_stream(self.tensor.device)
        stream.wait_event(self.copied)
        self.tensor.record_stream(stream)
        return self.tensor


def _tensor(array: Any, device: torch.device) -> torch.Tensor:
    """The array on the device; what may not be written is copied, since a model may write its input."""
    if isinstance(array, torch.Tensor):
        return array  # held there
    if isinstance(array, OnItsWay):
        return array.arrived()
    if device.type != "cpu" and array.nbytes > _SMALL_BYTES:
        # From any other memory, a copy to a GPU is waited for unless it is small.
        return _lent(array).pin_memory().to(device, non_blocking=True)
    tensor = torch.from_numpy(array if array.flags.writeable else np.array(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _lent(array: Array) -> torch.Tensor:
    """The array as a tensor that is only read, whether or not it may be written to."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(array)


class OnTheirWay:
    """A model's outputs, which are copied from a GPU."""

    def __init__(self, outputs: Any) -> None:
        self._here = []
        with torch.inference_mode():
            for output in flat(outputs):
                wide = output.float() if output.dtype in _HALF else output
                here = torch.empty(wide.shape, dtype=wide.dtype, pin_memory=True)
                self._here.append(here.copy_(wide, non_blocking=True))
        self._copied = torch.cuda.current_stream().record_event()

    def arrived(self) -> list[Array]:
        """The outputs as arrays of their own."""
        self._copied.synchronize()
        return [np.array(here.numpy()) for here in self._here]


def _array(output: torch.Tensor) -> Array:
    if output.dtype in _HALF:
        output = output.float()
    return np.asarray(output.cpu().numpy())
