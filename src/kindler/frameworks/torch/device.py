"""Where a replica lives, and how rows get there and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kindler.errors import ConfigError, first_line
from kindler.frameworks.contract import Array
from kindler.frameworks.torch.outputs import flat

_MOST_HELD = 3  # a third of the memory that is free, so that the rest is left for training
_CHUNK_BYTES = 64 << 20
_SMALL_BYTES = 64 << 10
_STAGES = 3  # one that is filled, one that is copied, one that may still be
_MOST_STAGED = 32 << 20  # bytes of a batch whose pinned memory is kept
_GROUP_BYTES = 16 << 20
_ALIGN_BYTES = 512  # as memory of its own is: libraries choose their kernels by where rows begin
_HALF = (torch.bfloat16, torch.float16)


def preload() -> None:
    """Import ahead; the process can still be forked, as long as nothing is computed.

    Even an optimizer step on CPU tensors asks CUDA for devices, and CUDA does not work in forks after that.
    """
    import torch._dynamo
    import torch.distributed

    # Adam's moments of units that have died decay into denormal numbers, which CPUs compute ten times
    # slower; forks inherit this. It is set in our own processes alone.
    torch.set_flush_denormal(True)


def has_gpu_build() -> bool:
    """Touches no device."""
    return torch.version.cuda is not None or torch.version.hip is not None


def gpu_problem() -> str | None:
    """None if there is no problem. Initializes CUDA."""
    if not has_gpu_build():
        return "PyTorch was built without CUDA here."
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU that this process may use."
    try:
        torch.zeros(1, device="cuda").item()
    except RuntimeError as exc:
        return f"PyTorch cannot use the GPU: {first_line(exc)}"
    return None


def taken_bytes() -> int:
    """Excludes CUDA's own memory."""
    return int(torch.cuda.memory_reserved()) if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]


def resolve_device(device: str, local_rank: int = 0) -> torch.device:
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
        raise ConfigError(f"device {device!r} was requested; this machine has {count} CUDA devices.")
    return wanted if wanted.index is not None else torch.device("cuda", local_rank % count)


def backward_on(kind: str) -> AbstractContextManager[Any]:
    """Run backward in the calling thread: torch's thread per GPU costs small steps up to a third."""
    return torch.autograd.set_multithreading_enabled(False) if kind == "cuda" else nullcontext()


