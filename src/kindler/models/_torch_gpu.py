"""Calls of a module on a GPU: one batch is copied while another is computed, and batches of a few sizes are
recorded as CUDA graphs, so that a call launches one thing instead of hundreds.

A batch of another size is padded to the next one that was recorded. What lies there are rows of earlier
batches, so this is only for models that compute each row by itself.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch

from kindler.errors import first_line
from kindler.models.signature import Array, Arrays

Tensors: TypeAlias = dict[str, torch.Tensor]

CALLS = 2  # at a time: one that is copied, one that is computed
_WARM_UPS = 2
_REGISTERED_BYTES = 16 << 20  # of each memory
_log = logging.getLogger("kindler.models")


class GpuCall:
    """A call whose outputs are on their way."""

    def __init__(self, outputs: Tensors, done: Any) -> None:
        self._outputs, self._done = outputs, done

    def is_ready(self) -> bool:
        return bool(self._done.query())

    def wait(self) -> Arrays:
        self._done.synchronize()
        return {name: tensor.numpy() for name, tensor in self._outputs.items()}


class GpuCalls:
    """Calls a function of tensors by name, in inference mode, on streams of its own.

    At most `CALLS` may be under way; more wait for the first.
    """

    def __init__(
        self, compute: Callable[[Tensors], Tensors], device: torch.device, *, channels_last: bool = False
    ) -> None:
        self._compute = compute
        self._device = device
        self._channels_last = channels_last
        self._copying, self._computing = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._stages = [_Stage(device) for _ in range(CALLS)]
        self._registered: list[tuple[int, int]] = []
        self._static: Tensors = {}
        self._graphs: dict[int, tuple[Any, Tensors]] = {}

    def begin(self, inputs: Arrays) -> GpuCall:
        """Inputs in registered memory must stay as they are until the outputs are there."""
        stage = self._stages.pop(0)
        self._stages.append(stage)
        stage.wait()
        rows = len(next(iter(inputs.values())))
        with torch.inference_mode():
            with torch.cuda.stream(self._copying):
                staged = {
                    name: stage.copied(name, array, in_place=self._is_registered(array))
                    for name, array in inputs.items()
                }
                self._computing.wait_event(self._copying.record_event())
            with torch.cuda.stream(self._computing):
                size = next((size for size in self._graphs if size >= rows), None)
                if size is not None and self._fit(staged):
                    for name, tensor in staged.items():
                        self._static[name][:rows].copy_(tensor)
                    graph, made = self._graphs[size]
                    graph.replay()
                    outputs = {name: tensor[:rows] for name, tensor in made.items()}
                else:
                    outputs = self._compute(staged)
                here = {name: _to_host(tensor) for name, tensor in outputs.items()}
                stage.done.record()
        return GpuCall(here, stage.done)

    def register(self, memories: Iterable[mmap.mmap]) -> None:
        """Let the GPU copy from the beginnings of these memories by itself."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for memory in memories:
            area = np.frombuffer(memory, np.uint8, min(_REGISTERED_BYTES, len(memory)))
            start = area.ctypes.data
            try:
                error = runtime.cudaHostRegister(start, area.nbytes, 0)
                if error != runtime.cudaError.success:
                    raise RuntimeError(f"cudaHostRegister: {error}")
            except Exception as exc:  # noqa: BLE001 - batches are copied once more on their way, and that is all
                _log.info("shared memory cannot be pinned: %s", exc)
                with suppress(RuntimeError):  # the error is forgotten with the next call that reports it
                    torch.zeros(1, device=self._device).item()
                return
            self._registered.append((start, start + area.nbytes))

    def record(self, rows: Arrays, sizes: Sequence[int], cast: Callable[[torch.Tensor], torch.Tensor]) -> str:
        """Record calls of these sizes, the largest of which `rows` has; returns why not, if it cannot."""
        self.forget()
        self._static = {name: self._static_of(cast(torch.from_numpy(array))) for name, array in rows.items()}
        pool = torch.cuda.graph_pool_handle()
        graphs: dict[int, tuple[Any, Tensors]] = {}
        try:
            for size in sorted(sizes, reverse=True):
                graphs[size] = self._recorded({n: one[:size] for n, one in self._static.items()}, size, pool)
        except Exception as exc:  # noqa: BLE001 - of the model's own code, or of CUDA
            self.forget()
            torch.cuda.synchronize(self._device)
            return first_line(exc)[:200]
        self._graphs = {size: graphs[size] for size in sorted(sizes)}
        return ""

    def forget(self) -> None:
        """Compute without graphs."""
        self._graphs, self._static = {}, {}

    def _recorded(self, part: Tensors, size: int, pool: Any) -> tuple[Any, Tensors]:
        with torch.inference_mode():
            with torch.cuda.stream(self._computing):
                for _ in range(_WARM_UPS):
                    self._compute(part)
                self._computing.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=self._computing):
                outputs = self._compute(part)
        if not all(tensor.ndim and len(tensor) == size for tensor in outputs.values()):
            raise ValueError("an output does not have one row for each row of the inputs")
        return graph, outputs

    def _static_of(self, tensor: torch.Tensor) -> torch.Tensor:
        last = self._channels_last and tensor.ndim == 4 and tensor.is_floating_point()
        form = torch.channels_last if last else torch.contiguous_format
        with torch.inference_mode():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device).to(memory_format=form)

    def _fit(self, staged: Tensors) -> bool:
        """Whether these can be copied to where the graphs read, with nothing lost."""
        if staged.keys() != self._static.keys():
            return False
        return all(
            tensor.shape[1:] == self._static[name].shape[1:]
            and torch.can_cast(tensor.dtype, self._static[name].dtype)
            and torch.promote_types(tensor.dtype, self._static[name].dtype) == self._static[name].dtype
            for name, tensor in staged.items()
        )

    def _is_registered(self, array: Array) -> bool:
        start = array.ctypes.data
        return array.flags.c_contiguous and any(
            first <= start and start + array.nbytes <= last for first, last in self._registered
        )


class _Stage:
    """Memory that a batch goes through, here (pinned) and on the GPU; `done` is when it is free again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._there: dict[str, torch.Tensor] = {}
        self._here: dict[str, torch.Tensor] = {}
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.done.synchronize()

    def copied(self, name: str, array: Array, *, in_place: bool) -> torch.Tensor:
        """The array on the GPU, once the current stream gets there; `in_place` if CUDA knows its memory."""
        size = array.nbytes
        there = self._there.get(name)
        if there is None or there.numel() < size:
            there = self._there[name] = torch.empty(size, dtype=torch.uint8, device=self._device)
        if in_place:
            source = torch.from_numpy(array.reshape(-1).view(np.uint8))
        else:
            here = self._here.get(name)
            if here is None or here.numel() < size:
                here = self._here[name] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            source = here[:size]
            np.copyto(source.numpy().view(array.dtype).reshape(array.shape), array)
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        target = there[:size]
        target.copy_(source, non_blocking=True)
        return target.view(dtype).reshape(array.shape)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return here.copy_(tensor, non_blocking=True)
