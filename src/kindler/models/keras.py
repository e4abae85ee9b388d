"""Keras models as `.keras` files: looked through first, then loaded in safe mode.

They predict through their backend's compiled function and not through `predict`. On TensorFlow that is one
graph for any number of rows, with the weights as constants of it where that can be, so that TensorFlow joins
operations that it would not otherwise; on JAX one program for each power of two, to which rows are filled up
if a trial shows that this changes nothing; PyTorch runs as it is.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from kindler.estimator.estimator import Estimator
from kindler.frameworks.keras import backends
from kindler.frameworks.keras.spec import custom_objects as custom_objects_of
from kindler.models.estimator import FrameworkKind, matrix
from kindler.models.kind import LoadedModel, Meta, confined, require_trust
from kindler.models.predictor import Predictor, free_rows, is_per_row, named
from kindler.models.safety.keras_file import dangers
from kindler.models.signature import Array, Arrays, Signature, TensorSpec, example

_log = logging.getLogger("kindler.models")
_FILE, _OBJECTS = "model.keras", "objects.pickle"
_BATCH = 32  # of `predict`, unless it is given another
_MOST_CONSTANTS = 1 << 30  # bytes; a graph is a message of at most twice that
_MOST_PROGRAMS = 64


class KerasKind(FrameworkKind):
    """Models of Keras 3, and `.keras` files.

    Custom classes are found again if they are registered with `keras.saving.register_keras_serializable`, or
    given to `get` as `custom_objects`. Those of a notebook or script are stored with their code.
    """

    kind = "keras"
    get_options = frozenset({"custom_objects"})
    verbs = ("predict", "score")
    packages = ("keras",)

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
        parts = [obj, *getattr(obj, "_flatten_layers", lambda: obj.layers)()]
        self._check(target, {type(part).__name__: type(part) for part in parts}, trusted=trusted)
        meta: dict[str, Any] = {side: _recorded(obj, side) for side in ("inputs", "outputs")}
        # The classes and functions of a notebook or script, by the names that Keras looks for.
        customs = custom_objects_of(obj, self.kind)
        own = {name: part for name, part in customs.items() if getattr(part, "__module__", "") == "__main__"}
        if own:
            (folder / _OBJECTS).write_bytes(cloudpickle.dumps(own))
            meta["code"] = sorted(own)
        return meta

    def read(
        self,
        folder: Path,
        meta: Meta,
        *,
        trusted: bool,
        custom_objects: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        path, customs = folder / _FILE, dict(custom_objects or {})
        missing = [name for name in meta.get("code") or () if name not in customs]
        if missing:
            require_trust(
                trusted,
                what="the Keras model",
                reason=f"it has {', '.join(missing)} of a notebook or script, stored as a pickle (or pass"
                f" custom_objects={...})",
            )
            customs = {**cloudpickle.loads(confined(folder, _OBJECTS).read_bytes()), **customs}
        self._check(path, customs, trusted=trusted)
        load = self._library().saving.load_model
        return load(str(path), custom_objects=customs or None, safe_mode=not trusted)

    def estimator(self, **options: Any) -> Estimator:
        return Estimator.from_keras(**options)

    def predictor(self, model: Any) -> Predictor:
        return KerasPredictor(model)

    def settle(self, device: str, meta: Meta) -> None:
        self._library()
        self.device = backends.settled(self._backend(), device)

    def device_bytes(self, meta: Meta) -> int:
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

    def requirements(self, meta: Meta) -> tuple[str, ...]:
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
            part = own.get(name) or registered(name)
            module = str(getattr(part, "__module__", ""))
            return part is not None and module.partition(".")[0] not in ("keras", "tf_keras")

        if found := dangers(path, is_registered=known):
            require_trust(trusted, what="the Keras model", reason=f"it has {', '.join(found)}")


class TfKerasKind(KerasKind):
    """Models of Keras 2."""

    kind = "tf_keras"
    packages = ("tf_keras",)

    def _backend(self) -> str:
        return "tensorflow"

    def _library(self) -> Any:
        return importlib.import_module("tf_keras")


class KerasPredictor(Predictor):
    """A model of Keras 3 or Keras 2."""

    def __init__(self, model: Any) -> None:
        self.signature = _signature(model)
        self.joins = _joins(self.signature)
        self.size = _bytes_of(model)
        backend = backends.backend_of(model, None)
        make = {"tensorflow": _on_tensorflow, "jax": _on_jax, "torch": _on_torch}[backend]
        self._forward = make(model, self.signature)

    def call(self, inputs: Arrays, method: str) -> Arrays:
        returned = self._forward([inputs[spec.name] for spec in self.signature.inputs])
        return named(returned, [spec.name for spec in self.signature.outputs])


def _bytes_of(model: Any) -> int:
    return sum(int(np.prod(w.shape)) * 4 for w in model.weights)


def _signature(model: Any) -> Signature:
    inputs = _specs(model, "inputs")
    if inputs is None:
        # A subclass says nothing before it is called; its `call` at least names what it takes.
        taken = [
            p.name
            for p in inspect.signature(model.call).parameters.values()
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        inputs = tuple(TensorSpec(name, str(model.compute_dtype)) for name in taken[:1] or ["inputs"])
    return Signature(inputs, _specs(model, "outputs") or ())


def _joins(signature: Signature) -> bool | None:
    shapes = [spec.shape for spec in signature.inputs], [spec.shape for spec in signature.outputs]
    if not signature.outputs or None in shapes[0]:
        return None  # a subclass: it declares nothing
    return None if free_rows(*shapes) else False


def _specs(model: Any, side: str) -> tuple[TensorSpec, ...] | None:
    """What goes in or out, where the model knows."""
    try:
        tensors = getattr(model, side)
    except AttributeError:
        return None
    if not tensors:
        return None
    tensors = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
    names = (getattr(model, "output_names", None) or ()) if side == "outputs" else ()
    if len(names) != len(tensors):
        names = [tensor.name for tensor in tensors]
    return tuple(_spec(str(name), tensor) for name, tensor in zip(names, tensors, strict=True))


def _spec(name: str, tensor: Any) -> TensorSpec:
    dtype = str(getattr(tensor.dtype, "name", tensor.dtype))
    shape = tuple(None if n is None else int(n) for n in tensor.shape)
    if dtype == "string":
        return TensorSpec(name, "object", shape, binary=True)
    return TensorSpec(name, None if dtype == "bfloat16" else dtype, shape)


def _recorded(model: Any, side: str) -> list[dict[str, Any]] | None:
    """What the catalog shows of a model that is not loaded."""
    try:
        specs = _specs(model, side)
    except (AttributeError, TypeError):
        return None
    if specs is None:
        return None
    return [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape or ())} for s in specs]


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
    if given is None or _bytes_of(model) > _MOST_CONSTANTS:
        return plain
    arrays = [given[spec.name] for spec in signature.inputs]
    try:
        wanted = tf.nest.flatten(plain(arrays))
        freeze = importlib.import_module("tensorflow.python.framework.convert_to_constants")
        quick = caller(freeze.convert_variables_to_constants_v2(concrete), structure, None)
        found = tf.nest.flatten(quick(arrays))
        if all(np.allclose(a, b, 1e-4, 1e-5, equal_nan=True) for a, b in zip(wanted, found, strict=True)):
            return quick
        _log.info("the weights remain variables: as constants they give different outputs")
    except Exception as exc:  # noqa: BLE001 - it is an optimization of TensorFlow's, with errors of its own
        _log.info("the weights remain variables: %s", exc)
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
        return filled if is_per_row(lambda rows: named(filled([*rows.values()])), given) else exactly
    except Exception as exc:  # noqa: BLE001 - it does not take what was made up, so nothing is known
        _log.info("batches are not padded: %s", exc)
    return exactly


def _on_torch(model: Any, signature: Signature) -> Callable[[list[Array]], Any]:
    torch, keras = importlib.import_module("torch"), importlib.import_module("keras")

    def call(arrays: list[Array]) -> Any:
        with torch.inference_mode():
            outputs = model(_shaped(model, [keras.ops.convert_to_tensor(a) for a in arrays]), training=False)
            return keras.tree.map_structure(keras.ops.convert_to_numpy, outputs)

    return call
