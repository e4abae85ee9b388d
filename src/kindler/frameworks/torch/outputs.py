"""A model's outputs, possibly nested, as tensors in order, named by their paths ("hidden_states_0").

Also exports models to ONNX or OpenVINO, where outputs are flat: traced on a few rows, for any number of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from kindler.collective import Array
from kindler.errors import ConfigError, first_line

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
    # Paths that begin with a number get the default prefix "prediction".
    full = (path if path and isinstance(path[0], str) else ("prediction", *path) for path in paths)
    names = tuple("_".join(map(str, path)) for path in full)
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
        loss = outputs.get(_LOSS)
    elif isinstance(outputs, torch.Tensor):
        loss = outputs
    elif hasattr(outputs, _LOSS):
        loss = outputs.loss
    else:
        loss = outputs[0] if isinstance(outputs, tuple | list) and outputs else None
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


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


class Flat(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, names: Sequence[str], inputs: str) -> None:
        super().__init__()
        self.model, self.names, self.inputs = model, tuple(names), inputs

    def forward(self, *features: torch.Tensor) -> Any:
        if self.inputs == "positional":
            outputs = self.model(*features)
        else:
            named = dict(zip(self.names, features, strict=True))
            outputs = self.model(**named) if self.inputs == "kwargs" else self.model(named)
        return outputs if isinstance(outputs, torch.Tensor) else tuple(flat(outputs))


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    return (prefix.rstrip("_"),) if count == 1 else tuple(f"{prefix}{i}" for i in range(count))


def export(
    model: torch.nn.Module,
    form: str,
    path: str,
    *,
    names: Sequence[str],
    outputs: Sequence[str],
    features: Sequence[Array],
    inputs: str,
) -> None:
    tensors_only = Flat(model, names, inputs).eval()
    example = tuple(torch.from_numpy(array.copy()) for array in features)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing: what comes of it is compared afterwards
        if form == "onnx":
            try:
                torch.onnx.export(
                    tensors_only,
                    example,
                    path,
                    input_names=list(names),
                    output_names=list(outputs),
                    dynamic_axes={name: {0: "rows"} for name in (*names, *outputs)},
                    dynamo=False,  # the other fixes the rows of many models, and needs one more package
                )
            except Exception as exc:
                raise ConfigError(f"PyTorch cannot export this model to ONNX: {first_line(exc)}") from exc
            return
        from kindler.frameworks.openvino.graph import convert

        convert(tensors_only, path, features=features, names=names, outputs=outputs, example=example)
