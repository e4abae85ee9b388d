"""Keras models as `.keras` files: looked through first, then loaded in safe mode."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
import numpy as np

from kindler.estimator.estimator import Estimator
from kindler.frameworks.keras import backends
from kindler.frameworks.keras.spec import custom_objects as custom_objects_of
from kindler.models.framework import FrameworkKind, matrix
from kindler.models.keras_predictor import KerasPredictor
from kindler.models.kind import confined, require_trust
from kindler.models.predictor import Predictor
from kindler.models.safety.keras_file import dangers

if TYPE_CHECKING:
    from kindler.models.loaded import LoadedModel

_FILE, _OBJECTS = "model.keras", "objects.pickle"
_BATCH = 32  # of `predict`, unless it is given another


class KerasKind(FrameworkKind):
    """Models of Keras 3, and `.keras` files.

    Custom classes are found again if they are registered with `keras.saving.register_keras_serializable`, or
    given to `get` as `custom_objects`. Those of a notebook or script are stored with their code.
    """

    kind: ClassVar[str] = "keras"
    get_options: ClassVar[frozenset[str]] = frozenset({"custom_objects"})
    verbs: ClassVar[tuple[str, ...] | None] = ("predict", "score")
    packages: ClassVar[tuple[str, ...]] = ("keras",)

    def can(self, obj: Any) -> bool:
        return isinstance(obj, Path) or backends.flavour_of(obj) == self.kind

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        target = folder / _FILE
        if isinstance(obj, Path):
            shutil.copyfile(obj, target)
            self._check(target, {}, trusted=trusted)
            return {}
        obj.save(str(target))
        # Its own classes are the writer's; what the file says beyond them is the matter.
        self._check(target, _classes(obj), trusted=trusted)
        meta: dict[str, Any] = {"inputs": _shapes(obj, "inputs"), "outputs": _shapes(obj, "outputs")}
        if own := _of_main(obj, self.kind):
            (folder / _OBJECTS).write_bytes(cloudpickle.dumps(own))
            meta["code"] = sorted(own)
        return meta

    def read(
        self,
        folder: Path,
        meta: Mapping[str, Any],
        *,
        trusted: bool,
        custom_objects: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        path = folder / _FILE
        missing = [name for name in meta.get("code") or () if name not in (custom_objects or {})]
        if missing:
            require_trust(
                trusted,
                what="the Keras model",
                reason=f"it has {', '.join(missing)} of a notebook or script, stored as a pickle (or give"
                " custom_objects={...})",
            )
            stored = cloudpickle.loads(confined(folder, _OBJECTS).read_bytes())
            custom_objects = {**stored, **(custom_objects or {})}
        self._check(path, dict(custom_objects or {}), trusted=trusted)
        return self._library().saving.load_model(
            str(path), custom_objects=dict(custom_objects or {}) or None, safe_mode=not trusted
        )

    def estimator(self, **options: Any) -> Estimator:
        return Estimator.from_keras(**options)

    def predictor(self, model: Any) -> Predictor:
        return KerasPredictor(model)

    def settle(self, device: str, meta: Mapping[str, Any]) -> None:
        self._library()
        self.device = backends.settled(self._backend(), device)

    def device_bytes(self, meta: Mapping[str, Any]) -> int:
        return backends.on(self._backend()).taken_bytes() if self.device == "cuda" else 0

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        """`score` is `evaluate`, by name."""
        model, (x, *labels) = loaded.model, data
        if verb == "score":
            y = matrix(labels[0]) if labels else None
            return model.evaluate(matrix(x), y, **{"verbose": 0, "return_dict": True, **options})
        if not options and isinstance(x, np.ndarray) and x.dtype == np.float32 and 0 < len(x) <= _BATCH:
            # The one batch that `predict` would make of it, without setting up a pipeline for it.
            return model.predict_on_batch(x)
        return model.predict(matrix(x), **{"verbose": 0, **options})

    def requirements(self, meta: Mapping[str, Any]) -> tuple[str, ...]:
        return (*self.packages, self._backend())

    def _backend(self) -> str:
        return backends.backend_of(None, None)

    def _library(self) -> Any:
        return backends.load(self._backend())

    def _check(self, path: Path, own: Mapping[str, Any], *, trusted: bool) -> None:
        if trusted:
            return
        registered = self._library().saving.get_registered_object

        def known(name: str) -> bool:
            # What Keras registers of its own is on the list of what is harmless, or not.
            found = own.get(name) or registered(name)
            module = str(getattr(found, "__module__", ""))
            return found is not None and module.partition(".")[0] not in ("keras", "tf_keras")

        found = dangers(path, is_registered=known)
        if found:
            require_trust(trusted, what="the Keras model", reason=f"it has {', '.join(found)}")


class TfKerasKind(KerasKind):
    """Models of Keras 2."""

    kind: ClassVar[str] = "tf_keras"
    packages: ClassVar[tuple[str, ...]] = ("tf_keras",)

    def _backend(self) -> str:
        return "tensorflow"

    def _library(self) -> Any:
        return importlib.import_module("tf_keras")


def _of_main(model: Any, flavour: str) -> dict[str, Any]:
    """The classes and functions of a notebook or script in a model, by the names that Keras looks for."""
    found = custom_objects_of(model, flavour)
    return {name: part for name, part in found.items() if getattr(part, "__module__", "") == "__main__"}


def _classes(model: Any) -> dict[str, Any]:
    """The model's own class and those of its layers, by name."""
    parts = [model, *getattr(model, "_flatten_layers", lambda: model.layers)()]
    return {type(part).__name__: type(part) for part in parts}


def _shapes(model: Any, side: str) -> list[dict[str, Any]] | None:
    """What goes in or out, where the model knows."""
    try:
        tensors = getattr(model, side)
    except AttributeError:
        return None
    found = tensors if isinstance(tensors, list | tuple) else [tensors]
    try:
        return [
            {
                "name": str(t.name),
                "dtype": _dtype(t),
                "shape": [None if n is None else int(n) for n in t.shape],
            }
            for t in found
        ]
    except (AttributeError, TypeError):
        return None


def _dtype(tensor: Any) -> str:
    return str(getattr(tensor.dtype, "name", tensor.dtype))
