"""A PyTorch model as ONNX or OpenVINO: traced on a few rows, for any number of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kindler.collective import Array
from kindler.errors import ConfigError, first_line

__all__ = ["export", "numbered"]


class Flat(torch.nn.Module):
    """A model with tensors in and a tuple of tensors out, whatever it takes and gives itself.

    Args:
        model: The model.
        names: The names that it takes its inputs by; empty where they are positional.
    """

    def __init__(self, model: torch.nn.Module, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *features: torch.Tensor) -> Any:
        """The outputs in their order."""
        if self.names:
            outputs = self.model(dict(zip(self.names, features, strict=True)))
        else:
            outputs = self.model(*features)
        if isinstance(outputs, Mapping):
            outputs = tuple(outputs.values())
        return outputs if isinstance(outputs, torch.Tensor) else tuple(outputs)


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    """Names for so many things; one alone has no number."""
    return (prefix.rstrip("_"),) if count == 1 else tuple(f"{prefix}{i}" for i in range(count))


def export(
    model: torch.nn.Module,
    form: str,
    path: str,
    *,
    names: Sequence[str],
    outputs: Sequence[str],
    features: Sequence[Array],
    by_name: bool,
) -> None:
    """Write a model in evaluation mode.

    Args:
        model: The model.
        form: "onnx" or "openvino".
        path: The file.
        names: Names of its inputs.
        outputs: Names of its outputs.
        features: A few rows of each input.
        by_name: Whether it takes its inputs in a dict.

    Raises:
        ConfigError: The model cannot be traced, or uses operations that the format does not have.
    """
    flat = Flat(model, names if by_name else ()).eval()
    example = tuple(torch.from_numpy(array.copy()) for array in features)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing: what comes of it is compared afterwards
        if form == "onnx":
            _onnx(flat, path, example, names, outputs)
            return
        from kindler.frameworks.openvino.convert import convert

        convert(flat, path, features=features, names=names, outputs=outputs, example=example)


def _onnx(
    flat: Flat, path: str, example: tuple[torch.Tensor, ...], names: Sequence[str], outputs: Sequence[str]
) -> None:
    try:
        torch.onnx.export(
            flat,
            example,
            path,
            input_names=list(names),
            output_names=list(outputs),
            dynamic_axes={name: {0: "rows"} for name in (*names, *outputs)},
            dynamo=False,  # the other exporter fixes the rows of many models, and needs one more package
        )
    except Exception as exc:
        raise ConfigError(f"PyTorch cannot export this model to ONNX: {first_line(exc)}") from exc
