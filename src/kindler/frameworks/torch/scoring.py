"""A PyTorch model for processes that only score with it.

The model is pickled without the memory of its tensors, which follows it as it is: all that is not a tensor is
small, and is packed anew each time. Whether tensors have changed is found by looking at their memory: torch's
own counters do not see what is written through `.data` or numpy.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import torch

from kindler.frameworks.pickling import travelling
from kindler.frameworks.scoring_model import ScoringModel
from kindler.frameworks.state_format import pack, unpack
from kindler.frameworks.torch.spec import TorchSpec
from kindler.frameworks.torch.state import dump, parse

__all__ = ["scoring_model", "unpacked_spec"]

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def scoring_model(
    spec: TorchSpec, live: torch.nn.Module | None, state: bytes, before: ScoringModel | None
) -> ScoringModel:
    """What a process needs to score with the model as it is now.

    Args:
        spec: What the user handed in.
        live: The model in this process, if it was made.
        state: The trained state, if there is one.
        before: What this gave last; it is given again where nothing has changed.
    """
    own = "model" if spec.loss == "model" else None
    slim = replace(spec, optimizer=None, loss=own, loss_weights=None, metrics=None, scheduler_creator=None)
    if isinstance(spec.model, torch.nn.Module):  # which has its trained weights
        return _with_tensors(slim, before)
    packed = travelling(slim)
    if live is not None:
        return ScoringModel.of(packed, dump({"model": live.state_dict()}), before)
    if not state:
        return ScoringModel.of(packed, b"", before)
    known = before is not None and before.of_state is state
    weights = before.state if before is not None and known else dump({"model": parse(state)["model"]})
    return ScoringModel.of(packed, weights, before, of_state=state)


def unpacked_spec(data: bytes) -> TorchSpec:
    """The spec of a model that was packed with its tensors."""
    head, buffers = unpack(data)
    spec: TorchSpec = _Unpickler(head, buffers).load()
    return spec


def _with_tensors(spec: TorchSpec, before: ScoringModel | None) -> ScoringModel:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(spec)
    except Exception:
        travelling(spec)  # says which part of it cannot be sent
        raise
    storages = [storage.cpu() for storage in pickler.storages]
    head = file.getvalue()
    if before is not None and _is_packed_in(before.spec, head, storages):
        return before
    buffers = [_bytes_of(storage).numpy().data for storage in storages]
    return ScoringModel.of(b"".join(pack(head, buffers)), b"", before)


def _is_packed_in(data: bytes, head: bytes, storages: Sequence[torch.UntypedStorage]) -> bool:
    known, buffers = unpack(data)
    if known != head or [len(buffer) for buffer in buffers] != [storage.nbytes() for storage in storages]:
        return False
    return not any(
        _memcmp(np.frombuffer(buffer, np.uint8).ctypes.data, storage.data_ptr(), len(buffer))
        for buffer, storage in zip(buffers, storages, strict=True)
        if len(buffer)
    )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload,no-any-return]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves out the memory of tensors, each once however many of them share it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: list[torch.UntypedStorage] = []
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


class _Unpickler(pickle.Unpickler):
    def __init__(self, head: bytes, buffers: Sequence[memoryview]) -> None:
        super().__init__(io.BytesIO(head))
        self._storages = [_storage(buffer) for buffer in buffers]

    def persistent_load(self, pid: tuple[int, torch.dtype | None]) -> Any:
        place, dtype = pid
        storage = self._storages[place]
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _storage(buffer: memoryview) -> torch.UntypedStorage:
    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(bytearray(buffer), dtype=torch.uint8).untyped_storage()
