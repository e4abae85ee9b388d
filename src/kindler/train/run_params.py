"""What `fit` was told, as plain values by name, for whoever keeps a record of the run.

Loads no framework: models, optimizers and losses are looked at from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

__all__ = ["run_facts"]

Plain = str | int | float | bool


def run_facts(spec: Any, **given: Any) -> dict[str, Plain]:
    """The run in short.

    Args:
        spec: The model and all that trains it, of any framework.
        **given: Other arguments, by name; None says nothing.

    Returns:
        Names and plain values; "optimizer.lr" and "config.width" are parts of an optimizer and of the config.
    """
    model = getattr(spec, "model", None)
    model = getattr(spec, "model_creator", None) if model is None else model
    optimizer = getattr(spec, "optimizer", None) or getattr(model, "optimizer", None)
    loss = getattr(spec, "loss", None) or getattr(model, "loss", None)
    told = {"model": model, "optimizer": optimizer, "loss": loss}
    facts: dict[str, Plain] = {name: _title(item) for name, item in told.items() if item is not None}
    facts |= _parts("optimizer", _settings(optimizer))
    facts |= _parts("config", getattr(spec, "config", {}))
    for name in ("backend", "precision", "clip_norm", "clip_value", "accumulation_steps", "scheduler_step"):
        given.setdefault(name, getattr(spec, name, None))
    return facts | {name: value for name, value in given.items() if isinstance(value, Plain)}


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
    found = config() if callable(config) and not isinstance(optimizer, type) else {}
    return found if isinstance(found, Mapping) else {}


def _parts(prefix: str, settings: Mapping[str, Any]) -> dict[str, Plain]:
    return {f"{prefix}.{name}": value for name, value in settings.items() if isinstance(value, Plain)}
