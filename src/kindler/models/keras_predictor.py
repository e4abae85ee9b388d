"""Keras models, called through their backend's compiled function and not through `predict`.

On TensorFlow that is one graph for any number of rows, with the weights as constants of it where that can be,
so that TensorFlow joins operations that it would not otherwise; on JAX one program for each power of two, to
which rows are filled up if a trial shows that this changes nothing; PyTorch runs as it is.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from kindler.frameworks.keras import backends
from kindler.models.predictor import Predictor, named
from kindler.models.row_independence import free_rows, tried
from kindler.models.signature import Array, Arrays, Signature, TensorSpec, example

_log = logging.getLogger("kindler.models")
_MOST_CONSTANTS = 1 << 30  # bytes; a graph is a message of at most twice that
_MOST_PROGRAMS = 64


class KerasPredictor(Predictor):
    """A model of Keras 3 or Keras 2."""

    def __init__(self, model: Any) -> None:
        self.signature = _signature(model)
        self.joins = _joins(self.signature)
        self.steady = all(
            type(layer).__module__.partition(".")[0] in ("keras", "tf_keras")
            and type(layer).__name__ != "Lambda"
            for layer in model._flatten_layers()
        )
        self.size = int(sum(int(np.prod(w.shape)) * 4 for w in model.weights))
        backend = backends.backend_of(model, None)
        make = {"tensorflow": _on_tensorflow, "jax": _on_jax, "torch": _on_torch}[backend]
        self._forward = make(model, self.signature)

    def call(self, inputs: Arrays, method: str) -> Arrays:
        returned = self._forward([inputs[spec.name] for spec in self.signature.inputs])
        return named(returned, [spec.name for spec in self.signature.outputs])


def _signature(model: Any) -> Signature:
    inputs = _specs(getattr(model, "inputs", None), None)
    if inputs is None:
        # A subclass says nothing before it is called; its `call` at least names what it takes.
        taken = [
            p.name
            for p in inspect.signature(model.call).parameters.values()
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        inputs = tuple(TensorSpec(name, str(model.compute_dtype)) for name in taken[:1] or ["inputs"])
    try:
        outputs = _specs(model.outputs, getattr(model, "output_names", None))
    except AttributeError:
        outputs = None
    return Signature(inputs, outputs or ())


def _joins(signature: Signature) -> bool | None:
    shapes = [spec.shape for spec in signature.inputs], [spec.shape for spec in signature.outputs]
    if not signature.outputs or None in shapes[0]:
        return None  # a subclass: it declares nothing
    return None if free_rows(*shapes) else False


def _specs(tensors: Any, names: Any) -> tuple[TensorSpec, ...] | None:
    if not tensors:
        return None
    found = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
    shown = list(names) if names and len(names) == len(found) else [str(t.name) for t in found]
    return tuple(
        TensorSpec(
            str(name),
            _dtype(t),
            tuple(None if n is None else int(n) for n in t.shape),
            binary=_dtype(t) == "object",
        )
        for name, t in zip(shown, found, strict=True)
    )


def _dtype(tensor: Any) -> str | None:
    name = str(getattr(tensor.dtype, "name", tensor.dtype))
    return "object" if name == "string" else None if name == "bfloat16" else name


def _shaped(model: Any, values: list[Any]) -> Any:
    """Arguments in the form in which the model was built: one tensor, a list, or a dict."""
    form = getattr(model, "_inputs_struct", None)
    if isinstance(form, dict):
        return dict(zip((str(t.name) for t in model.inputs), values, strict=True))
    return values[0] if len(values) == 1 else values


def _on_tensorflow(model: Any, signature: Signature) -> Callable[[list[Array]], Any]:
    tf = importlib.import_module("tensorflow")
    specs = [
        tf.TensorSpec(
            None if spec.shape is None else (None, *spec.shape[1:]),
            tf.string if spec.dtype == "object" else spec.dtype or "float32",
        )
        for spec in signature.inputs
    ]

    dtypes = [spec.dtype for spec in specs]

    def traced() -> Any:
        @tf.function(input_signature=[specs], autograph=False)  # type: ignore[untyped-decorator]
        def forward(values: list[Any]) -> Any:
            return model(_shaped(model, values), training=False)

        # Looked up once: `forward` itself checks its arguments against the signature on every call.
        return forward.get_concrete_function()

    def caller(function: Any, structure: Any, kept: Any) -> Callable[[list[Array]], Any]:
        def call(arrays: list[Array], kept: Any = kept) -> Any:
            given = [tf.constant(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
            flat = tf.nest.flatten(function(*given))
            return tf.nest.pack_sequence_as(structure, [tensor.numpy() for tensor in flat])

        return call

    concrete = traced()
    structure = tf.nest.map_structure(lambda _: None, concrete.structured_outputs)
    plain = caller(concrete, structure, model)  # the function does not keep its variables by itself
    given = example(signature, rows=2)
    size = sum(int(np.prod(w.shape)) * 4 for w in model.weights)
    if given is None or size > _MOST_CONSTANTS:
        return plain
    arrays = [given[spec.name] for spec in signature.inputs]
    try:
        wanted = tf.nest.flatten(plain(arrays))
        freeze = importlib.import_module("tensorflow.python.framework.convert_to_constants")
        quick = caller(freeze.convert_variables_to_constants_v2(concrete), structure, None)
        found = tf.nest.flatten(quick(arrays))
        if all(np.allclose(a, b, 1e-4, 1e-5, equal_nan=True) for a, b in zip(wanted, found, strict=True)):
            return quick
        _log.info("the weights stay variables: as constants they give other outputs")
    except Exception as exc:  # noqa: BLE001 - it is an optimization of TensorFlow's, with errors of its own
        _log.info("the weights stay variables: %s", exc)
    return caller(traced(), structure, model)  # what was tried may have taken parts of the first away


def _on_jax(model: Any, signature: Signature) -> Callable[[list[Array]], Any]:
    jax = importlib.import_module("jax")

    @jax.jit  # type: ignore[untyped-decorator]
    def forward(trainable: Any, other: Any, values: list[Any]) -> Any:
        outputs, _ = model.stateless_call(trainable, other, _shaped(model, values), training=False)
        return outputs

    trainable = [v.value for v in model.trainable_variables]
    other = [v.value for v in model.non_trainable_variables]

    sizes: set[tuple[int, ...]] = set()

    def exactly(arrays: list[Array]) -> Any:
        sizes.add(tuple(map(len, arrays)))
        if len(sizes) > _MOST_PROGRAMS:  # each number of rows is compiled apart
            forward.clear_cache()
            sizes.clear()
        return jax.tree_util.tree_map(np.asarray, forward(trainable, other, arrays))

    def filled(arrays: list[Array]) -> Any:
        rows = len(arrays[0])
        room = 1 << (rows - 1).bit_length()
        if room == rows:
            return exactly(arrays)
        outputs = exactly([np.concatenate([a, np.repeat(a[-1:], room - rows, axis=0)]) for a in arrays])
        return jax.tree_util.tree_map(lambda value: value[:rows], outputs)

    given = example(signature, rows=3) if _joins(signature) is not False else None
    if given is None:
        return exactly
    try:
        return filled if tried(lambda rows: named(filled([*rows.values()])), given, 1).per_row else exactly
    except Exception as exc:  # noqa: BLE001 - it does not take what was made up, so nothing is known
        _log.info("rows are not filled up: %s", exc)
    return exactly


def _on_torch(model: Any, signature: Signature) -> Callable[[list[Array]], Any]:
    torch = importlib.import_module("torch")
    keras = importlib.import_module("keras")

    def call(arrays: list[Array]) -> Any:
        with torch.inference_mode():
            outputs = model(_shaped(model, [keras.ops.convert_to_tensor(a) for a in arrays]), training=False)
            return keras.tree.map_structure(keras.ops.convert_to_numpy, outputs)

    return call
