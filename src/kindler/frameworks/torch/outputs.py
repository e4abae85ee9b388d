"""A model's outputs, possibly nested, as tensors in order; named by their paths ("hidden_states_0")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from kindler.errors import ConfigError

_LOSS = "loss"
# What decoders keep for the next token; it is no output, and has no rows in some forms.
_LEFT_OUT = ("past_key_values",)


def flat(outputs: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in _leaves(outputs, ())]


def names_of(outputs: Any) -> tuple[str, ...] | None:
    """In the order of `flat`; None if the model has given none."""
    paths = [path for path, _ in _leaves(outputs, ())]
    if not any(isinstance(part, str) for path in paths for part in path):
        return None
    names = tuple(_name(path) for path in paths)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"two of the model's outputs are called {twice[0]!r}: parts of nested outputs are named after the"
            " keys that lead to them, joined by '_'.\nHint: give the keys other names."
        )
    return names


def own_loss(outputs: Any) -> torch.Tensor | None:
    """Under "loss", first in a tuple, or all that the model returned."""
    if isinstance(outputs, Mapping):
        found = outputs.get(_LOSS)
    elif isinstance(outputs, torch.Tensor):
        found = outputs
    elif hasattr(outputs, _LOSS):
        found = outputs.loss
    else:
        found = outputs[0] if isinstance(outputs, tuple | list) and outputs else None
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def without_loss(outputs: Any) -> Any:
    """The loss has no rows."""
    if isinstance(outputs, torch.Tensor) or own_loss(outputs) is None:
        return outputs
    if isinstance(outputs, Mapping):
        return {name: value for name, value in outputs.items() if name != _LOSS}
    return _named(outputs, _LOSS) if not isinstance(outputs, tuple | list) else outputs[1:]


def _named(outputs: Any, *left_out: str) -> dict[str, Any]:
    return {f.name: getattr(outputs, f.name) for f in fields(outputs) if f.name not in left_out}


def _leaves(
    outputs: Any, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], torch.Tensor]]:
    if isinstance(outputs, torch.Tensor):
        yield path, outputs
        return
    for key, value in _parts(outputs):
        if isinstance(key, str) and (value is None or key in _LEFT_OUT):
            continue
        yield from _leaves(value, (*path, key))


def _parts(outputs: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(outputs, Mapping):
        return ((str(key), value) for key, value in outputs.items())
    if is_dataclass(outputs) and not isinstance(outputs, type):
        return iter(_named(outputs).items())
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return iter(zip(outputs._fields, outputs, strict=True))
    if isinstance(outputs, tuple | list):
        return iter(enumerate(outputs))
    raise ConfigError(
        f"prediction needs a model whose outputs are tensors; it returned {type(outputs).__name__}."
    )


def _name(path: tuple[str | int, ...]) -> str:
    """Paths that begin with a number get the default prefix "prediction"."""
    parts = path if path and isinstance(path[0], str) else ("prediction", *path)
    return "_".join(map(str, parts))
