"""What `shared_memory.py` and `ring.py` do with torch tensors."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch


class _TorchArrays:
    def view(self, mapping: mmap.mmap, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        whole = nbytes // dtype.itemsize * dtype.itemsize
        return torch.frombuffer(mapping, dtype=torch.uint8)[offset : offset + whole].view(dtype)

    def count(self, array: torch.Tensor) -> int:
        return array.numel()

    def add_up(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(source)

    def empty(self, count: int, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(count, dtype=like.dtype)

    def raw(self, array: torch.Tensor) -> memoryview:
        return memoryview(array.detach().view(torch.uint8).numpy().data)


TORCH = _TorchArrays()
