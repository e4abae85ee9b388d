"""Tries the user's own losses on the first rows; see `loss_trial.py`.

Of the user's own train_step only the gradients it gives its optimizers are known: it is called on the rows
and undone, with layers that look at their batch or draw random numbers as in evaluation.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from kindler.collective import Array
from kindler.errors import ConfigError
from kindler.frameworks.creators import title
from kindler.frameworks.keras import backends
from kindler.frameworks.keras.dataset import kind_of
from kindler.frameworks.keras.gradient_hook import alone, leaves, mapped, noting
from kindler.frameworks.loss_trial import LossTrial, refusal
from kindler.frameworks.rng import Drawing

_MOST_ROWS, _MOST_STEP_ROWS = 64, 16
_LOSS_TOLERANCE, _GRADIENT_TOLERANCE = 2e-5, 1e-3
_OVER_THE_BATCH = ("circle", "dice", "tversky")  # of Keras's own, and no means over rows
_NO_CODE = (lambda: None).__code__
_HINT = (
    "gather the rows of all workers with kindler.all_gather(tensor), as docs/guides/contrastive.md shows"
    " (Keras on PyTorch and TensorFlow); or let the loss return one number for each row; or train with"
    " workers=1."
)


def try_loss(
    model: Any, keras: Any, backend: str, batch: Sequence[Any], *, undo: Callable[[], None], gathers: bool
) -> None:
    own_step = type(model).train_step is not keras.Model.train_step
    unknown = _unknown(model)
    rows = len(next(leaves(batch)))
    most = _MOST_STEP_ROWS if own_step else _MOST_ROWS
    ops = _ops(keras)
    trial = LossTrial(most, partial(getattr(ops, "concatenate", None) or ops.concat, axis=0), strict=False)
    adding = _that_add_losses(model)
    if own_step:
        judge = _gradients(model, backend, batch)
    else:
        judge = _losses(model, keras, batch, most, anew=bool(adding))
    found = None
    try:
        with Drawing(0), _resting(model) if own_step else ExitStack():
            tolerance = _GRADIENT_TOLERANCE if own_step else _LOSS_TOLERANCE
            found = trial(_undone(judge, undo), rows, tolerance)
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001 - the step itself shows what is wrong with the loss
        pass
    if trial.gathers and not gathers:
        raise ConfigError(
            "all_gather needs workers that synchronize in every step.\nHint: strategy='allreduce', or "
            "workers=1."
        )
    if own_step and trial.gathers and backend != "torch":
        found = None  # a tape sees nothing of the calls for other rows: their gradients are missing here
    if found is not None:
        name = f"the loss {title(unknown[0])}" if len(unknown) == 1 else "the loss of the model"
        if adding:
            name = f"the loss of the model, with what {adding[0]} adds to it,"
        if own_step:
            name = f"what {type(model).__name__}.train_step gives its optimizer (a sum of gradients)"
        raise refusal(found, name, why="several workers", hint=_HINT)


def is_own(model: Any, keras: Any) -> bool:
    """Whether the model learns by a loss of the user's own, which may not be a mean over rows."""
    names = ("train_step", "compute_loss")
    return bool(_unknown(model) or _that_add_losses(model)) or any(
        getattr(type(model), name) is not getattr(keras.Model, name) for name in names
    )


def _unknown(model: Any) -> list[Any]:
    return [loss for loss in leaves(getattr(model, "loss", None)) if _is_unknown(loss)]


def _that_add_losses(model: Any) -> list[str]:
    """Classes of layers that call `add_loss`, except Keras's own: those add means over rows."""
    kinds = {type(layer) for layer in (model, *model._flatten_layers(include_self=False))}
    return sorted(kind.__name__ for kind in kinds if kind.__name__ == "AddLoss" or _calls_add_loss(kind))


def _calls_add_loss(kind: type) -> bool:
    methods = [method for part in kind.__mro__ if not _of_keras(part) for method in vars(part).values()]
    return any("add_loss" in getattr(method, "__code__", _NO_CODE).co_names for method in methods)


def _of_keras(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("keras", "tf_keras")


def _is_unknown(loss: Any) -> bool:
    if loss is None or isinstance(loss, str):
        return str(loss).replace("_", "").lower() in _OVER_THE_BATCH
    wrapped = getattr(loss, "fn", None)
    kind = kind_of(loss)
    return not kind or kind in _OVER_THE_BATCH or (wrapped is not None and not kind_of(wrapped))


def _undone(judge: Callable[[list[int]], Any], undo: Callable[[], None]) -> Callable[[list[int]], Any]:
    def judged(chosen: list[int]) -> Any:
        try:
            return judge(chosen)
        finally:
            undo()

    return judged


def _losses(
    model: Any, keras: Any, batch: Sequence[Any], most: int, *, anew: bool
) -> Callable[[list[int]], Any]:
    """`anew` calls the model each time rather than once, for losses that its layers add."""
    inputs = mapped(batch[0], lambda array: array[:most])

    def called(rows: Any) -> Any:
        return mapped(model(rows, training=False), lambda tensor: _wide(_array(keras, tensor)))

    outputs = called(inputs)

    def judge(chosen: list[int]) -> list[tuple[float, float]]:
        if len(chosen) > most:
            raise ValueError("the model was not called for that many rows")
        x, y, weights = (*(_taken(part, chosen) for part in batch), None, None)[:3]
        predicted = called(x) if anew else _taken(outputs, chosen)
        y, y_pred = (mapped(part, _ops(keras).convert_to_tensor) for part in (y, predicted))
        loss = float(_array(keras, model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights)))
        return [(loss * len(chosen), float(len(chosen)))]

    return judge


def _gradients(model: Any, backend: str, batch: Sequence[Any]) -> Callable[[list[int]], Any]:
    """One number, linear in the gradients, for each call of an optimizer."""
    on = backends.on(backend)

    def judge(chosen: list[int]) -> list[tuple[float, float]]:
        noted: list[float] = []

        def note(gradients: Sequence[Any]) -> None:
            draws = np.random.default_rng(0)
            arrays = [np.asarray(on.as_array(part), np.float64) for part in gradients if part is not None]
            noted.append(sum(float(np.vdot(draws.normal(size=array.shape), array)) for array in arrays))

        step = alone(lambda *args: type(model).train_step(model, *args))
        with noting(model, backend, note):
            on.called(model, step, tuple(_taken(part, chosen) for part in batch))
        return [(number * len(chosen), float(len(chosen))) for number in noted]

    return judge


@contextmanager
def _resting(model: Any) -> Iterator[None]:
    changed = []
    for layer in model._flatten_layers(include_self=False):
        if _of_keras(type(layer)) and "training" in inspect.signature(layer.call).parameters:
            changed.append(layer)
            object.__setattr__(layer, "call", partial(_call_untrained, layer.call))
    try:
        yield
    finally:
        for layer in changed:
            object.__delattr__(layer, "call")


def _call_untrained(call: Any, *args: Any, training: Any = None, **options: Any) -> Any:
    return call(*args, training=False, **options)


def _ops(keras: Any) -> Any:
    return keras.ops if hasattr(keras, "ops") else importlib.import_module("tensorflow")  # Keras 2


def _array(keras: Any, tensor: Any) -> Array:
    return np.asarray(keras.ops.convert_to_numpy(tensor) if hasattr(keras, "ops") else tensor)


def _wide(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.itemsize == 2 and array.dtype.kind in "fV" else array


def _taken(tree: Any, rows: list[int]) -> Any:
    return mapped(tree, lambda array: array[rows])
