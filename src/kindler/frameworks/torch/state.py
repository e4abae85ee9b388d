"""A replica's state as bytes that load without executing anything, and what belongs to it.

The parameters that training moves, the buffers it changes and the modules that train may change meanwhile.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import io
import json
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import torch

from kindler.collective import Array, Collective, share_bytes
from kindler.errors import ConfigError
from kindler.frameworks.pickling import pickle_for_workers
from kindler.frameworks.state_format import Buffer, ScoringModel, is_packed, pack, unpack
from kindler.frameworks.torch import private

_FORMAT = 3
_TENSOR = "kindler.tensor"  # stands for a large tensor, by its number
_RAW = "kindler.raw"  # begins what stands for a tensor in a snapshot
_KNOWN_TO_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _KNOWN_TO_NUMPY}  # which pickle faster
_LARGE_BYTES = 1 << 16
EVERY_WORKER = "callbacks run on every worker; freeze, unfreeze and add parameters on all of them alike."
_MOVED = {
    "kindler.frameworks.torch.step_spec": "kindler.frameworks.torch.spec",
    "kindler.frameworks.torch.lightning_spec": "kindler.frameworks.torch.lightning_replica",
}

Modules = Mapping[str, torch.nn.Module]  # by the prefix of their parameters' names
_untyped_storage: Any = torch.UntypedStorage  # which torch does not annotate
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


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
            plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_complex()
            if not plain or tensor.numel() * tensor.element_size() < _LARGE_BYTES:
                return tensor.detach().to("cpu", copy=True)
            copied = self._kept.get(len(large))
            if copied is None or (copied.shape, copied.dtype) != (tensor.shape, tensor.dtype):
                copied = self._kept[len(large)] = torch.empty(tensor.shape, dtype=tensor.dtype)
            # Work on a GPU goes in the order in which it was asked for: only this thread knows it.
            if tensor.device.type == "cpu" and tensor.data_ptr() not in at_once:
                later.append((copied, tensor.detach()))
            else:
                copied.copy_(tensor.detach())
            large.append(copied)
            return {_TENSOR: len(large) - 1}

        made = {name: _plain(frozen(value, taken, {})) for name, value in fields.items()}

        def copy_large() -> None:
            for copied, tensor in later:
                copied.copy_(tensor)

        copying = threading.Thread(target=copy_large, name="kindler-freeze", daemon=True)
        copying.start()
        self._copying = copying

        def pieces() -> list[Buffer]:
            copying.join()
            # A head in torch's own format, then raw memory: torch would copy it all and hold the interpreter.
            layout = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in large]
            head = io.BytesIO()
            torch.save({"format": _FORMAT, "layout": layout, "fields": made}, head)
            return pack(head.getvalue(), [t.view(-1).view(torch.uint8).numpy().data for t in large])

        return pieces

    def wait(self) -> None:
        if self._copying is not None:
            self._copying.join()
            self._copying = None


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
        private.copy_versions(value, made)
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
    stored = _loaded(head)
    version = stored.get("format") if isinstance(stored, dict) else None
    if version != _FORMAT:
        raise ConfigError(f"this is not a replica's state of format {_FORMAT}; its format is {version!r}.")
    tensors = [
        torch.frombuffer(bytearray(buffer), dtype=getattr(torch, dtype)).reshape(shape)
        for buffer, (dtype, shape) in zip(buffers, stored["layout"], strict=True)
    ]
    return {name: _with_tensors(value, tensors) for name, value in stored["fields"].items()}


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


def to_raw(tree: Any) -> Any:
    """A tree whose tensors, on the CPU, are arrays of their memory, which pickle fast; for `from_raw`."""
    if isinstance(tree, torch.Tensor):
        if not tree.dim():
            return _RAW, tree.item(), _NAMES.get(tree.dtype, tree.dtype)
        tensor = tree.detach()
        if tensor.dtype in _KNOWN_TO_NUMPY:
            return _RAW, tensor.numpy()
        return _RAW, to_array(tensor), tensor.dtype
    if isinstance(tree, dict):
        return {name: to_raw(part) for name, part in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(to_raw(part) for part in tree)
    return tree


def from_raw(tree: Any) -> Any:
    if type(tree) is tuple and tree and tree[0] == _RAW:
        dtype = tree[2] if len(tree) == 3 else None
        return torch.tensor(tree[1], dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    if isinstance(tree, dict):
        return {name: from_raw(part) for name, part in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(from_raw(part) for part in tree)
    return tree


def fork_seed(seed: int, *path: int) -> int:
    """Seeds of neighbouring ranks and epochs are far apart."""
    state = np.random.SeedSequence([seed & (2**63 - 1), *path]).generate_state(2, np.uint32)
    return int(state[0]) << 31 | int(state[1]) >> 1


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
        if (memory := private.storage_of(obj)) is None:
            return None
        storage, dtype = memory
        place = self._places.setdefault(storage._cdata, len(self.storages))
        if place == len(self.storages):
            self.storages.append(storage)
        return place, dtype


class TensorUnpickler(pickle.Unpickler):
    """Also reads files that name a class where it was before."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(_MOVED.get(module, module), name)

    def __init__(self, head: bytes, buffers: Sequence[memoryview]) -> None:
        super().__init__(io.BytesIO(head))
        self._storages = [_storage(buffer) for buffer in buffers]

    def persistent_load(self, pid: tuple[int, torch.dtype | None]) -> Any:
        place, dtype = pid
        storage = self._storages[place]
        return storage if dtype is None else private.typed_storage(storage, dtype)


