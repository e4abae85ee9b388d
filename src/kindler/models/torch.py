"""PyTorch modules: weights as safetensors, beside the layers or the name of the class that they belong to.

Neither is a pickle. Layers are those of `torch.nn`. Any other class is given by the reader, or imported by
its name if the reader trusts the store. A class of a notebook or script, which nobody can import, is stored
with its code, and read only by those who trust it. An exported program runs code of its file: loading it
evaluates text from the file.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import mmap
import shutil
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, cast

import cloudpickle
import numpy as np
import torch
from torch import nn

from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.frameworks.torch.device import gpu_problem, taken_bytes
from kindler.frameworks.torch.outputs import flat, names_of, without_loss
from kindler.models import _torch_recipe as recipes
from kindler.models._torch_gpu import CALLS, GpuCalls, Tensors
from kindler.models.estimator import FrameworkKind, matrix
from kindler.models.kind import (
    LoadedModel,
    Meta,
    confined,
    import_object,
    import_path,
    reject_unknown,
    require_trust,
)
from kindler.models.predictor import (
    TOLERANCES,
    BatchPlan,
    PendingCall,
    Predictor,
    batch_sizes,
    difference,
    named,
    plain,
)
from kindler.models.signature import Array, Arrays, Signature, TensorSpec
from kindler.registry import imported

Classes: TypeAlias = Sequence[type[nn.Module]]

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PRECISIONS = {dtype: name for name, dtype in HALF.items()}
_ALONE = 4  # rows that are compared with themselves in larger batches
_WEIGHTS, _PROGRAM, _BY_VALUE = "weights.safetensors", "program.pt2", "model.pickle"
_HINT = (
    "Hint: init={...} sets the arguments of its constructor, if the class can be imported; example=(x,)"
    " with trusted=True stores a torch.export program; kind='pickle' with trusted=True stores any model."
)


class TorchKind(FrameworkKind):
    """`nn.Module` objects, and `.pt2` files of `torch.export`.

    `init` are the arguments of its class, as JSON values. `example` is a tuple of inputs, with
    which `torch.export` makes a program that needs no class. `classes` are those that the model may be of.
    """

    kind = "torch"
    put_options = frozenset({"init", "example"})
    get_options = frozenset({"classes"})
    packages: ClassVar[tuple[str, ...]] = ("torch", "safetensors")

    def can(self, obj: Any) -> bool:
        return isinstance(obj, nn.Module | Path)

    def write(
        self,
        obj: Any,
        folder: Path,
        *,
        trusted: bool,
        init: Mapping[str, Any] | None = None,
        example: tuple[Any, ...] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        if isinstance(obj, Path) or example is not None:
            _require_trusted_program(trusted)
            if isinstance(obj, Path):
                shutil.copyfile(obj, folder / _PROGRAM)
            else:
                torch.export.save(torch.export.export(obj, tuple(example or ())), folder / _PROGRAM)
            return {"form": "program"}
        if any(type(part).__module__ == "__main__" for part in obj.modules()):  # which nobody can import
            (folder / _BY_VALUE).write_bytes(_pickled(obj))
            return {"form": "value", "class": _path(type(obj))}
        recipe = _how_to_make(obj, init)
        try:
            recipe |= recipes.state_recipe(obj)
        except ConfigError as exc:
            raise ConfigError(f"{exc}\n{_HINT}") from exc
        _check_same(obj, recipe)
        save_weights(recipes.weights_of(obj, recipe), folder / _WEIGHTS)
        return recipe

    def read(self, folder: Path, meta: Meta, *, trusted: bool, classes: Classes = (), **options: Any) -> Any:
        if meta["form"] == "program":
            _require_trusted_program(trusted)
            program: Any = torch.export.load(folder / _PROGRAM)
            if self.device == "cuda":  # its operations name the device that they make tensors on
                program = importlib.import_module("torch.export.passes").move_to_device_pass(program, "cuda")
            return program.module()
        if meta["form"] == "value":
            require_trust(
                trusted,
                what=f"a PyTorch model of the class {str(meta['class'])!r}",
                reason="its class is defined in a notebook or script and is stored with its code, as a"
                " pickle",
            )
            return cloudpickle.loads(confined(folder, _BY_VALUE).read_bytes())
        cls = None if meta["form"] == "layers" else class_of(str(meta["class"]), classes, trusted=trusted)
        weights = {name: value.clone() for name, value in load_weights(folder / _WEIGHTS).items()}
        try:
            return recipes.restore(_made(meta, cls), weights, meta)
        except Exception as exc:  # of PyTorch, or of the user's class: they say why
            raise ConfigError(f"the stored PyTorch model cannot be rebuilt: {exc}") from exc

    def estimator(self, **options: Any) -> Estimator:
        return Estimator.from_torch(**options)

    def predictor(self, model: Any) -> Predictor:
        return TorchPredictor(model, self.device or "cpu")

    def named_predictor(self, model: Any, inputs: str, names: Sequence[str]) -> Predictor | None:
        if inputs not in ("dict", "kwargs"):
            return None
        return NamedTorchPredictor(model, inputs, names, self.device or "cpu")

    def gpu_problem(self, meta: Meta) -> str | None:
        return gpu_problem()

    def device_bytes(self, meta: Meta) -> int:
        return taken_bytes()

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        """Several inputs go in the order of the data; outputs keep their form."""
        (x,), model = data, loaded.model
        reject_unknown(options, frozenset(), what="predict of kind 'torch'")
        given = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else [x]
        dtypes = (weight.dtype for weight in model.parameters() if weight.is_floating_point())
        dtype = next(dtypes, torch.float32)
        tensors = [torch.from_numpy(np.array(matrix(one))) for one in given]
        tensors = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]
        _to_eval(model)
        with torch.inference_mode():
            return plain(model(*tensors))

    def fit_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Optimizer and loss by the names of PyTorch's own classes: objects of them do not travel."""
        options = dict(options)
        rate = options.pop("lr", None)
        optimizer = _named("optimizer", options.get("optimizer"), torch.optim, torch.optim.Optimizer)
        options["optimizer"] = optimizer if rate is None else functools.partial(optimizer, lr=rate)
        options["loss"] = _named("loss", options.get("loss"), nn, nn.Module)()
        return options

    def text_models(self) -> Any:
        return imported("kindler.models.text", what="a text model", extra="huggingface")

    def describe_training(self, estimator: Estimator) -> dict[str, Any] | None:
        return recipes.describe_training(estimator)

    def training_options(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        return recipes.training_options(recipe)

    def put_again(self, meta: Meta) -> dict[str, Any]:
        """A class of the user's is made with the same arguments."""
        return {"init": meta["init"]} if meta.get("form") == "class" else {}


def _require_trusted_program(trusted: bool) -> None:
    require_trust(trusted, what="an exported program", reason="loading it evaluates text from the file")


def _made(meta: Meta, cls: type[nn.Module] | None) -> nn.Module:
    """The module, whose weights are still to come."""
    if cls is not None and recipes.layer_class(cls.__name__) is not cls:
        return cls(**meta["init"])
    # Without numbers: all of them come from the file, and no more memory is taken than that has.
    with torch.device("meta"):
        return recipes.build(meta["layers"]) if cls is None else cls(**meta["init"])


def _pickled(model: nn.Module) -> bytes:
    """The model with the code of its classes, on the CPU, whatever it is on."""
    twin = copy.deepcopy(model).cpu()
    try:
        data: bytes = cloudpickle.dumps(twin)
    except Exception as exc:  # the model's own code says why it cannot be
        raise ConfigError(f"the model cannot be pickled: {exc!r}.\n{_HINT}") from exc
    return data


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _how_to_make(model: nn.Module, init: Mapping[str, Any] | None) -> dict[str, Any]:
    layers = recipes.describe(model) if init is None else None
    if layers is not None:
        return {"form": "layers", "layers": layers}
    path = import_path(type(model))
    if path is None:
        raise ConfigError(
            f"the class of this model, {_path(type(model))}, cannot be imported elsewhere.\n{_HINT}"
        )
    return {"form": "class", "class": path, "init": dict(init or {})}


def _check_same(model: nn.Module, recipe: Mapping[str, Any]) -> None:
    """Make the module again as a reader will, without its numbers, and compare."""
    by_class = recipe["form"] == "class"
    shown = f"{recipe['class']} with init={recipe['init']!r}" if by_class else "the rebuilt model"
    try:
        with torch.device("meta"):
            again = _made(recipe, type(model) if by_class else None)
    except Exception as exc:  # the class's own code says why it cannot be made
        raise ConfigError(f"{shown} cannot be built: {exc}.\n{_HINT}") from exc
    ties = {name for names in recipe["ties"] for name in names[1:]}
    empty = {
        name: torch.empty_like(value, device="meta")
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor) and name not in ties
    }
    try:
        differ = recipes.difference(model, recipes.restore(again, empty, recipe))
    except Exception as exc:  # PyTorch says which
        raise ConfigError(f"{shown} is a different model: {exc}\n{_HINT}") from exc
    if differ:
        raise ConfigError(f"{shown} is a different model: {differ[:5]} differ.\n{_HINT}")


