"""Kindler's estimators: the trained model as its framework is stored, with its history and what it read.

Read again, an estimator predicts as it did, and a compiled Keras model can be trained on. PyTorch's
optimizer, loss and metrics are code: whoever wants to train on gives them to `get`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.frameworks.registry import framework_of_kind
from kindler.models.kind import Handler, known_only
from kindler.models.registry import MODEL_KINDS

__all__ = ["EstimatorHandler"]

_MODEL = "model"


class EstimatorHandler(Handler):
    """`kindler.Estimator` objects. `get` takes the arguments of `Estimator.from_torch` or `from_keras`."""

    kind: ClassVar[str] = "estimator"
    put_options: ClassVar[frozenset[str]] = frozenset({"init", "example"})
    takes_any: ClassVar[bool] = True

    def can(self, obj: Any) -> bool:
        """See `Handler`."""
        return isinstance(obj, Estimator)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        """See `Handler`."""
        model = obj.get_model()
        handler = MODEL_KINDS.taking(model, "models")
        known_only(options, handler.put_options, what=f"put of an estimator of kind {handler.kind!r}")
        inside = folder / _MODEL
        inside.mkdir()
        return {
            "model_kind": handler.kind,
            "model_meta": handler.write(model, inside, trusted=trusted, **options),
            "signature": obj.signature,
            "history": list(obj.history),
        }

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        """See `Handler`."""
        framework = framework_of_kind(str(meta["model_kind"]))
        if framework is None:
            raise ConfigError(f"an estimator cannot have a model of kind {meta['model_kind']!r}.")
        handler = MODEL_KINDS.handler(str(meta["model_kind"]))
        for_model = {name: options.pop(name) for name in handler.get_options if name in options}
        model = handler.read(folder / _MODEL, meta["model_meta"], trusted=trusted, **for_model)
        made = Estimator.from_framework(framework, model=model, **options)
        return made.recall(meta["signature"], meta["history"])
