"""A model that is ready to predict, whatever its kind: arrays by name in, arrays by name out.

The server, the command line and MLflow call it with arrays that fit its signature; people call it with data.

Rows of several requests may share a call only if every row's outputs are its own. Shapes alone cannot show
that: an output without rows may be as long as the batch by chance, and a softmax over the batch has the right
shape. So `is_per_row` tests a model. What it does only for untested values remains unknown; for such models,
batching can be disabled.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kindler.errors import ConfigError
from kindler.models.signature import (
    DEFAULT_SIGNATURE,
    Array,
    Arrays,
    Signature,
    TensorSpec,
    example,
    fit,
    from_columns,
)

METHODS = ("predict", "predict_proba", "transform", "decision_function")
_CLOSE, _NEAR_ZERO = 1e-3, 1e-5  # calls of different sizes differ in their last bits
# How far answers of one call may be from those of another, as a share of the largest output: eight units of
# rounding. TF32 has as many bits as float16.
TOLERANCES = {"fp32": _CLOSE, "tf32": 2**-8, "fp16": 2**-8, "bf16": 2**-5}


class PendingCall(Protocol):
    """A call that a GPU computes."""

    def is_ready(self) -> bool: ...

    def wait(self) -> Arrays: ...


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How a model was prepared for batches.

    Attributes:
        precision: What it computes in: "fp32", "bf16" or "fp16".
        tolerance: How far answers may be from those of the model alone, as a share of the largest output.
        within: How far they were when it was loaded; None if that was not measured.
        sizes: Numbers of rows that were computed ahead; batches are padded to them. Empty if that makes no
            difference.
        graphs: Whether these are CUDA graphs, or why not; None without a GPU.
    """

    precision: str = "fp32"
    tolerance: float = _CLOSE
    within: float | None = None
    sizes: tuple[int, ...] = ()
    graphs: str | None = None


class Predictor:
    """A loaded model.

    Attributes:
        signature: Its inputs and outputs.
        methods: The methods that can be called; "predict" is the first.
        size: Its size in memory in bytes, as far as known.
        joins: Whether rows of several requests may share a call. False: the outputs that the model declares
            rule it out. None: it has to be tested. True: each row is computed separately anyway.
        by_name: Whether `call` also accepts input names that are not in `signature`.
        calls: How many may be under way at a time.
        tolerance: See `BatchPlan`.
        text: What a text model does, its "task", its "context" in tokens, and whether it takes a "chat"; None
            for other models.
    """

    signature: Signature
    methods: tuple[str, ...] = ("predict",)
    size: int = 0
    joins: bool | None = None
    by_name: bool = False
    calls: int = 1
    tolerance: float = _CLOSE
    text: Mapping[str, Any] | None = None

    @property
    def signatures(self) -> Mapping[str, Signature]:
        """The signatures by their TensorFlow names; a model that is not TensorFlow's has one."""
        return {DEFAULT_SIGNATURE: self.signature}

    def call(self, inputs: Arrays, method: str) -> Arrays:
        """Compute the outputs for inputs that fit `signature`. Any thread may call it."""
        raise NotImplementedError

    def begin(self, inputs: Arrays, method: str) -> PendingCall | None:
        """Begin a call; None if it can only be waited for."""
        return None

    def attach(self, memories: Sequence[mmap.mmap]) -> None:
        """The memory that inputs of calls to come will lie in."""

    def example(self, rows: int) -> Arrays | None:
        """Made-up inputs, with rows that differ; None if the signature does not say enough."""
        return example(self.signature, rows)

    def set_precision(self, precision: str) -> None:
        """Compute in "bf16" or "fp16", once `prepare` was called.

        Raises:
            ConfigError: It cannot.
        """
        raise ConfigError(
            f"attributes precision={precision!r}: only PyTorch models can be served in another precision.\n"
            "Hint: store the model in the precision that it is to be served in."
        )

    def trials(self) -> list[tuple[AbstractContextManager[Any], float]]:
        """In which ways to test whether rows are computed by themselves, the best one first: within what the
        calls are made, and how far outputs may differ."""
        return [(nullcontext(), self.tolerance)]

    def prepare(self, rows: Arrays | None, *, joins: bool) -> BatchPlan:
        """Prepare for batches of up to as many rows as `rows` has; `joins` is whether requests may share."""
        return BatchPlan(tolerance=self.tolerance)

    def step(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Add a token to each of the answers that a text model has begun: see `models/text.py`."""
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


def is_per_row(call: Callable[[Arrays], Arrays], rows: Arrays, tolerance: float = _CLOSE) -> bool | None:
    """Whether every row's outputs are its own; None if these rows cannot tell.

    The first row and the others are computed apart, together, and together in the opposite order, and must
    come out the same each time. `tolerance` is a share of the largest output.
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
    if not (_all_same(apart, together, tolerance) and _all_same(apart, turned, tolerance)):
        return False
    finite = all(array.dtype.kind not in "fc" or np.isfinite(array).all() for array in apart.values())
    return True if finite else None  # NaN is equal to NaN whatever it comes from


def difference(left: Arrays, right: Arrays) -> float:
    """How far outputs that are numbers are from others, as a share of the largest; whole numbers apart, which
    flip where they are chosen by numbers that are near each other."""
    found = 0.0
    for name, array in left.items():
        if array.dtype.kind not in "fc" or not array.size:
            continue
        if array.shape != right[name].shape or (np.isfinite(array) != np.isfinite(right[name])).any():
            return float("inf")
        apart = np.nan_to_num(np.abs(array - right[name]), posinf=0.0)
        found = max(found, float(apart.max()) / max(_largest(array), np.finfo(array.dtype).tiny))
    return found


def batch_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows that are worth computing ahead: powers of two, and those in between that waste least.

    >>> batch_sizes(64)
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    """
    powers = [1 << n for n in range(most.bit_length())]
    sizes = {*powers, *(3 * power // 2 for power in powers[1:]), most}
    return tuple(sorted(size for size in sizes if size <= most))


def _has_rows(outputs: Arrays, rows: int) -> bool:
    return all(array.ndim and len(array) == rows for array in outputs.values())


def _all_same(left: Arrays, right: Arrays, tolerance: float) -> bool:
    return left.keys() == right.keys() and all(_same(left[name], right[name], tolerance) for name in left)


def _same(left: Array, right: Array, tolerance: float) -> bool:
    if left.shape != right.shape:
        return False
    if left.dtype.kind not in "fc" or right.dtype.kind not in "fc":
        return bool(np.array_equal(left, right))
    near = _NEAR_ZERO if tolerance <= _CLOSE else tolerance
    return bool(np.allclose(left, right, rtol=_CLOSE, atol=near * _largest(left), equal_nan=True))


def _largest(array: Array) -> float:
    return float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array)))
