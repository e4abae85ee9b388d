"""Pickles without the memory of tensors, which is kept beside them: once, however many tensors share it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch

# Neither is annotated by torch.
_typed_storage: Any = torch.storage.TypedStorage
_untyped_storage: Any = torch.UntypedStorage


class TensorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves out the memory of tensors.

    Attributes:
        storages: What it has left out.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: list[Any] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype | None] | None:
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype  # its method for that is deprecated
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype = obj, None
        else:
            return None
        place = self._places.setdefault(storage._cdata, len(self.storages))
        if place == len(self.storages):
            self.storages.append(storage)
        return place, dtype


class TensorUnpickler(pickle.Unpickler):
    def __init__(self, head: bytes, buffers: Sequence[memoryview]) -> None:
        super().__init__(io.BytesIO(head))
        self._storages = [_storage(buffer) for buffer in buffers]

    def persistent_load(self, pid: tuple[int, torch.dtype | None]) -> Any:
        place, dtype = pid
        storage = self._storages[place]
        if dtype is None:
            return storage
        return _typed_storage(wrap_storage=storage, dtype=dtype, _internal=True)


def _storage(buffer: memoryview) -> Any:
    if not len(buffer):
        return _untyped_storage(0)
    return torch.frombuffer(bytearray(buffer), dtype=torch.uint8).untyped_storage()