def class_of(path: str, classes: Classes, *, trusted: bool) -> type[nn.Module]:
    """A layer of PyTorch's own, a class that the caller gave, or any that can be imported if trusted."""
    for cls in (recipes.layer_class(path.rpartition(":")[2]), *classes):
        if cls is not None and _path(cls) == path:
            return cls
    require_trust(
        trusted,
        what=f"a PyTorch model of the class {path!r}",
        reason="its class would be imported by the name that is stored with it (or pass classes=[...])",
    )
    found = import_object(path, what="the model's class")
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(f"{path!r} is not an nn.Module class.")
    return found


def _named(key: str, name: Any, module: types.ModuleType, base: type) -> Any:
    """A class of PyTorch's own by its name."""
    if not isinstance(name, str):
        raise ConfigError(
            f"fit({key}={name!r}): a PyTorch model is trained with the name of a class of"
            f" {module.__name__}.\n"
            "Hint: fit(x, y, optimizer='Adam', lr=1e-3, loss='CrossEntropyLoss', epochs=2)."
        )
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"fit({key}={name!r}): {module.__name__} has no such class.")
    return found


def save_weights(weights: dict[str, torch.Tensor], path: Path) -> None:
    try:
        _safetensors().save_file(weights, path)
    except (ValueError, KeyError, RuntimeError) as exc:
        raise ConfigError(f"the model's weights cannot be stored: {exc}.\n{_HINT}") from exc


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    safetensors = _safetensors()
    try:
        found: dict[str, torch.Tensor] = safetensors.load_file(path)
    except Exception as exc:  # its errors have no base of their own
        raise ConfigError(f"the stored weights cannot be read: {exc}.") from exc
    return found


