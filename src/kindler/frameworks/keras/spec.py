"""The user's Keras arguments as one value; a model travels as Keras's archive with custom objects."""

from __future__ import annotations

import importlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import cloudpickle

from kindler.errors import ConfigError
from kindler.frameworks.creators import call, positional, title
from kindler.frameworks.keras.backends import backend_of, flavour_of, is_compiled, load, require
from kindler.frameworks.keras.files import check_optimizer, described, with_live_optimizer
from kindler.frameworks.keras.gradient_hook import leaves
from kindler.frameworks.keras.state import pack, unpack
from kindler.frameworks.pickling import pickle_for_workers
from kindler.frameworks.state_format import ScoringModel
from kindler.temporary import Folder


@dataclass(frozen=True, slots=True)
class Archive:
    """`optimizer` describes the model's, so that no other one takes its place unnoticed."""

    flavour: str
    data: bytes
    custom_objects: dict[str, Any]
    optimizer: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class KerasSpec:
    """`model` is an `Archive` once it travels; `inputs="auto"` goes by name if columns match the inputs."""

    model: Any = None
    model_creator: Callable[..., Any] | None = None
    compile_args: Mapping[str, Any] | Callable[..., Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "tensorflow"
    inputs: Literal["auto", "positional", "dict"] = "auto"

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "compile_args_creator" in state:  # written before 0.2
            state["compile_args"] = state.pop("compile_args_creator")
        self.__dict__.update(state)


def make_spec(
    *,
    model: Any,
    config: Mapping[str, Any] | None = None,
    compile_args: Any = None,
    keras_backend: str | None = None,
    inputs: Literal["auto", "positional", "dict"] = "auto",
) -> KerasSpec:
    """Raises ConfigError; a model that is not an instance is a creator."""
    is_instance = flavour_of(model) is not None
    found = []
    if not is_instance and not callable(model):
        found.append(f"model must be a Keras model or a function that returns one; received {_kind(model)}.")
    if not (compile_args is None or isinstance(compile_args, Mapping) or callable(compile_args)):
        found.append(
            f"compile_args must be a dict or a function that returns one; received {_kind(compile_args)}."
        )
    for name, creator in {"model": None if is_instance else model, "compile_args": compile_args}.items():
        if callable(creator) and (positional(creator) or 0) > 1:
            found.append(f"{name} is called with one argument, the config; {title(creator)} needs more.")
    if inputs not in ("auto", "positional", "dict"):
        found.append(f"inputs must be 'auto', 'positional' or 'dict'; received {inputs!r}.")
    if found:
        raise ConfigError(found[0] if len(found) == 1 else "\n".join(f"- {each}" for each in found))
    backend = backend_of(model if is_instance else None, keras_backend)
    require(backend)
    if is_instance and isinstance(compile_args, Mapping) and not is_compiled(model):
        model.compile(**compile_args)
    return KerasSpec(
        model=model if is_instance else None,
        model_creator=None if is_instance else model,
        compile_args=None if is_instance and isinstance(compile_args, Mapping) else compile_args,
        config=dict(config or {}),
        backend=backend,
        inputs=inputs,
    )


def is_uncompiled(spec: KerasSpec) -> bool:
    model = spec.model
    return model is not None and spec.compile_args is None and not is_compiled(model)


def with_rate(spec: KerasSpec, rate: float) -> KerasSpec:
    """Changes a model in place."""
    if spec.compile_args is not None:
        raise ConfigError(
            f"learning_rate={rate}: compile_args sets the rate.\n"
            "Hint: read it from the config there, and pass config={...}."
        )
    if spec.model_creator is not None:
        return replace(spec, model_creator=_Rated(spec.model_creator, rate))
    return replace(spec, model=_rated(spec.model, rate))


def _rated(model: Any, rate: float) -> Any:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ConfigError(f"learning_rate={rate}: the model is not compiled.")
    try:
        optimizer.learning_rate = rate
    except (TypeError, AttributeError) as exc:  # Keras says why: a schedule decides it
        raise ConfigError(f"learning_rate={rate}: the optimizer's rate cannot be set: {exc}") from exc
    return model


@dataclass(frozen=True)
class _Rated:
    creator: Callable[..., Any]
    rate: float

    def __call__(self, config: Mapping[str, Any]) -> Any:
        return _rated(call(self.creator, config), self.rate)


def synchronized(model: Any) -> list[str]:
    """Complaints about layers that need the rows of all workers at once."""
    found = [
        layer.name
        for layer in model._flatten_layers()
        if getattr(layer, "synchronized", False) or type(layer).__name__ == "SyncBatchNormalization"
    ]
    if not found:
        return []
    complaint = (
        f"the model has BatchNormalization with synchronized=True ({', '.join(map(repr, found[:3]))}), whose "
        "statistics would need the rows of all workers in every step; workers exchange only "
        "gradients.\nHint: leave out synchronized=True, so that it normalises by each worker's own rows of "
        "the"
        " step (a random sample of all), use a layer that needs no statistics of the batch, such as"
        " LayerNormalization or GroupNormalization, or workers=1."
    )
    return [complaint]


def build_model(spec: KerasSpec) -> Any:
    if isinstance(spec.model, Archive):
        model = _restore(spec.model, spec.backend)
    elif spec.model is not None:
        model = spec.model
    else:
        assert spec.model_creator is not None
        model = call(spec.model_creator, dict(spec.config))
        if flavour_of(model) is None:
            raise ConfigError(
                f"{title(spec.model_creator)} must return a Keras model; it returned {_kind(model)}."
            )
    arguments = spec.compile_args
    if arguments is not None and not is_compiled(model):
        model.compile(**(call(arguments, dict(spec.config)) if callable(arguments) else arguments))
    return model


def dumps(spec: KerasSpec) -> bytes:
    if spec.model is not None and not isinstance(spec.model, Archive):
        spec = replace(spec, model=_archive(spec.model))
    # The backend goes first: Keras must be on it before unpickling imports the user's modules.
    return spec.backend.encode() + b"\n" + pickle_for_workers(spec)


def loads(data: bytes) -> KerasSpec:
    """Fixes Keras's backend in this process."""
    backend, _, packed = data.partition(b"\n")
    load(backend.decode())
    spec: KerasSpec = cloudpickle.loads(packed)
    return spec


def revived(data: bytes) -> KerasSpec:
    spec = loads(data)
    return replace(spec, model=build_model(spec)) if isinstance(spec.model, Archive) else spec


def _archive(model: Any) -> Archive:
    flavour = flavour_of(model) or "keras"
    with Folder("kindler-model-") as folder:
        path = folder / "model.keras"
        try:
            _build_scaled(model)
            with with_live_optimizer(model):
                model.save(str(path))
            optimizer = described(getattr(model, "optimizer", None)) if is_compiled(model) else None
        except Exception as exc:  # Keras raises many kinds for what it cannot describe
            raise ConfigError(
                f"Keras cannot save this model, so it cannot be sent to workers: {exc}\n"
                "Hint: give its layers a get_config(), or pass a function as model=..., which workers call."
            ) from exc
        return Archive(flavour, path.read_bytes(), custom_objects(model, flavour), optimizer)


def _build_scaled(model: Any) -> None:
    """Keras 2 cannot read back an optimizer with a loss scale that had no variables when saved."""
    optimizer: Any = getattr(model, "optimizer", None)
    if hasattr(optimizer, "_loss_scale") and model.built:
        optimizer.build(model.trainable_variables)


def _restore(archive: Archive, backend: str) -> Any:
    keras = load(backend) if archive.flavour == "keras" else importlib.import_module("tf_keras")
    with Folder("kindler-model-") as folder:
        path = folder / "model.keras"
        path.write_bytes(archive.data)
        # The user's own program sent it: its lambdas are as trustworthy as its functions.
        model = keras.saving.load_model(str(path), custom_objects=archive.custom_objects, safe_mode=False)
    if is_compiled(model):  # a model with a `compile` of its own may not be, which `build` complains about
        check_optimizer(model, archive.optimizer)
    return model


def custom_objects(model: Any, flavour: str) -> dict[str, Any]:
    """The user's own classes and functions in the model, under the names that Keras looks up."""
    keras = importlib.import_module(flavour)
    objects: dict[str, Any] = {}
    for thing in _things(model):
        for part in (thing, *_values(thing)):
            named = part if _is_function(part) or isinstance(part, type) else type(part)
            module = getattr(named, "__module__", None) or ""
            if module.partition(".")[0] in _KNOWN or not hasattr(named, "__name__"):
                continue
            if _is_function(named) or hasattr(named, "get_config"):
                objects[named.__name__] = objects[keras.saving.get_registered_name(named)] = named
    return objects


_KNOWN = frozenset(
    {"keras", "tf_keras", "tensorflow", "jax", "torch", "numpy", "builtins", "functools", "typing"}
)


def _things(model: Any) -> Iterator[Any]:
    yield from model._flatten_layers()
    for name in ("optimizer", "loss", "_loss", "_metrics"):
        yield from leaves(getattr(model, name, None))
    for holder, name in (
        ("_compile_loss", "_user_loss"),
        ("_compile_metrics", "_user_metrics"),
        ("_compile_metrics", "_user_weighted_metrics"),
        ("compiled_loss", "_user_losses"),
        ("compiled_metrics", "_user_metrics"),
        ("compiled_metrics", "_user_weighted_metrics"),
    ):
        yield from leaves(getattr(getattr(model, holder, None), name, None))


def _values(thing: Any) -> Iterator[Any]:
    for name, value in list(getattr(thing, "__dict__", {}).items()):
        # Keras keeps a wrapper of a layer's own `build` in it, which would take the whole layer along.
        if not hasattr(type(thing), name) and (_is_function(value) or hasattr(value, "get_config")):
            yield value


def _is_function(value: Any) -> bool:
    return type(value).__name__ in ("function", "method") and getattr(value, "__name__", "") != "<lambda>"


def _kind(value: Any) -> str:
    return f"{value!r:.80} of type {type(value).__qualname__}"


def scoring_model(spec: KerasSpec, state: Callable[[], bytes], before: ScoringModel | None) -> ScoringModel:
    """Without optimizer and time of saving, so that equal models have equal bytes."""
    model = spec.model
    if model is None or isinstance(model, Archive):
        return ScoringModel.of(dumps(spec), _own_state(state()), before)
    archive = _archive(model)
    slim = replace(archive, data=_without_training(archive.data), optimizer=None)
    packed = dumps(replace(spec, compile_args=None, model=slim))
    # Read from an archive, these have all their variables.
    kind, of_keras = type(model).__name__, type(model).__module__.startswith(("keras.", "tf_keras."))
    whole = model.built and of_keras and kind in ("Functional", "Sequential")
    return ScoringModel.of(packed, b"" if whole else _own_state(state()), before)


def _own_state(state: bytes) -> bytes:
    fields, arrays = unpack(state) if state else ({}, [])
    count = fields.get("own")
    if count is None:  # it was written by an earlier version
        return state
    kept = {name: value for name, value in fields.items() if name not in ("dtypes", "shapes")}
    return pack({**kept, "names": fields["names"][:count], "epoch": 0, "step": 0}, arrays[:count])


def _without_training(data: bytes) -> bytes:
    file, dropped = io.BytesIO(), {"config.json": "compile_config", "metadata.json": "date_saved"}
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(file, "w") as target:
        for name in sorted(source.namelist()):
            content = source.read(name)
            if name == "model.weights.h5":
                content = _without_optimizers(content)
            elif name in dropped:
                settings = json.loads(content)
                settings.pop(dropped[name], None)
                content = json.dumps(settings).encode()
            target.writestr(zipfile.ZipInfo(name), content)  # with no date of its own
    return file.getvalue()


def _without_optimizers(content: bytes) -> bytes:
    h5py: Any = importlib.import_module("h5py")
    file = io.BytesIO()
    with h5py.File(io.BytesIO(content), "r") as source, h5py.File(file, "w") as target:
        for name in sorted(set(source) - {"optimizer", "optimizers"}):
            source.copy(name, target)
        for name, value in source.attrs.items():
            target.attrs[name] = value
    return file.getvalue()
