"""What `shared_memory.py` and `ring.py` do with numpy arrays."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np


class _NumpyArrays:
    def view(self, mapping: mmap.mmap, offset: int, nbytes: int, dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        return np.frombuffer(mapping, dtype, nbytes // dtype.itemsize, offset)

    def count(self, array: Any) -> int:
        return int(array.size)

    def add_up(self, parts: Sequence[Any], out: Any) -> None:
        np.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            np.add(out, part, out=out)

    def copy(self, source: Any, out: Any) -> None:
        np.copyto(out, source)

    def empty(self, count: int, like: Any) -> Any:
        return np.empty(count, like.dtype)

    def raw(self, array: Any) -> memoryview:
        return memoryview(array.view(np.uint8).data)


NUMPY = _NumpyArrays()