def _safetensors() -> Any:
    return imported("safetensors.torch", what="a stored PyTorch model", extra="torch")


class TorchPredictor(Predictor):
    """An `nn.Module`, or the module of an exported program, in inference mode.

    The model is moved to the device. `inputs_of` is the module whose `forward` says what the inputs are, if
    that is another one.
    """

    def __init__(self, model: nn.Module, device: str = "cpu", *, inputs_of: nn.Module | None = None) -> None:
        self._device = torch.device(device)
        self._model = model = model if device == "cpu" else model.to(self._device)
        _to_eval(model)
        weights = [*model.parameters(), *model.buffers()]
        self.size = sum(w.numel() * w.element_size() for w in weights)
        self._float = next((w.dtype for w in weights if w.is_floating_point()), torch.float32)
        self._half: torch.dtype | None = None
        self._casts_weights = all(w.dtype == self._float for w in weights if w.is_floating_point())
        # Where whole numbers are looked up in a table they stay what they are; elsewhere layers want floats.
        looks_up = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules())
        name = str(self._float).removeprefix("torch.")
        dtype = None if looks_up or name == "bfloat16" else name
        self._takes_floats = dtype is not None
        self.tolerance = TOLERANCES[self._precision if device == "cpu" or self._is_half else "tf32"]
        self.signature = Signature(_inputs(inputs_of or model, dtype))
        self._calls: GpuCalls | None = None
        if self._device.type == "cuda":
            convolves = any(isinstance(m, nn.Conv2d) for m in model.modules())
            self._calls = GpuCalls(self._compute, self._device, channels_last=convolves)
            self.calls = CALLS

    @property
    def _precision(self) -> str:
        return _PRECISIONS.get(self._half or self._float, "fp32")

    @property
    def _is_half(self) -> bool:
        return self._precision in HALF

    def set_precision(self, precision: str) -> None:
        if precision not in ("fp32", *HALF):
            raise ConfigError(f"attributes precision={precision!r}: must be 'fp32', 'bf16' or 'fp16'.")
        if precision != "fp32":
            self._half = HALF[precision]
            self.tolerance = TOLERANCES[precision]

    def call(self, inputs: Arrays, method: str) -> Arrays:
        if (pending := self.begin(inputs, method)) is not None:
            return pending.wait()
        with torch.inference_mode():
            outputs = self._compute({name: _lent(array) for name, array in inputs.items()})
            return {name: tensor.numpy() for name, tensor in outputs.items()}

    def begin(self, inputs: Arrays, method: str) -> PendingCall | None:
        return None if self._calls is None else self._calls.begin(inputs)

    def attach(self, memories: Sequence[mmap.mmap]) -> None:
        if self._calls is not None:
            self._calls.register(memories)

    def trials(self) -> list[tuple[AbstractContextManager[Any], float]]:
        """In single precision, which tells more; models that name their own precision take no other."""
        if self._precision == "fp32" and self._device.type == "cpu":
            return [(nullcontext(), self.tolerance)]
        half: list[tuple[AbstractContextManager[Any], float]]
        half = [(nullcontext(), TOLERANCES[_PRECISIONS.get(self._float, "tf32")])]
        exact = [(self._exactly(), TOLERANCES["fp32"])]
        can_cast = self._casts_weights and not isinstance(self._model, torch.fx.GraphModule)
        return [*exact, *half] if can_cast else half

    def prepare(self, rows: Arrays | None, *, joins: bool) -> BatchPlan:
        if self._half is not None:
            _halve(self._model, self._half)
        plan = BatchPlan(self._precision, self.tolerance)
        if self._calls is None:
            if not self._is_half or rows is None or not joins:
                return plan
            most = len(next(iter(rows.values())))
            return replace(plan, within=self._differs(rows, self._alone(rows), [most]))
        if rows is None or not joins:
            self._warm_up(rows)
            why = "its inputs are unknown" if rows is None else "its rows are not computed by themselves"
            return replace(plan, graphs=why)
        if any(isinstance(m, nn.Conv2d) for m in self._model.modules()):
            self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            torch.backends.cudnn.benchmark = True
        sizes = batch_sizes(len(next(iter(rows.values()))))
        alone = self._alone(rows)
        if any(spec.shape is None or None in spec.shape[1:] for spec in self.signature.inputs):
            within = self._differs(rows, alone, sizes)
            return replace(plan, within=within, graphs="the shapes of its inputs are not declared")
        problem = self._calls.record(rows, sizes, self._cast)
        within = self._differs(rows, alone, sizes)
        if not problem and within > self.tolerance:  # it computes in Python what a graph has as it was
            self._calls.forget()
            problem, within = "with them, its outputs differ", self._differs(rows, alone, sizes)
        return replace(plan, within=within, sizes=sizes, graphs=problem or "yes")

    def _alone(self, rows: Arrays) -> list[Arrays]:
        """The outputs of the first rows, each computed alone."""
        few = range(min(_ALONE, len(next(iter(rows.values())))))
        return [self.call({name: array[i : i + 1] for name, array in rows.items()}, "predict") for i in few]

    def _differs(self, rows: Arrays, alone: list[Arrays], sizes: Sequence[int]) -> float:
        """How far the first rows of batches of these sizes are from them alone; all that is warmed up."""
        found = 0.0
        for size in sizes:
            together = self.call({name: array[:size] for name, array in rows.items()}, "predict")
            count = min(size, len(alone))
            apart = {name: np.concatenate([one[name] for one in alone[:count]]) for name in together}
            found = max(found, difference(apart, {name: array[:count] for name, array in together.items()}))
        return found

    def _warm_up(self, rows: Arrays | None) -> None:
        if rows is not None:
            self.call({name: array[:1] for name, array in rows.items()}, "predict")

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        stored, half = self._float, self._half
        matmul, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, convolutions.allow_tf32
        try:
            self._float, self._half = torch.float32, None
            matmul.allow_tf32 = convolutions.allow_tf32 = False
            if stored != torch.float32:
                self._model.float()
            yield
        finally:
            self._float, self._half = stored, half
            matmul.allow_tf32, convolutions.allow_tf32 = before
            if stored != torch.float32:
                self._model.to(stored)

    def _compute(self, tensors: Tensors) -> Tensors:
        given = {name: self._cast(tensor) for name, tensor in tensors.items()}
        with torch.autocast(self._device.type, self._half, enabled=self._half is not None):
            outputs = self._called(given)
        wide = torch.bfloat16 if self._half is None else self._half
        return {
            name: tensor.float() if tensor.dtype in (wide, torch.bfloat16) else tensor
            for name, tensor in outputs.items()
        }

    def _called(self, tensors: Tensors) -> Tensors:
        inputs = (tensors[spec.name] for spec in self.signature.inputs)
        outputs: Any = named(self._model(*inputs), convert=_tensor)
        return cast(Tensors, outputs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or (self._takes_floats and tensor.dtype is not torch.bool):
            return tensor.to(self._float)
        return tensor


class NamedTorchPredictor(TorchPredictor):
    """A module that takes its inputs by name.

    `inputs` "kwargs" calls `model(name=input)`, "dict" calls `model({name: input})`. `names` are the inputs
    that requests have; other callers may pass other ones.
    """

    by_name = True

    def __init__(self, model: nn.Module, inputs: str, names: Sequence[str], device: str = "cpu") -> None:
        super().__init__(model, device)
        self._by_keyword = inputs == "kwargs"
        self._takes_floats = False
        self.signature = Signature(tuple(TensorSpec(name) for name in names))

    def _called(self, tensors: Tensors) -> Tensors:
        outputs = without_loss(self._model(**tensors) if self._by_keyword else self._model(tensors))
        made: Any = named(flat(outputs), names_of(outputs) or (), convert=_tensor)
        return cast(Tensors, made)


def _to_eval(model: nn.Module) -> None:
    try:
        model.eval()
    except NotImplementedError:
        pass  # an exported program is as it was exported


def _inputs(model: nn.Module, dtype: str | None) -> tuple[TensorSpec, ...]:
    names = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(names) > 1:
        return tuple(TensorSpec(name, dtype, narrow=dtype is not None) for name in names)
    # What a chain of layers begins with, where the first of them says so.
    first: Any = model
    while isinstance(first, nn.Sequential) and len(first):
        first = first[0]
    first = getattr(first, "base_layer", first)  # of an adapter of peft's
    shape = (None, first.in_features) if isinstance(first, nn.Linear) else None
    return (TensorSpec(names[0] if names else "input", dtype, shape, narrow=dtype is not None),)


def _halve(model: nn.Module, half: torch.dtype) -> None:
    """The weights that autocast would cast at each call; norms keep theirs."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.MultiheadAttention | nn.modules.conv._ConvNd):
            module.to(half)


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)


def _lent(array: Array) -> torch.Tensor:
    # PyTorch would warn of one that is read-only: it cannot tell that nobody writes to it.
    return torch.from_numpy(np.ascontiguousarray(array if array.flags.writeable else array.copy()))
