"""Keras's own files: saves the model as it is now, and warns of what a file cannot hold.

Keras saves the optimizer that `compile` was called with. Saving as `.h5` drops it from that record, and
`model.optimizer = ...` never gets there, so a later file would bring another optimizer back.
"""

from __future__ import annotations

import importlib
import json
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kindler.errors import ConfigError, UntrustedError, first_line
from kindler.frameworks.keras.backends import backend_of, load
from kindler.frameworks.keras.state import ModelVariables, slots, value_of

Array = np.ndarray[Any, np.dtype[Any]]


class FormatWarning(UserWarning):
    """A file does not hold, or does not restore, everything the model has."""


@contextmanager
def with_live_optimizer(model: Any) -> Iterator[None]:
    record = getattr(getattr(model, "_compile_config", None), "config", None)
    if not isinstance(record, dict) or getattr(model, "optimizer", None) is None:
        yield
        return
    before = dict(record)
    record["optimizer"] = model.optimizer
    try:
        yield
    finally:
        record.clear()
        record.update(before)


def described(optimizer: Any) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    return {
        "class": type(optimizer).__name__,
        "config": json.loads(json.dumps(optimizer.get_config(), default=_plain_config, sort_keys=True)),
        "steps": int(value_of(optimizer.iterations)),
    }


def check_optimizer(model: Any, wanted: Mapping[str, Any] | None) -> None:
    got = described(getattr(model, "optimizer", None)) if wanted is not None else None
    if got == wanted:
        return
    current = {"class": None} if got is None else got
    lost = next(
        (name for name in ("class", "config", "steps") if current.get(name) != (wanted or {})[name]), ""
    )
    raise ConfigError(
        "the model came back from Keras's archive with a different optimizer than on the driver:"
        f" its {lost} is {current.get(lost)!r}, and was {(wanted or {})[lost]!r}.\n"
        "Hint: give the optimizer a get_config() that returns all arguments of its constructor, or pass"
        " a function as model=..., so that workers create the model."
    )


def save(model: Any, path: str, *, flavour: str) -> None:
    if path.endswith(".weights.h5"):
        model.save_weights(path)
    elif path.endswith((".keras", ".h5")):
        with with_live_optimizer(model):
            model.save(path)
    elif Path(path).suffix:
        raise ConfigError(
            f"save({path!r}): Keras writes .keras (the model), .weights.h5 (its weights),"
            " or a folder without a suffix (a SavedModel for serving)."
        )
    else:
        model.export(path, **({"verbose": False} if flavour == "keras" else {}))
        return
    _warn_of_losses(model, path, flavour)


def load_into(model: Any, path: str, keras: Any, custom_objects: Mapping[str, Any]) -> None:
    if path.endswith(".weights.h5"):
        model.load_weights(path)
        return
    if not path.endswith((".keras", ".h5")):
        raise ConfigError(
            f"load({path!r}): weights come from .keras, .h5 or .weights.h5 files; an exported SavedModel"
            " cannot be trained on."
        )
    # Keras 3 does not read all that it writes into the old format: names of losses, the optimizer's state.
    old_format, problem = path.endswith(".h5"), ""
    read = partial(keras.saving.load_model, path, custom_objects=dict(custom_objects))
    try:
        saved = read(compile=not old_format)
    except (TypeError, ValueError) as exc:
        saved, problem = read(compile=False), f"cannot be compiled here ({first_line(exc)})"
    mine, theirs = ModelVariables(model), ModelVariables(saved)
    if len(mine.own()) == len(theirs.own()):  # states of random layers included
        mine.assign([value_of(v) for v in theirs.own()], only_own=True)
    else:
        model.set_weights(saved.get_weights())
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        found = _slots_in_h5(path) if old_format else _slots_of(getattr(saved, "optimizer", None))
        problem = problem or _take_slots(optimizer, found)
    if problem:
        kept = f"this model's {type(optimizer).__name__} keeps the state it had"
        warnings.warn(f"{path} {problem}: weights were loaded, and {kept}.", FormatWarning, stacklevel=4)