def tensors(columns: tuple[Any, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(_tensor(column, device) for column in columns)


def arrays(outputs: Any) -> list[Array]:
    """Widens half precision."""
    wide = (output.float() if output.dtype in _HALF else output for output in flat(outputs))
    return [np.asarray(output.cpu().numpy()) for output in wide]


def held(
    columns: Sequence[Array], device: torch.device, wanted: bool | str
) -> Sequence[Callable[[slice | Array], Any]] | None:
    """None if columns stay as they are."""
    if (
        device.type != "cuda"
        or not columns
        or not all(c.dtype.kind in "fib" or c.dtype == np.uint8 for c in columns)
    ):
        return None  # a GPU cannot index wide unsigned numbers
    size = sum(column.nbytes for column in columns)
    if wanted == "auto":
        wanted = size <= torch.cuda.mem_get_info(device)[0] // _MOST_HELD
    if wanted:
        return [_Held(column, device) for column in columns]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return [_Copied(column, device, stream) for column in columns]


class _Column:
    _rows: torch.Tensor

    @property
    def together(self) -> int:
        """Rows to take at once; see `Batches.held_by`."""
        return int(_GROUP_BYTES // max(1, self._rows[:1].nbytes))


class _Held(_Column):
    holds = True

    def __init__(self, column: Array, device: torch.device) -> None:
        rows = max(1, _CHUNK_BYTES // max(1, column[:1].nbytes))
        parts = [np.array(column[start : start + rows]) for start in range(0, len(column), rows)]
        first = torch.from_numpy(parts[0] if parts else np.array(column))
        self._rows = torch.empty(column.shape, dtype=first.dtype, device=device)
        for number, part in enumerate(parts):
            self._rows[number * rows : number * rows + len(part)].copy_(torch.from_numpy(part))

    def split(self, taken: torch.Tensor, start: int, stop: int) -> torch.Tensor | None:
        return _split(taken, start, stop)

    def __call__(self, rows: slice | Array) -> torch.Tensor:
        if isinstance(rows, slice):
            return self._rows[rows].clone()  # a model may write its input
        places = torch.from_numpy(np.ascontiguousarray(rows, np.int64)).to(
            self._rows.device, non_blocking=True
        )
        return self._rows.index_select(0, places)


class _Copied(_Column):
    """A host column: all threads pick its rows, which are copied through pinned memory."""

    def __init__(self, column: Array, device: torch.device, stream: Any) -> None:
        self._rows, self._device, self._stream = _lent(column), device, stream

    def split(self, taken: PendingCopy, start: int, stop: int) -> PendingCopy | None:
        part = _split(taken.tensor, start, stop)
        return None if part is None else PendingCopy(part, taken.copied)

    def __call__(self, rows: slice | Array) -> PendingCopy:
        if isinstance(rows, slice):
            pinned = self._rows[rows].pin_memory()
        else:
            pinned = torch.empty((len(rows), *self._rows.shape[1:]), dtype=self._rows.dtype, pin_memory=True)
            places = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
            torch.index_select(self._rows, 0, places, out=pinned)
        with torch.cuda.stream(self._stream):
            tensor = pinned.to(self._device, non_blocking=True)
            return PendingCopy(tensor, self._stream.record_event())


def _split(taken: torch.Tensor, start: int, stop: int) -> torch.Tensor | None:
    """None if the rows would not be aligned like a batch of their own."""
    part = taken[start:stop]
    begins_as_its_own = part.storage_offset() * part.element_size() % _ALIGN_BYTES == 0
    return part if start == stop or begins_as_its_own else None


@dataclass(frozen=True, slots=True)
class PendingCopy:
    tensor: torch.Tensor
    copied: Any

    def wait(self) -> torch.Tensor:
        stream = torch.cuda.current_stream(self.tensor.device)
        stream.wait_event(self.copied)
        self.tensor.record_stream(stream)
        return self.tensor


def _tensor(array: Any, device: torch.device) -> torch.Tensor:
    """Copies read-only arrays, since a model may write to its input."""
    if isinstance(array, torch.Tensor):
        return array  # held there
    if isinstance(array, PendingCopy):
        return array.wait()
    if device.type != "cpu" and array.nbytes > _SMALL_BYTES:
        # From any other memory, a copy to a GPU is waited for unless it is small.
        return _lent(array).pin_memory().to(device, non_blocking=True)
    tensor = torch.from_numpy(array if array.flags.writeable else np.array(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _lent(array: Array) -> torch.Tensor:
    """The tensor must not be written to."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(array)


class PinnedStager:
    """Copies batches through reused pinned memory: pinning takes milliseconds, more than copying a batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._stages: list[_Stage] = []
        self._next = 0

    def to_device(self, columns: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """The current stream waits for the copy."""
        size = sum(column.nbytes for column in columns)
        if not all(isinstance(column, np.ndarray) for column in columns) or not 0 < size <= _MOST_STAGED:
            return tensors(columns, self._device)
        lent = [_lent(column) for column in columns]
        if not self._stages or not self._stages[0].takes(lent):
            # All at once, so that scoring a few rows first serves as a warm-up.
            self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._stages, self._next = [_Stage(lent) for _ in range(_STAGES)], 0
        stage = self._stages[self._next]
        self._next = (self._next + 1) % len(self._stages)
        filled = stage.filled(lent)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            carried = tuple(part.to(self._device, non_blocking=True) for part in filled)
            stage.copied.record()
        current.wait_event(stage.copied)
        for tensor in carried:
            tensor.record_stream(current)
        return carried


class _Stage:
    def __init__(self, columns: list[torch.Tensor]) -> None:
        self._places = [torch.empty(c.shape, dtype=c.dtype, pin_memory=True) for c in columns]
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def takes(self, columns: list[torch.Tensor]) -> bool:
        """The last batch may have fewer rows."""
        return len(columns) == len(self._places) and all(
            column.dtype == place.dtype and column.shape[1:] == place.shape[1:] and len(column) <= len(place)
            for column, place in zip(columns, self._places, strict=True)
        )

    def filled(self, columns: list[torch.Tensor]) -> list[torch.Tensor]:
        """Waits until the previous batch in this memory was copied."""
        self.copied.synchronize()
        pairs = zip(self._places, columns, strict=True)
        return [place[: len(column)].copy_(column) for place, column in pairs]


class PendingOutputs:
    def __init__(self, outputs: Any) -> None:
        self._here = []
        with torch.inference_mode():
            for output in flat(outputs):
                wide = output.float() if output.dtype in _HALF else output
                here = torch.empty(wide.shape, dtype=wide.dtype, pin_memory=True)
                self._here.append(here.copy_(wide, non_blocking=True))
        self._copied = torch.cuda.current_stream().record_event()

    def wait(self) -> list[Array]:
        self._copied.synchronize()
        return [np.array(here.numpy()) for here in self._here]
