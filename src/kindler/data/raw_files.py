"""Raw files of a spool: shared by those who write into them, and mapped when they are read."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kindler.data.columns import Array
from kindler.errors import DataError

BUFFER_BYTES = 1 << 17


def shared_file(path: Path) -> BinaryIO:
    """A file that several may write into, each at its place."""
    # Not "wb": it would cut off what another writer has written.
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    return open(number, "r+b", buffering=BUFFER_BYTES)


def mapped_file(file: BinaryIO, rows: int, dtype: str | None, shape: Sequence[int] | None) -> Array:
    """The rows in a file, without reading them."""
    want = (rows, *(shape or ()))
    expected = math.prod(want) * np.dtype(dtype).itemsize if rows else 0
    if not rows:
        return np.empty((0, *(shape if shape is not None else (0,))), dtype or "float32")
    if not expected:
        return np.empty(want, dtype)
    size = os.fstat(file.fileno()).st_size
    if size != expected:  # reading past the end of a mapped file kills the process
        raise DataError(f"{file.name} has {size} bytes where {expected} were written: the spool is damaged.")
    return np.asarray(np.memmap(file, dtype=np.dtype(dtype), mode="r", shape=want))
