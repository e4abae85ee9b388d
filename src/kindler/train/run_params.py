"""The parameters of a run as plain values by name, for whoever keeps a record of it.

Loads no framework: models, optimizers and losses are looked at from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kindler.train.options import FitOptions

Plain = str | int | float | bool

_OF_OPTIONS = ("batch_size", "epochs", "steps_per_epoch", "max_steps", "shuffle")
_OF_SPEC = ("backend", "precision", "clip_norm", "clip_value", "accumulation_steps", "scheduler_step")


def run_params(spec: Any, options: FitOptions, **estimator: Plain | None) -> dict[str, Plain]:
    """The parameters of a training run.

    Args:
        spec: The model and everything that trains it, of any framework.
        options: The options of `fit`.
        **estimator: Options of the estimator, by name. None leaves one out.

    Returns:
        Names and plain values; "optimizer.lr" and "config.width" are parts of the optimizer and the config.
    """
    model = getattr(spec, "model", None)
    model = getattr(spec, "model_creator", None) if model is None else model
    optimizer = getattr(spec, "optimizer", None) or getattr(model, "optimizer", None)
    loss = getattr(spec, "loss", None) or getattr(model, "loss", None)
    parts = {"model": model, "optimizer": optimizer, "loss": loss}
    params: dict[str, Plain] = {name: _title(part) for name, part in parts.items() if part is not None}
    params |= _plain(_settings(optimizer), "optimizer.")
    params |= _plain(getattr(spec, "config", {}), "config.")
    params |= _plain({name: getattr(spec, name, None) for name in _OF_SPEC})
    params |= _plain({name: getattr(options, name) for name in _OF_OPTIONS})
    return params | _plain(estimator)


def _title(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, functools.partial):
        return _title(item.func)
    return str(getattr(item, "__qualname__", None) or type(item).__qualname__)


def _settings(optimizer: Any) -> Mapping[str, Any]:
    if isinstance(optimizer, functools.partial):
        return optimizer.keywords
    defaults = getattr(optimizer, "defaults", None)
    if isinstance(defaults, Mapping):  # as PyTorch's have
        return defaults
    config = getattr(optimizer, "get_config", None)  # as Keras's have
    settings = config() if callable(config) and not isinstance(optimizer, type) else {}
    return settings if isinstance(settings, Mapping) else {}


def _plain(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Plain]:
    return {prefix + name: value for name, value in settings.items() if isinstance(value, Plain)}
