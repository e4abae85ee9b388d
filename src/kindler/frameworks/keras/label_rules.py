"""Label checks by loss: Keras would truncate 0.5 to class 0, and some backends accept unknown classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from kindler.frameworks.labels import LabelSource, refuse_non_classes, refuse_non_probabilities

Rule: TypeAlias = Callable[[LabelSource], Any]
_OF_CLASSES = frozenset(("sparsecategoricalcrossentropy",))
_OF_PROBABILITIES = frozenset(("binarycrossentropy", "binaryfocalcrossentropy", "bce"))
_KERAS = ("keras", "tf_keras")


def label_rules(model: Any, labels: Sequence[str], *, by_name: bool) -> list[Rule]:
    names = list(getattr(model, "output_names", None) or ())
    widths = [tensor.shape[-1] if len(tensor.shape) > 1 else None for tensor in _outputs(model)]
    found: list[Rule] = []
    for place, label in enumerate(labels):
        output = names.index(label) if by_name else place
        loss = _loss_of(getattr(model, "loss", None), output, names)
        width = widths[output] if output < len(widths) else None
        kind = kind_of(loss)
        if kind in _OF_CLASSES:
            found.append(partial(refuse_non_classes, place=place, classes=width, ignored=_ignored(loss)))
        elif kind in _OF_PROBABILITIES:
            found.append(partial(refuse_non_probabilities, place=place))
    return found


def _outputs(model: Any) -> Sequence[Any]:
    try:
        return model.outputs or ()
    except (AttributeError, ValueError):  # a subclass that was never called
        return ()


def _loss_of(loss: Any, output: int, names: Sequence[str]) -> Any:
    if isinstance(loss, Mapping):
        return loss.get(names[output]) if output < len(names) else None
    if isinstance(loss, list | tuple):
        return loss[output] if output < len(loss) else None
    return loss


def kind_of(loss: Any) -> str:
    """ "" if it is not a loss of Keras's own."""
    if isinstance(loss, str):
        return loss.replace("_", "").lower()
    named = loss if hasattr(loss, "__name__") else type(loss)
    own = str(getattr(named, "__module__", "")).partition(".")[0] in _KERAS
    return named.__name__.replace("_", "").lower() if own else ""


def _ignored(loss: Any) -> int | None:
    given = getattr(loss, "_fn_kwargs", None) or {}
    found: int | None = getattr(loss, "ignore_class", None)
    return given.get("ignore_class") if found is None else found
