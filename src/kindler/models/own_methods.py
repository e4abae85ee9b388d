"""Models whose verbs are methods of their own: scikit-learn's, and whatever else was pickled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kindler.errors import ConfigError
from kindler.models.kind import ModelKind

if TYPE_CHECKING:
    from kindler.models.loaded import LoadedModel


class OwnMethods(ModelKind):
    """A kind whose models have the verbs as methods, `fit` and `partial_fit` among them."""

    verbs: ClassVar[tuple[str, ...] | None] = (
        "predict",
        "predict_proba",
        "decision_function",
        "score",
        "transform",
    )

    def call(self, loaded: LoadedModel, verb: str, /, *data: Any, **options: Any) -> Any:
        return _method(loaded.model, verb)(*data, **options)

    def train(
        self,
        read: Callable[..., Any],
        meta: Mapping[str, Any],
        verb: str,
        data: tuple[Any, ...],
        options: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        model = read()
        _method(model, verb)(*data, **options)
        return model, {}


def _method(model: Any, verb: str) -> Callable[..., Any]:
    method = getattr(model, verb, None)
    if not callable(method):
        raise ConfigError(f"a {type(model).__qualname__} has no {verb}.")
    found: Callable[..., Any] = method
    return found
