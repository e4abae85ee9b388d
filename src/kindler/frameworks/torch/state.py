"""A replica's state as bytes that load without executing anything."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch

from kindler.collective import Array
from kindler.errors import ConfigError
from kindler.frameworks.state_format import Buffer, is_packed, pack, unpack
from kindler.frameworks.torch.buffers import Tracked

_FORMAT = 3
_TENSOR = "kindler.tensor"  # stands for a large tensor, by its number
_LARGE_BYTES = 1 << 16

# Neither is annotated by torch.
_typed_storage: Any = torch.storage.TypedStorage
_untyped_storage: Any = torch.UntypedStorage


def dump(fields: Mapping[str, Any]) -> bytes:
    return b"".join(Freezer().freeze(fields)())


class Freezer:
    """Copies a replica's tensors now, and turns the copies into bytes later.

    A thread copies large tensors: call `wait` before they change. The copies' memory is reused, since fresh
    memory costs more than copying; so finish with one `freeze` before the next.
    """

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        self._copying: threading.Thread | None = None

    def freeze(
        self, fields: Mapping[str, Any], *, copy_now: Iterable[torch.Tensor] = ()
    ) -> Callable[[], list[Buffer]]:
        self.wait()
        at_once = {tensor.data_ptr() for tensor in copy_now}
        large: list[torch.Tensor] = []
        later: list[tuple[torch.Tensor, torch.Tensor]] = []

        def taken(tensor: torch.Tensor) -> Any:
            if not _is_large(tensor):
                return tensor.detach().to("cpu", copy=True)
            copied = self._place(len(large), tensor)
            # Work on a GPU goes in the order in which it was asked for: only this thread knows it.
            if tensor.device.type == "cpu" and tensor.data_ptr() not in at_once:
                later.append((copied, tensor.detach()))
            else:
                copied.copy_(tensor.detach())
            large.append(copied)
            return {_TENSOR: len(large) - 1}

        made = {name: _plain(frozen(value, taken, {})) for name, value in fields.items()}
        copying = threading.Thread(target=_copy_all, args=(later,), name="kindler-freeze", daemon=True)
        copying.start()
        self._copying = copying

        def pieces() -> list[Buffer]:
            copying.join()
            return _pieces(made, large)

        return pieces

    def wait(self) -> None:
        if self._copying is not None:
            self._copying.join()
            self._copying = None

    def _place(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(number)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = self._kept[number] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return kept


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for copied, tensor in pairs:
        copied.copy_(tensor)


def _is_large(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_complex()
    return plain and tensor.numel() * tensor.element_size() >= _LARGE_BYTES


def _pieces(fields: dict[str, Any], large: Sequence[torch.Tensor]) -> list[Buffer]:
    """A head in torch's own format, then raw memory: torch would copy it all and hold the interpreter."""
    layout = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in large]
    head = io.BytesIO()
    torch.save({"format": _FORMAT, "layout": layout, "fields": fields}, head)
    return pack(head.getvalue(), [t.view(-1).view(torch.uint8).numpy().data for t in large])


def frozen(value: Any, taken: Callable[[torch.Tensor], Any], memo: dict[Any, Any]) -> Any:
    """Shared tensors stay shared."""
    if isinstance(value, torch.Tensor):
        key = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
        if not value.numel() or key not in memo:
            memo[key] = taken(value)
        return memo[key]
    if isinstance(value, dict):
        made = copy.copy(value)
        for name, part in value.items():
            made[name] = frozen(part, taken, memo)
        if hasattr(value, "_metadata"):  # the versions of modules, which copying a state dict drops
            made._metadata = value._metadata  # type: ignore[attr-defined]
        return made
    if type(value) in (list, tuple):
        return type(value)(frozen(part, taken, memo) for part in value)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    return copy.deepcopy(value)


def parse(data: bytes) -> dict[str, Any]:
    if not is_packed(data):
        raise ConfigError(f"this is not a replica's state of format {_FORMAT}.")
    head, buffers = unpack(data)
    told = _loaded(head)
    found = told.get("format") if isinstance(told, dict) else None
    if found != _FORMAT:
        raise ConfigError(f"this is not a replica's state of format {_FORMAT}; its format is {found!r}.")
    tensors = [
        torch.frombuffer(bytearray(buffer), dtype=getattr(torch, dtype)).reshape(shape)
        for buffer, (dtype, shape) in zip(buffers, told["layout"], strict=True)
    ]
    return {name: _with_tensors(value, tensors) for name, value in told["fields"].items()}


def _with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        for name in value:  # in place: a state dict keeps the versions of its modules
            value[name] = _with_tensors(value[name], tensors)
        return value
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(part, tensors) for part in value)
    return value


def save_weights(state: Mapping[str, torch.Tensor]) -> bytes:
    """Plain `torch.load` reads it."""
    data = io.BytesIO()
    torch.save({name: tensor.detach().cpu() for name, tensor in state.items()}, data)
    return data.getvalue()


def parse_weights(data: bytes) -> Any:
    """Reads a state dict's file or a checkpoint."""
    return parse(data)["model"] if is_packed(data) else _loaded(data)


def _loaded(data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as exc:  # torch raises a dozen kinds for a file that is not its own
        raise ConfigError(f"this is not a weights or state file that torch can load safely: {exc}") from exc


def fork_seed(seed: int, *path: int) -> int:
    """Seeds of neighbouring ranks and epochs are far apart."""
    state = np.random.SeedSequence([seed & (2**63 - 1), *path]).generate_state(2, np.uint32)
    return int(state[0]) << 31 | int(state[1]) >> 1


def snapshot(tracked: Tracked) -> list[torch.Tensor]:
    return [buffer.detach().clone() for buffer in tracked.buffers()]


def changes(tracked: Tracked, before: Sequence[torch.Tensor]) -> list[bool]:
    return [not torch.equal(now, then) for now, then in zip(tracked.buffers(), before, strict=True)]


def to_array(tensor: torch.Tensor) -> Array:
    """As float32 where numpy lacks the dtype (bfloat16)."""
    whole = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    try:
        return np.array(whole.cpu().numpy())
    except TypeError:
        return np.array(whole.float().cpu().numpy())


def _plain(value: Any) -> Any:
    """The safe loader accepts only Python's numbers."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {_plain(key): _plain(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(part) for part in value)
    return value


class TensorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Memory that several tensors share is kept once."""

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