def read_model(path: str, *, trusted: bool) -> Any:
    """Read a compiled model from a `.keras` file; code in it runs only if `trusted`."""
    try:
        with zipfile.ZipFile(path) as archive:
            version = str(json.loads(archive.read("metadata.json"))["keras_version"])
    except (zipfile.BadZipFile, KeyError, ValueError) as exc:
        raise ConfigError(f"{path} is not a complete Keras model file: {exc}.") from exc
    if version.startswith("2.") and not trusted:
        raise UntrustedError(what=f"loading {path}", reason="Keras 2 may import what the file names")
    keras = importlib.import_module("tf_keras") if version.startswith("2.") else load(backend_of(None, None))
    try:
        return keras.saving.load_model(path, safe_mode=not trusted)
    except (TypeError, ValueError) as exc:
        if trusted or "safe_mode" not in str(exc):
            raise ConfigError(
                f"{path} cannot be read: {first_line(exc)}\nHint: your own classes must be known to Keras"
                " (keras.saving.register_keras_serializable) in this program."
            ) from exc
        raise UntrustedError(what=f"loading {path}", reason="it holds a lambda") from exc


def _take_slots(optimizer: Any, found: tuple[str, list[Array]] | None) -> str:
    """Returns why it cannot be, or ""."""
    mine, name = slots(optimizer), type(optimizer).__name__
    if found is None:
        return "has no optimizer"
    if found[0] != name:
        return f"has the state of {found[0]}"
    if [tuple(v.shape) for v in mine] != [array.shape for array in found[1]]:
        return f"has {len(found[1])} variables of a {name} that are not those of this one ({len(mine)})"
    for variable, array in zip(mine, found[1], strict=True):
        variable.assign(array)
    return ""


def _slots_of(optimizer: Any) -> tuple[str, list[Array]] | None:
    if optimizer is None:
        return None
    return type(optimizer).__name__, [value_of(variable) for variable in slots(optimizer)]


def _slots_in_h5(path: str) -> tuple[str, list[Array]] | None:
    """None without an optimizer."""
    h5py: Any = importlib.import_module("h5py")
    with h5py.File(path, "r") as file:
        if "optimizer_weights" not in file or "training_config" not in file.attrs:
            return None
        config = json.loads(file.attrs["training_config"])["optimizer_config"]
        group = file["optimizer_weights"]
        # A list of names too long for one attribute is cut into "weight_names0", "weight_names1", ...
        parts = sorted((key for key in group.attrs if key.startswith("weight_names")), key=len)
        names = [name for part in parts for name in group.attrs[part]]
        arrays = [np.asarray(group[name.decode() if isinstance(name, bytes) else name]) for name in names]
    return str(config["class_name"]).rpartition(">")[2], arrays


def _warn_of_losses(model: Any, path: str, flavour: str) -> None:
    optimizer, lost = getattr(model, "optimizer", None), []
    if optimizer is None:
        return
    if flavour == "keras" and path.endswith(".h5") and not path.endswith(".weights.h5"):
        lost.append(
            "from .h5 files Keras 3 itself reads no optimizer state back (Estimator.load does), and they hold"
            " no states of random layers. Hint: save as .keras, which keeps everything"
        )
    if hasattr(optimizer, "_loss_scale"):
        lost.append("Keras 2 does not save the current loss scale. Hint: save_checkpoint() keeps everything")
    for text in lost:
        warnings.warn(f"{Path(path).name}: {text}.", FormatWarning, stacklevel=5)


def _plain_config(value: Any) -> Any:
    if hasattr(value, "get_config"):
        return {"class": type(value).__name__, "config": value.get_config()}
    return value.tolist() if hasattr(value, "tolist") else repr(value)
