"""A PyTorch model for scoring only, pickled without its tensors' memory, which follows as it is.

Changes are found by comparing memory: torch's own counters miss writes through `.data` or numpy.
"""

from __future__ import annotations

import ctypes
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kindler.frameworks.pickling import pickle_for_workers
from kindler.frameworks.state_format import ScoringModel, pack, unpack
from kindler.frameworks.torch.spec import TorchSpec
from kindler.frameworks.torch.state import TensorPickler, dump, parse

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def scoring_model(
    spec: TorchSpec, live: torch.nn.Module | None, state: bytes, before: ScoringModel | None
) -> ScoringModel:
    own = "model" if spec.loss == "model" else None
    slim = replace(spec, optimizer=None, loss=own, loss_weights=None, metrics=None, scheduler_creator=None)
    if isinstance(spec.model, torch.nn.Module):  # which has its trained weights
        return _with_tensors(slim, before)
    packed = pickle_for_workers(slim)
    if live is not None:
        return ScoringModel.of(packed, dump({"model": live.state_dict()}), before)
    if not state:
        return ScoringModel.of(packed, b"", before)
    known = before is not None and before.of_state is state
    weights = before.state if before is not None and known else dump({"model": parse(state)["model"]})
    return ScoringModel.of(packed, weights, before, of_state=state)


def _with_tensors(spec: TorchSpec, before: ScoringModel | None) -> ScoringModel:
    file = io.BytesIO()
    pickler = TensorPickler(file)
    try:
        pickler.dump(spec)
    except Exception:
        pickle_for_workers(spec)  # says which part of it cannot be sent
        raise
    storages: list[Any] = [storage.cpu() for storage in pickler.storages]
    head = file.getvalue()
    if before is not None and _is_packed_in(before.spec, head, storages):
        return before
    buffers = [_bytes_of(storage).numpy().data for storage in storages]
    return ScoringModel.of(b"".join(pack(head, buffers)), b"", before)


def _is_packed_in(data: bytes, head: bytes, storages: Sequence[Any]) -> bool:
    known, buffers = unpack(data)
    if known != head or [len(buffer) for buffer in buffers] != [storage.nbytes() for storage in storages]:
        return False
    return not any(
        _memcmp(np.frombuffer(buffer, np.uint8).ctypes.data, storage.data_ptr(), len(buffer))
        for buffer, storage in zip(buffers, storages, strict=True)
        if len(buffer)
    )


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
