"""Which arguments are fields of a group, such as `clip_norm` of `Optimization`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from kindler.config import Checkpoints, Columns, Device, Epochs, Optimization
from kindler.data.preparation import Prepare
from kindler.errors import ConfigError, did_you_mean

P = ParamSpec("P")
T = TypeVar("T")

GROUPS: dict[str, type] = {
    "columns": Columns,
    "epochs": Epochs,
    "checkpoint": Checkpoints,
    "device": Device,
    "optimization": Optimization,
    "prepare": Prepare,
}
# What fields are called that have other names where all arguments are in one place.
_FLAT = {
    "device": ("device", "name"),
    "share_gpus": ("device", "share"),
    "device_cache": ("device", "cache"),
    "sample_weight_col": ("columns", "weight_col"),
    "weight_col": ("columns", "weight_col"),
    "model_dir": ("checkpoint", "folder"),
    "checkpoint_trigger": ("checkpoint", "every"),
    "keep_checkpoints": ("checkpoint", "keep"),
    "best_metric": ("checkpoint", "best"),
    "end_trigger": ("epochs", "stop_when"),
    "stop_when": ("epochs", "stop_when"),
}
_FIELDS = {field.name: (group, field.name) for group, kind in GROUPS.items() for field in fields(kind)}
_PLACES = {name: place for name, place in _FIELDS.items() if place not in _FLAT.values()} | _FLAT
_ELSEWHERE = {
    "nan_loss": "settings=RunSettings(nan_loss=...) of the constructor",
    "log_dir": "callbacks=[kindler.callbacks.TensorBoard(...)] of fit",
}


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `Estimator`'s methods, made of options that know no groups.

    >>> grouped({"epochs": 3, "batch_size": 8, "model_dir": "runs/a", "keep_checkpoints": 5})
    {'batch_size': 8, 'epochs': 3, 'checkpoint': Checkpoints(folder='runs/a', every=None, keep=5, best=None)}
    """
    arguments: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        group, field = _PLACES.get(name, (name, ""))
        if field and not isinstance(value, GROUPS[group]):
            inside.setdefault(group, {})[field] = value
        else:
            arguments[name] = value
    for group, given in inside.items():
        if group == "checkpoint" and given.get("folder") is None:
            asked = [f"{name}=..." for name in ("checkpoint_trigger", "best_metric") if options.get(name)]
            if asked:
                need = "needs" if len(asked) == 1 else "need"
                raise ConfigError(
                    f"{' and '.join(asked)} {need} a folder for checkpoints; pass model_dir=..."
                )
            continue
        alone = {"epochs": {"epochs"}, "device": {"name"}}.get(group)
        arguments[group] = next(iter(given.values())) if given.keys() == alone else GROUPS[group](**given)
    return arguments


def names_groups(function: Callable[P, T]) -> Callable[P, T]:
    """Say where an argument is that `function` does not have."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs.keys() - set(names):
            what = f"{function.__qualname__}() got an unexpected keyword argument {name!r}."
            if name in _ELSEWHERE:
                raise TypeError(f"{what}\nHint: pass {_ELSEWHERE[name]}.")
            if name in _PLACES:
                group, field = _PLACES[name]
                others = "fit" if group in ("epochs", "checkpoint", "columns") else "the constructor"
                where = "" if group in names else f" to {others}"
                raise TypeError(f"{what}\nHint: pass {group}={GROUPS[group].__name__}({field}=...){where}.")
            raise TypeError(f"{what}{did_you_mean(name, [*names, *_PLACES])}")
        for name in ("columns", "optimization"):  # the others also have a short form, or a check of their own
            value = kwargs.get(name)
            if value is not None and not isinstance(value, GROUPS[name]):
                raise ConfigError(f"{name} must be a kindler.{GROUPS[name].__name__}; received {value!r}.")
        return function(*args, **kwargs)

    return checked
