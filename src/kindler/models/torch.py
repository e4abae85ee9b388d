"""PyTorch modules: weights as safetensors, beside the layers or the name of the class that they belong to.

Neither is a pickle. Layers are those of `torch.nn`. Any other class is given by the reader, or imported by
its name if the reader trusts the store. A class of a notebook or script, which nobody can import, is stored
with its code, and read only by those who trust it. An exported program runs code of its file: loading it
evaluates text that is in it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import shutil
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
import numpy as np
import torch

from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.frameworks.torch.device import gpu_problem, taken_bytes
from kindler.models import torch_training
from kindler.models.framework import FrameworkKind, matrix
from kindler.models.kind import confined, imported, known_only, require_trust
from kindler.models.predictor import Predictor, plain
from kindler.models.torch_layers import build, describe, layer_class
from kindler.models.torch_predictor import NamedTorchPredictor, TorchPredictor
from kindler.models.torch_state import difference, kept, noted, put_back

if TYPE_CHECKING:
    from kindler.models.loaded import LoadedModel

_WEIGHTS, _PROGRAM, _BY_VALUE = "weights.safetensors", "program.pt2", "model.pickle"
_HINT = (
    "Hint: init={...} gives the arguments that its class is made with, if the class can be imported;"
    " example=(x,) with trusted=True stores a program of torch.export; kind='pickle' with trusted=True any"
    " model."
)


class TorchKind(FrameworkKind):
    """`nn.Module` objects, and `.pt2` files of `torch.export`.

    `init` are the arguments its class is made with, as JSON has them. `example` is a tuple of inputs, with
    which `torch.export` makes a program that needs no class. `classes` are those that the model may be of.
    """

    kind: ClassVar[str] = "torch"
    put_options: ClassVar[frozenset[str]] = frozenset({"init", "example"})
    get_options: ClassVar[frozenset[str]] = frozenset({"classes"})
    packages: ClassVar[tuple[str, ...]] = ("torch", "safetensors")

    def can(self, obj: Any) -> bool:
        return isinstance(obj, torch.nn.Module | Path)

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
            require_trust(
                trusted, what="an exported program", reason="loading it evaluates text that is in it"
            )
        if isinstance(obj, Path):
            shutil.copyfile(obj, folder / _PROGRAM)
            return {"form": "program"}
        if example is not None:
            torch.export.save(torch.export.export(obj, tuple(example)), folder / _PROGRAM)
            return {"form": "program"}
        if _stands_in_main(obj):
            (folder / _BY_VALUE).write_bytes(_pickled(obj))
            return {"form": "value", "class": _path(type(obj))}
        recipe = _how_to_make(obj, init) | _noted(obj)
        _check_same(obj, recipe)
        save_weights(kept(obj, recipe), folder / _WEIGHTS)
        return recipe

    def read(
        self,
        folder: Path,
        meta: Mapping[str, Any],
        *,
        trusted: bool,
        classes: Sequence[type[torch.nn.Module]] = (),
        **options: Any,
    ) -> Any:
        if meta["form"] == "program":
            require_trust(
                trusted, what="an exported program", reason="loading it evaluates text that is in it"
            )
            return self._program(torch.export.load(folder / _PROGRAM))
        if meta["form"] == "value":
            require_trust(
                trusted,
                what=f"a PyTorch model of the class {str(meta['class'])!r}",
                reason="its class stands in a notebook or script and is stored with its code, as a pickle",
            )
            return cloudpickle.loads(confined(folder, _BY_VALUE).read_bytes())
        cls = None if meta["form"] == "layers" else class_of(str(meta["class"]), classes, trusted=trusted)
        weights = {name: value.clone() for name, value in load_weights(folder / _WEIGHTS).items()}
        try:
            return put_back(_made(meta, cls), weights, meta)
        except Exception as exc:  # of PyTorch, or of the user's class: they say why
            raise ConfigError(f"the stored PyTorch model cannot be made again: {exc}") from exc

    def estimator(self, **options: Any) -> Estimator:
        return Estimator.from_torch(**options)

    def predictor(self, model: Any) -> Predictor:
        return TorchPredictor(model, self.device or "cpu")

    def gpu_problem(self, meta: Mapping[str, Any]) -> str | None:
        return gpu_problem()

    def device_bytes(self, meta: Mapping[str, Any]) -> int:
        return taken_bytes()

    def _program(self, program: Any) -> Any:
        """The module of an exported program, whose operations name the device that they make tensors on."""
        if self.device == "cuda":
            program = importlib.import_module("torch.export.passes").move_to_device_pass(program, "cuda")
        return program.module()

    def named_predictor(self, model: Any, inputs: str, names: Sequence[str]) -> Predictor | None:
        if inputs not in ("dict", "kwargs"):
            return None
        return NamedTorchPredictor(model, inputs, names, self.device or "cpu")

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        """Several inputs go in the order of the data; outputs keep their form."""
        (x,), model = data, loaded.model
        known_only(options, frozenset(), what="predict of kind 'torch'")
        given = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else [x]
        dtypes = (weight.dtype for weight in model.parameters() if weight.is_floating_point())
        dtype = next(dtypes, torch.float32)
        tensors = [torch.from_numpy(np.array(matrix(one))) for one in given]
        tensors = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]
        try:
            model.eval()
        except NotImplementedError:
            pass  # an exported program is as it was exported
        with torch.inference_mode():
            return plain(model(*tensors))

    def fit_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Optimizer and loss by the names of PyTorch's own classes: objects of them do not travel."""
        options = dict(options)
        rate = options.pop("lr", None)
        options["optimizer"] = _named(
            "optimizer", options.get("optimizer"), torch.optim, torch.optim.Optimizer
        )
        options["loss"] = _named("loss", options.get("loss"), torch.nn, torch.nn.Module)()
        if rate is not None:
            options["optimizer"] = functools.partial(options["optimizer"], lr=rate)
        return options

    def describe_training(self, estimator: Estimator) -> dict[str, Any] | None:
        return torch_training.described(estimator)

    def training_options(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        return torch_training.options_of(recipe)

    def put_again(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """A class of the user's is made with the same arguments."""
        return {"init": meta["init"]} if meta.get("form") == "class" else {}


def _made(meta: Mapping[str, Any], cls: type[torch.nn.Module] | None) -> torch.nn.Module:
    """The module, whose weights are still to come."""
    if cls is not None and layer_class(cls.__name__) is not cls:
        return cls(**meta["init"])
    # Without numbers: all of them come from the file, and no more memory is taken than that has.
    with torch.device("meta"):
        return build(meta["layers"]) if cls is None else cls(**meta["init"])


def _stands_in_main(model: torch.nn.Module) -> bool:
    """Whether a class of the model is one of a notebook or script, which nobody can import."""
    return any(type(part).__module__ == "__main__" for part in model.modules())


def _pickled(model: torch.nn.Module) -> bytes:
    """The model with the code of its classes, on the CPU, whatever it is on."""
    twin = copy.deepcopy(model).cpu()
    try:
        data: bytes = cloudpickle.dumps(twin)
    except Exception as exc:  # the model's own code says why it cannot be
        raise ConfigError(f"the model cannot be pickled: {exc!r}.\n{_HINT}") from exc
    return data


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _how_to_make(model: torch.nn.Module, init: Mapping[str, Any] | None) -> dict[str, Any]:
    layers = describe(model) if init is None else None
    if layers is not None:
        return {"form": "layers", "layers": layers}
    cls = type(model)
    path = _path(cls)
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not cls:
        raise ConfigError(f"the class of this model, {path}, cannot be imported by others.\n{_HINT}")
    return {"form": "class", "class": path, "init": dict(init or {})}


def _noted(model: torch.nn.Module) -> dict[str, Any]:
    try:
        return noted(model)
    except ConfigError as exc:
        raise ConfigError(f"{exc}\n{_HINT}") from exc


def _check_same(model: torch.nn.Module, recipe: Mapping[str, Any]) -> None:
    """Make the module again as a reader will, without its numbers, and compare."""
    shown = (
        f"{recipe['class']} made with init={recipe['init']!r}"
        if recipe["form"] == "class"
        else "the model, made again,"
    )
    cls = type(model) if recipe["form"] == "class" else None
    try:
        with torch.device("meta"):
            again = _made(recipe, cls)
    except Exception as exc:  # the class's own code says why it cannot be made
        raise ConfigError(f"{shown.replace(' made ', ' cannot be made ')}: {exc}.\n{_HINT}") from exc
    ties = {name for names in recipe["ties"] for name in names[1:]}
    empty = {
        name: torch.empty_like(value, device="meta")
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor) and name not in ties
    }
    try:
        differ = difference(model, put_back(again, empty, recipe))
    except Exception as exc:  # PyTorch says which
        raise ConfigError(f"{shown} is another model: {exc}\n{_HINT}") from exc
    if differ:
        raise ConfigError(f"{shown} is another model: {differ[:5]} differ.\n{_HINT}")


def class_of(path: str, classes: Sequence[type[torch.nn.Module]], *, trusted: bool) -> type[torch.nn.Module]:
    """A layer of PyTorch's own, a class that the caller gave, or any that can be imported if trusted."""
    for cls in (layer_class(path.rpartition(":")[2]), *classes):
        if cls is not None and f"{cls.__module__}:{cls.__qualname__}" == path:
            return cls
    require_trust(
        trusted,
        what=f"a PyTorch model of the class {path!r}",
        reason="its class would be imported by the name that is stored with it (or give classes=[...])",
    )
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # code of the module's: it may also call sys.exit
        raise ConfigError(f"the model's class {path!r} cannot be imported here: {exc!r}.") from exc
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
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
    """Write tensors as safetensors."""
    try:
        _safetensors().save_file(weights, path)
    except (ValueError, KeyError, RuntimeError) as exc:
        raise ConfigError(f"the model's weights cannot be stored: {exc}.\n{_HINT}") from exc


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read what `save_weights` wrote."""
    safetensors = _safetensors()
    try:
        found: dict[str, torch.Tensor] = safetensors.load_file(path)
    except Exception as exc:  # its errors have no base of their own
        raise ConfigError(f"the stored weights cannot be read: {exc}.") from exc
    return found


def _safetensors() -> Any:
    what = "a stored PyTorch model"
    return imported("safetensors.torch", what=what, package="safetensors", extra="torch")
