"""Exports a PyTorch model to ONNX or OpenVINO: traced on a few rows, for any number of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from kindler.collective import Array
from kindler.errors import ConfigError, first_line
from kindler.frameworks.torch.outputs import flat


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
            _onnx(tensors_only, path, example, names, outputs)
            return
        from kindler.frameworks.openvino.graph import convert

        convert(tensors_only, path, features=features, names=names, outputs=outputs, example=example)


def _onnx(
    model: Flat, path: str, example: tuple[torch.Tensor, ...], names: Sequence[str], outputs: Sequence[str]
) -> None:
    try:
        torch.onnx.export(
            model,
            example,
            path,
            input_names=list(names),
            output_names=list(outputs),
            dynamic_axes={name: {0: "rows"} for name in (*names, *outputs)},
            dynamo=False,  # the other exporter fixes the rows of many models, and needs one more package
        )
    except Exception as exc:
        raise ConfigError(f"PyTorch cannot export this model to ONNX: {first_line(exc)}") from exc
