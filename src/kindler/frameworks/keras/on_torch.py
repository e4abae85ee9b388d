"""Keras on PyTorch: steps run eagerly, so gradients are exchanged as the optimizer takes them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from kindler.frameworks.keras.backends import DEVICE_VARIABLE
from kindler.frameworks.keras.gradient_hook import Means, Rows, count, leaves, mapped, scaled_loss
from kindler.frameworks.row_gather import RowGather
from kindler.frameworks.torch.device import backward_on, resolve_device
from kindler.frameworks.torch.device import taken_bytes as taken_bytes
from kindler.frameworks.torch.gather import Gather
from kindler.frameworks.torch.state import from_raw as from_raw
from kindler.frameworks.torch.state import to_raw

Array = np.ndarray[Any, np.dtype[Any]]


READS_AHEAD = True  # a rank's own state within a step, as steps are eager


def configure(*, device: str, local_rank: int, threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = _device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    # Keras chooses once, when it is imported, which here is before the process was forked.
    _core().DEFAULT_DEVICE = "cuda" if chosen.type == "cuda" else str(chosen)


def on_gpu() -> bool:
    return bool(_core().DEFAULT_DEVICE == "cuda")


def _core() -> Any:
    return importlib.import_module("keras.src.backend.torch.core")


def _device(device: str, local_rank: int) -> torch.device:
    """ "auto" is the choice that Keras would make, with one GPU per rank."""
    if device == "auto" and DEVICE_VARIABLE in os.environ:
        device = os.environ[DEVICE_VARIABLE]
    if device == "auto" and torch.backends.mps.is_available():
        device = "mps"
    chosen = resolve_device(device, local_rank)
    if device == "auto" and chosen.type == "cpu" and torch.xpu.is_available():
        chosen = torch.device("xpu")
    return chosen


def goes_back(model: Any) -> bool:
    return not model.jit_compile


def raw(model: Any, variables: Sequence[Any], judged: Any) -> Any:
    return to_raw([[variable.value for variable in variables], judged])


def randomness() -> list[Array]:
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if on_gpu else ())]
    return [state.numpy() for state in states]


def restore_randomness(states: Sequence[Array]) -> None:
    torch.set_rng_state(torch.from_numpy(states[0]))
    if len(states) > 1:
        torch.cuda.set_rng_state_all([torch.from_numpy(state) for state in states[1:]])


def seed(number: int, *, compiled: bool = False) -> None:
    torch.manual_seed(number)


def fitting() -> AbstractContextManager[Any]:
    """Makes steps of Keras's own `fit` faster."""
    return backward_on("cuda") if on_gpu() else nullcontext()


def gradients(model: Any, inputs: Any, targets: Any, weights: Any) -> list[Array | None]:
    """Also updates the metrics."""
    model.zero_grad()
    outputs = model(inputs, training=True)
    loss = model.compute_loss(inputs, targets, outputs, weights)
    scaled_loss(model, loss).backward()
    with torch.no_grad():
        count(model, loss.detach(), row_count(inputs), inputs, targets, outputs, weights)
    found = [variable.value.grad for variable in model.trainable_variables]
    return [None if grad is None else as_array(grad) for grad in found]


def called(model: Any, step: Any, data: Any) -> None:
    model.zero_grad()
    step(mapped(data, _there))
    model.zero_grad()


def apply(optimizer: Any, gradients: Sequence[Array], variables: Sequence[Any]) -> None:
    grads = [torch.from_numpy(array).to(v.value) for array, v in zip(gradients, variables, strict=True)]
    with torch.no_grad():
        optimizer.apply(grads, variables)


def dense(grad: Any, variable: Any) -> Any:
    return torch.zeros_like(variable.value) if grad is None else grad


def gather(ranks: RowGather, rows: Rows, exchange: Any) -> Any:
    joined = Gather(ranks)

    def gathered(tensor: Any) -> Any:
        joined.share, joined.idle = float(rows.now), not rows.now
        joined.pending.clear()
        return joined(tensor)

    return gathered


def idle_step(step: Any, rows: Rows, model: Any, data: Any) -> Any:
    """Without rows, computes on a zero row of no weight."""
    if rows.now:
        return step(data)
    kept = [*model.non_trainable_variables, *model.metrics_variables]
    before = [variable.value.detach().clone() for variable in kept]
    logs = step(mapped(data, _one_row))
    for variable, value in zip(kept, before, strict=True):
        variable.assign(value)
    return logs


def after(grads: Sequence[Any]) -> AbstractContextManager[None]:
    return nullcontext()


def exchange(grads: list[Any], means: Means, rows: Rows) -> list[Any]:
    shared = means([as_array(grad) for grad in grads], float(rows.now))
    return [torch.from_numpy(mean).to(grad) for mean, grad in zip(shared, grads, strict=True)]


def as_array(grad: Any) -> Any:
    whole = grad.detach().to_dense().cpu()
    return (whole.float() if whole.dtype is torch.bfloat16 else whole).numpy()  # numpy has no bfloat16


def _there(part: Any) -> Any:
    return _core().convert_to_tensor(part) if isinstance(part, np.ndarray) else part


def _one_row(part: Any) -> Any:
    if isinstance(part, np.ndarray):  # of a step on a batch, outside `fit`
        part = torch.from_numpy(part)
    return part.new_zeros((1, *part.shape[1:])) if isinstance(part, torch.Tensor) else part


def row_count(data: Any) -> int:
    return int(next(leaves(data)).shape[0])
