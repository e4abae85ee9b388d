"""Anything that can be pickled, and files that are pickles; only for those who trust each other."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle

from kindler.errors import ConfigError
from kindler.models.kind import ModelKind, OwnMethods, confined, require_trust
from kindler.models.predictor import CallablePredictor, Predictor
from kindler.models.registry import MODEL_KINDS

_FILE = "object.pickle"
_TORCH = (".pt", ".pth")


class PickleKind(OwnMethods):
    """Any object; and `.pt`, `.pth`, `.pkl` and `.joblib` files, which are kept as they are."""

    kind: ClassVar[str] = "pickle"
    needs_trust: ClassVar[bool] = True
    _inside: ModelKind | None = None

    def can(self, obj: Any) -> bool:
        return True

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        shown = f"the file {str(obj)!r}" if isinstance(obj, Path) else f"a {type(obj).__qualname__}"
        require_trust(trusted, what=shown, reason="it is a pickle, and reading a pickle can run any program")
        if isinstance(obj, Path):
            shutil.copyfile(obj, folder / f"object{obj.suffix}")
            return {"file": f"object{obj.suffix}"}
        try:
            (folder / _FILE).write_bytes(cloudpickle.dumps(obj))
        except Exception as exc:  # the object's own code says why it cannot be
            raise ConfigError(f"{shown} cannot be pickled: {exc!r}.") from exc
        return {"file": _FILE}

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        require_trust(trusted, what="a stored pickle", reason="reading a pickle can run any program")
        path = confined(folder, meta["file"])
        if path.suffix in _TORCH:
            import torch

            return torch.load(path, weights_only=False)
        if path.suffix == ".joblib":
            import joblib

            return joblib.load(path)
        return cloudpickle.loads(path.read_bytes())

    def predictor(self, model: Any) -> Predictor:
        """A pickled model of another kind predicts as that kind does, and where it was told to."""
        kind = MODEL_KINDS.kind_of(model)
        if not isinstance(kind, PickleKind):
            if self.device is not None:
                kind.settle(self.device, {})
                self._inside = kind
            return kind.predictor(model)
        if not callable(getattr(model, "predict", None)):
            raise ConfigError(f"a {type(model).__qualname__} cannot predict: it has no predict().")
        return CallablePredictor(model)

    def settle(self, device: str, meta: Mapping[str, Any]) -> None:
        """What is in it is known once it was read; code of the user's own does as it likes."""
        self.device = None if device == "auto" else device

    def device_bytes(self, meta: Mapping[str, Any]) -> int:
        return 0 if self._inside is None else self._inside.device_bytes({})

    def put_again(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        return {"kind": self.kind}
