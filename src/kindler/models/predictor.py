"""A model that is ready to predict, whatever its kind: arrays by name in, arrays by name out.

The server, the command line and MLflow call it with arrays that fit its signature; people call it with data.

Rows of several requests may share a call only if every row's outputs are its own. Shapes alone cannot show
that: an output without rows may be as long as the batch by chance, and a softmax over the batch has the right
shape. So `is_per_row` tests a model. What it does only for untested values remains unknown; for such models,
batching can be disabled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kindler.errors import ConfigError
from kindler.models.signature import (
    DEFAULT_SIGNATURE,
    Array,
    Arrays,
    Signature,
    TensorSpec,
    fit,
    from_columns,
)

METHODS = ("predict", "predict_proba", "transform", "decision_function")
_CLOSE, _NEAR_ZERO = 1e-3, 1e-5  # calls of different sizes differ in their last bits


class Predictor:
    """A loaded model.

    Attributes:
        signature: Its inputs and outputs.
        methods: The methods that can be called; "predict" is the first.
        size: Its size in memory in bytes, as far as known.
        joins: Whether rows of several requests may share a call. False: the outputs that the model declares
            rule it out. None: it has to be tested. True: each row is computed separately anyway.
        by_name: Whether `call` also accepts input names that are not in `signature`.
    """

    signature: Signature
    methods: tuple[str, ...] = ("predict",)
    size: int = 0
    joins: bool | None = None
    by_name: bool = False

    @property
    def signatures(self) -> Mapping[str, Signature]:
        """The signatures by their TensorFlow names; a model that is not TensorFlow's has one."""
        return {DEFAULT_SIGNATURE: self.signature}

    def call(self, inputs: Arrays, method: str) -> Arrays:
        """Compute the outputs for inputs that fit `signature`. Any thread may call it."""
        raise NotImplementedError

    def __call__(self, data: Any, *, method: str = "predict") -> Any:
        """Predict rows.

        Args:
            data: An array, a list, a pandas or Arrow table, arrays by name, or a tuple with one array per
                input.
            method: One of `methods`.

        Returns:
            The output; several outputs as a dict.

        Raises:
            DataError: The model does not accept the data.
            ConfigError: The model does not have the method.
        """
        if method not in self.methods:
            raise ConfigError(f"the model has no {method!r}; it has {', '.join(self.methods)}.")
        outputs = self.call(self._inputs(data), method)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def _inputs(self, data: Any) -> Arrays:
        if type(data).__module__.partition(".")[0] in ("pandas", "pyarrow"):
            from kindler.models import arrow_columns  # pyarrow loads with the first table

            columns = arrow_columns.columns_of(arrow_columns.as_table(data))
            return fit(self.signature, from_columns(self.signature, columns))
        names = self.signature.names
        if isinstance(data, tuple) and len(data) == len(names):
            data = dict(zip(names, data, strict=True))
        if not isinstance(data, Mapping):
            data = {"": data}
        return fit(self.signature, {str(name): np.asarray(value) for name, value in data.items()})


class CallablePredictor(Predictor):
    """Any object with `predict`, or any callable, from a store whose code is trusted.

    It takes one array, and returns an array, several, or a dict of them.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.methods = tuple(m for m in METHODS if callable(getattr(model, m, None))) or ("predict",)
        self.signature = Signature((TensorSpec("x"),))

    def call(self, inputs: Arrays, method: str) -> Arrays:
        result = getattr(self._model, method, self._model)(inputs["x"])
        if isinstance(result, Exception):  # omega|ml's way to fail
            raise result
        return named(result)


def named(returned: Any, names: Sequence[str] = (), convert: Callable[[Any], Any] = np.asarray) -> Arrays:
    """Arrays by name: a mapping's own names, those given, or "output_0", "output_1", ..."""
    if isinstance(returned, Mapping):
        return {str(name): convert(value) for name, value in returned.items()}
    if not isinstance(returned, list | tuple):
        return {names[0] if names else "output_0": convert(returned)}
    if len(names) != len(returned):
        names = [f"output_{i}" for i in range(len(returned))]
    return {name: convert(value) for name, value in zip(names, returned, strict=True)}


def plain(outputs: Any) -> Any:
    """Tensors as arrays, however they are nested."""
    if isinstance(outputs, Mapping):
        return {str(key): plain(value) for key, value in outputs.items()}
    if isinstance(outputs, list | tuple):
        return type(outputs)(plain(value) for value in outputs)
    if hasattr(outputs, "detach"):
        return outputs.detach().cpu().numpy()
    return outputs.numpy() if hasattr(outputs, "numpy") and not isinstance(outputs, np.ndarray) else outputs


def free_rows(inputs: Iterable[Sequence[Any] | None], outputs: Iterable[Sequence[Any] | None]) -> bool:
    """Whether a model declares the same free first dimension for all its inputs and outputs.

    A free length is None or a name; a shape that is not known is None.

    >>> free_rows([["n", 3]], [["n", 2], ["n"]]), free_rows([["n", 3]], [[4]]), free_rows([[None]], [[]])
    (True, False, False)
    """
    firsts = [shape[0] if shape else 0 for shape in (*inputs, *outputs)]
    return bool(firsts) and not any(isinstance(n, int) for n in firsts) and len(set(firsts)) == 1


def is_per_row(call: Callable[[Arrays], Arrays], rows: Arrays) -> bool | None:
    """Whether every row's outputs are its own; None if these rows cannot tell.

    The first row and the others are computed apart, together, and together in the opposite order, and must
    come out the same each time.
    """
    count = len(next(iter(rows.values())))
    first = call({name: array[:1] for name, array in rows.items()})
    others = call({name: array[1:] for name, array in rows.items()})
    if not _has_rows(first, 1) or not _has_rows(others, count - 1) or first.keys() != others.keys():
        return False
    if all(np.array_equal(array, array[::-1]) for array in rows.values()):
        return None
    apart = {name: np.concatenate([first[name], others[name]]) for name in first}
    try:
        together = call(rows)
        turned = call({name: np.ascontiguousarray(array[::-1]) for name, array in rows.items()})
    except Exception:  # noqa: BLE001 - it takes the rows apart and not together: that is the answer
        return False
    turned = {name: array[::-1] for name, array in turned.items() if array.ndim}
    if not (_all_same(apart, together) and _all_same(apart, turned)):
        return False
    finite = all(array.dtype.kind not in "fc" or np.isfinite(array).all() for array in apart.values())
    return True if finite else None  # NaN is equal to NaN whatever it comes from


def _has_rows(outputs: Arrays, rows: int) -> bool:
    return all(array.ndim and len(array) == rows for array in outputs.values())


def _all_same(left: Arrays, right: Arrays) -> bool:
    return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)


def _same(left: Array, right: Array) -> bool:
    if left.shape != right.shape:
        return False
    if left.dtype.kind not in "fc" or right.dtype.kind not in "fc":
        return bool(np.array_equal(left, right))
    largest = float(np.max(np.abs(left), initial=0.0, where=np.isfinite(left)))
    return bool(np.allclose(left, right, rtol=_CLOSE, atol=_NEAR_ZERO * largest, equal_nan=True))
