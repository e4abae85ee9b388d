"""PyTorch modules: weights as safetensors, beside the layers or the name of the class that they belong to.

Neither is a pickle. A class is imported from what is installed where the model is read, and must be a module.
An exported program runs code of its file: loading it evaluates text that is in it.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from kindler.errors import ConfigError, MissingExtraError
from kindler.shelves.handler import Handler, require_trust
from kindler.shelves.kinds.torch_layers import build, describe

__all__ = ["TorchHandler"]

_WEIGHTS, _PROGRAM = "weights.safetensors", "program.pt2"
_HINT = (
    "Hint: init={...} gives the arguments that its class is made with, if the class can be imported;"
    " example=(x,) with trusted=True stores a program of torch.export; kind='pickle' with trusted=True any"
    " model."
)


class TorchHandler(Handler):
    """`nn.Module` objects, and `.pt2` files of `torch.export`.

    `init` are the arguments its class is made with, as JSON has them. `example` is a tuple of inputs, with
    which `torch.export` makes a program that needs no class.
    """

    kind: ClassVar[str] = "torch"
    put_options: ClassVar[frozenset[str]] = frozenset({"init", "example"})

    def can(self, obj: Any) -> bool:
        """See `Handler`."""
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
        """See `Handler`."""
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
        told = _how_to_make(obj, init)
        _safetensors().save_file(_weights(obj), folder / _WEIGHTS)
        return {**told, "training": obj.training}

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        """See `Handler`."""
        if meta["form"] == "program":
            require_trust(
                trusted, what="an exported program", reason="loading it evaluates text that is in it"
            )
            return torch.export.load(folder / _PROGRAM).module()
        model = build(meta["layers"]) if meta["form"] == "layers" else _class(meta["class"])(**meta["init"])
        model.load_state_dict(_safetensors().load_file(folder / _WEIGHTS))
        return model.train(bool(meta["training"]))


def _how_to_make(model: torch.nn.Module, init: Mapping[str, Any] | None) -> dict[str, Any]:
    layers = describe(model) if init is None else None
    if layers is not None:
        return {"form": "layers", "layers": layers}
    cls = type(model)
    path = f"{cls.__module__}:{cls.__qualname__}"
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    if cls.__module__ == "__main__" or found is not cls:
        raise ConfigError(f"the class of this model, {path}, cannot be imported by others.\n{_HINT}")
    try:
        with torch.device("meta"):
            again = cls(**(init or {}))
    except Exception as exc:  # the class's own code says why it cannot be made
        raise ConfigError(f"{path} cannot be made with init={dict(init or {})!r}: {exc}.\n{_HINT}") from exc
    wanted, made = _shapes(model), _shapes(again)
    if wanted != made:
        differ = sorted(key for key in wanted.keys() | made.keys() if wanted.get(key) != made.get(key))
        raise ConfigError(
            f"{path} made with init={dict(init or {})!r} is another model: {differ[:5]} differ.\n{_HINT}"
        )
    return {"form": "class", "class": path, "init": dict(init or {})}


def _class(path: str) -> type[torch.nn.Module]:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"the model's class {path!r} cannot be imported here: {exc}.") from exc
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise ConfigError(f"{path!r} is no class of models.")
    return found


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    other = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
    if other:
        raise ConfigError(f"the model's state has {other[:5]}, which are no tensors.\n{_HINT}")
    # Copies: tensors that share their memory would be refused.
    return {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}


def _shapes(model: torch.nn.Module) -> dict[str, Any]:
    return {key: getattr(value, "shape", None) for key, value in model.state_dict().items()}


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ModuleNotFoundError as exc:
        raise MissingExtraError(what="a stored PyTorch model", package="safetensors", extra="torch") from exc