def _storage(buffer: memoryview) -> Any:
    if not len(buffer):
        return _untyped_storage(0)
    return torch.frombuffer(bytearray(buffer), dtype=torch.uint8).untyped_storage()


class Tracked:
    """The buffers that modules had when training began; complex ones as pairs of reals.

    Later ones are left out: a copy of the model made elsewhere would not have them.
    """

    def __init__(self, *modules: torch.nn.Module) -> None:
        self._modules = modules
        self._names = [name for name, _ in self._named()]

    def buffers(self) -> Iterator[torch.Tensor]:
        now = dict(self._named())
        for name in self._names:
            buffer = now.get(name)
            if buffer is None:
                raise ConfigError(f"the buffer {name[1]!r} was removed from the model during training.")
            yield torch.view_as_real(buffer) if buffer.is_complex() else buffer

    def copies(self) -> list[torch.Tensor]:
        return [buffer.detach().clone() for buffer in self.buffers()]

    def put_back(self, copies: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self.buffers(), copies, strict=True):
                buffer.copy_(value)

    def modules(self) -> Iterator[torch.nn.Module]:
        return (part for module in self._modules for part in module.modules())

    def refuse_new(self) -> None:
        known = set(self._names)
        new = [name for name in self._lasting() if name not in known]
        if new:
            raise ConfigError(
                f"the model registered the buffer {new[0][1]!r} during training; a copy of the model "
                "made elsewhere does not have it, and could not load its weights.\n"
                "Hint: register it in __init__, with its final shape; or with persistent=False, if it can be "
                "recomputed."
            )

    def reshaped(self, collective: Collective, before: Mapping[str, Array]) -> list[bool]:
        """True for buffers of another shape on some rank, which cannot be merged; every rank calls it."""
        mine = [b.shape != before[str(place)].shape for place, b in enumerate(self.buffers())]
        odd = [bool(flag) for flag in collective.sum([np.array(mine, np.int64)])[0]]
        lasting = set(self._lasting())
        for name, flag in zip(self._names, odd, strict=True):
            if flag and name in lasting:
                raise ConfigError(
                    f"the buffer {name[1]!r} changed shape during training, so it"
                    " cannot be made the same on all workers.\n"
                    "Hint: register it with its final shape, or with persistent=False."
                )
        return odd

    def _named(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        for number, module in enumerate(self._modules):
            for name, buffer in module.named_buffers():
                yield (number, name), buffer

    def _lasting(self) -> Iterator[tuple[int, str]]:
        for number, module in enumerate(self._modules):
            yield from ((number, name) for name in private.persistent_buffers(module))


def scoring_model(
    spec: Any, live: Callable[[], dict[str, Any]] | None, state: bytes, before: ScoringModel | None
) -> ScoringModel:
    """Without its tensors' memory, which follows as it is.

    Changes are found by comparing memory: torch's own counters miss writes through `.data` or numpy.
    """
    own = "model" if spec.loss == "model" else None
    slim = replace(spec, optimizer=None, loss=own, loss_weights=None, metrics=None, scheduler=None)
    if isinstance(spec.model, torch.nn.Module):  # which has its trained weights
        return _packed_with_tensors(slim, before)
    packed = pickle_for_workers(slim)
    if live is not None:
        return ScoringModel.of(packed, dump({"model": live()}), before)
    if not state:
        return ScoringModel.of(packed, b"", before)
    known = before is not None and before.of_state is state
    weights = before.state if before is not None and known else dump({"model": parse(state)["model"]})
    return ScoringModel.of(packed, weights, before, of_state=state)


def _packed_with_tensors(spec: Any, before: ScoringModel | None) -> ScoringModel:
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
    buffers = [torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data for storage in storages]
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


class Parameters:
    """`held`: the optimizer's parameters and the model's others that get gradients, each once."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._seen: tuple[list[int], list[bool]] = ([], [])
        self._exchanged: set[int] = set()
        self.held: list[torch.nn.Parameter] = []
        self.look()

    def look(self) -> bool:
        """Whether the optimizer's parameters or their `requires_grad` changed since the last call."""
        moved = [p for group in self._optimizer.param_groups for p in group["params"]]
        seen = ([id(p) for p in moved], [p.requires_grad for p in moved])
        if seen == self._seen:
            return False
        self._seen = seen
        trained = (p for p in self._model.parameters() if p.requires_grad)
        self.held = list({id(p): p for p in (*trained, *moved)}.values())
        return True

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.held if p.requires_grad]

    def unexchanged(self) -> list[torch.nn.Parameter]:
        return [p for p in self.held if p.requires_grad and id(p) not in self._exchanged]

    def exchange(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._exchanged |= {id(p) for p in parameters}


def agree_on(collective: Collective, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raises unless all ranks add the same parameters with the same values."""
    kinds = json.dumps([[list(p.shape), str(p.dtype)] for p in parameters])
    first = share_bytes(collective, kinds.encode()).decode()
    if _any(collective, first != kinds):
        raise ConfigError(
            "workers have started to train different parameters: the first one those of (shape, dtype)"
            f" {first}, this one {kinds}.\nHint: {EVERY_WORKER}"
        )
    raw = (p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for p in parameters)
    values = b"".join(hashlib.sha256(data).digest() for data in raw)
    if _any(collective, share_bytes(collective, values) != values):
        raise ConfigError(
            "a parameter that was added during training has different values on different workers.\n"
            "Hint: create it with the same random numbers everywhere: torch.manual_seed(run.epoch) before it."
        )


def _any(collective: Collective, flag: bool) -> bool:
    return bool(collective.sum([np.array([flag], np.int64)])[0][0])


def trained(modules: Modules) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in named_parameters(modules).items()}


def recall_trained(flags: Mapping[str, bool], modules: Modules) -> None:
    for name, parameter in named_parameters(modules).items():
        if flags.get(name, parameter.requires_grad) is not parameter.requires_grad:
            parameter.requires_grad_(flags[name])


def group_names(optimizer: torch.optim.Optimizer, modules: Modules) -> list[list[str | None]]:
    """None if no module has the parameter."""
    names = {id(parameter): name for name, parameter in named_parameters(modules).items()}
    return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    groups: Sequence[Sequence[str | None]],
    modules: Modules,
) -> None:
    """Works even if groups were added or layers unfrozen, before or after."""
    named = named_parameters(modules)
    if any(name not in named for group in groups for name in group):  # parameters of nobody: by their order
        _load(optimizer, state)
        return
    built = optimizer.param_groups[:]
    then = {id(named[name]) for group in groups for name in group if name is not None}
    later = [[p for p in group["params"] if id(p) not in then] for group in built]
    fresh = {p: optimizer.state[p] for params in later for p in params if p in optimizer.state}
    optimizer.param_groups[len(groups) :] = []
    for place, names in enumerate(groups):
        params = [named[name] for name in names if name is not None]
        if place < len(built):
            optimizer.param_groups[place]["params"] = params
        else:
            optimizer.add_param_group({"params": params})
    _load(optimizer, state)
    optimizer.state.update(fresh)
    for place, params in enumerate(later):
        if place < len(groups):
            optimizer.param_groups[place]["params"] += params
        elif params:
            optimizer.param_groups.append({**built[place], "params": params})


def _load(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    try:
        optimizer.load_state_dict(dict(state))
    except ValueError as exc:
        raise ConfigError(
            f"the state belongs to another optimizer: {exc}\n"
            "Hint: build the optimizer in the same way; or load only the weights, with load_weights()."
        ) from exc


def named_parameters(modules: Modules) -> dict[str, torch.nn.Parameter]:
    return {prefix + name: p for prefix, module in modules.items() for name, p in module.named_parameters()}


def state_bytes(state: Mapping[Any, Mapping[str, Any]]) -> int:
    """This rank's part of an optimizer's state."""
    values = (value for own in state.values() for value in own.values() if isinstance(value, torch.Tensor))
    return sum((v.to_local() if hasattr(v, "to_local") else v).nbytes for v in values)


class Modes:
    """Modules in evaluation mode in a model in training mode rest for the whole run (a frozen BatchNorm).

    All others train in every training step, whatever callbacks do in between. A model in evaluation mode as a
    whole says nothing about its parts.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._said = model.training
        self.resting = _resting(model)
        self._expected: list[tuple[torch.nn.Module, bool]] = []
        self._trains: bool | None = None
        self._begun = False

    def recall(self, resting: Iterable[str]) -> None:
        """This model's own modes take precedence."""
        if not self._said:
            self.resting = set(resting)

    def train(self) -> None:
        if not self._begun:  # what `on_run_begin` has put to rest belongs to the beginning too
            self._begun = True
            self.resting |= _resting(self._model)
        if self._trains and all(module.training is mode for module, mode in self._expected):
            return
        self._model.train()  # first: a model may have its own idea of it
        modules = dict(self._model.named_modules())
        for name in self.resting & modules.keys():
            modules[name].training = False
        self._expected = [(module, module.training) for module in modules.values()]
        self._trains = True

    def evaluate(self) -> None:
        if self._trains is not False or self._model.training:
            self._model.eval()
            self._trains = False


def _resting(model: torch.nn.Module) -> set[str]:
    if not model.training:
        return set()
    return {name for name, module in model.named_modules() if not module.training}
