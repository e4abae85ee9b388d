"""What trains a PyTorch model, as JSON: classes of PyTorch's own by their names, with plain arguments."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from kindler.errors import ConfigError
from kindler.estimator.estimator import Estimator
from kindler.frameworks.torch.spec import TorchSpec
from kindler.models import torch_layers

_NOT_DESCRIBED = ("model", "config", "optimizer", "loss")
_MAKING = ("workers", "engine", "seed", "device")
_PLAIN = (bool, int, float, str, type(None))


def described(estimator: Estimator) -> dict[str, Any] | None:
    """The arguments of `Estimator.from_torch` besides the model, as JSON has them; None if there is more."""
    spec = estimator._model.spec
    if not isinstance(spec, TorchSpec) or estimator.preparation.active:
        return None
    optimizer, loss = _optimizer(spec.optimizer), None
    if isinstance(spec.loss, torch.nn.Module) and not [*spec.loss.parameters(), *spec.loss.buffers()]:
        loss = torch_layers.describe(spec.loss)
    others = {one.name: getattr(spec, one.name) for one in fields(spec) if one.name not in _NOT_DESCRIBED}
    if optimizer is None or loss is None or not all(map(_is_plain, others.values())):
        return None
    making = {name: getattr(estimator._run_config, name) for name in _MAKING}
    return {"optimizer": optimizer, "loss": loss, "others": {**others, **making}}


def options_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that `described` returned; they may come from anybody."""
    name, keywords = recipe["optimizer"]
    cls = getattr(torch.optim, str(name), None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and _is_plain(keywords)):
        raise ConfigError(f"the stage was saved with an optimizer {name!r}, which torch.optim has not.")
    loss, others = torch_layers.build(recipe["loss"]), dict(recipe["others"])
    known = {one.name for one in fields(TorchSpec)} - {*_NOT_DESCRIBED} | {*_MAKING}
    unknown = sorted(others.keys() - known)
    if unknown or not _is_plain(others):
        raise ConfigError(f"the stage was saved with {unknown or others}, which nothing is trained with.")
    return {"optimizer": functools.partial(cls, **keywords), "loss": loss, **others}


def _optimizer(given: Any) -> tuple[str, dict[str, Any]] | None:
    """The name of a class of PyTorch's own and its keywords; None if it is anything else."""
    if isinstance(given, torch.optim.Optimizer):
        (group, *more), taken = given.param_groups, inspect.signature(type(given)).parameters
        settings = {name: group[name] for name in given.defaults if name in taken}
        given = None if more or given.state else functools.partial(type(given), **settings)
    keywords = dict(given.keywords) if isinstance(given, functools.partial) and not given.args else {}
    cls = given.func if isinstance(given, functools.partial) else given
    known = isinstance(cls, type) and getattr(torch.optim, cls.__name__, None) is cls
    return (cls.__name__, keywords) if known and _is_plain(keywords) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inside) for key, inside in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) and json.dumps(value) not in ("NaN", "Infinity", "-Infinity")
