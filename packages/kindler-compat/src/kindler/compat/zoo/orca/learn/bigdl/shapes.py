"""What preprocessing says about the shape of rows, and the module that gives rows that shape."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from kindler.compat.zoo.feature import (
    ChainedPreprocessing,
    FeatureLabelPreprocessing,
    SeqToMultipleTensors,
    SeqToTensor,
    TensorToSample,
)
from kindler.data.arrays import is_spark_frame
from kindler.errors import ConfigError, DataError

Shapes = list[tuple[int, ...]]


def shapes_of(given: Any, argument: str) -> Shapes | None:
    """The shapes of the inputs of a row; None leaves rows as they are."""
    if given is None or isinstance(given, TensorToSample):
        return None
    if isinstance(given, FeatureLabelPreprocessing):
        label = argument.startswith("label")
        return shapes_of(given.label_transformer if label else given.feature_transformer, argument)
    if isinstance(given, ChainedPreprocessing):
        found = [shapes_of(step, argument) for step in given.transformers]
        return next((shapes for shapes in reversed(found) if shapes is not None), None)
    if isinstance(given, SeqToTensor):
        return [given.size] if given.size else None
    if isinstance(given, SeqToMultipleTensors):
        return given.sizes or None
    if isinstance(given, list | tuple) and given:
        if all(isinstance(length, int) for length in given):
            return [tuple(given)]
        if all(isinstance(part, list | tuple) and all(isinstance(n, int) for n in part) for part in given):
            return [tuple(part) for part in given]
    raise ConfigError(
        f"{argument} must be a shape such as [28, 28], a list of shapes for several inputs, or SeqToTensor,"
        f" SeqToMultipleTensors or ArrayToTensor of zoo.feature.common; received {given!r}.\n"
        "Hint: preprocess other columns before, with Spark or XShards.transform_shard."
    )


def joined_labels(data: Any, labels: Any) -> tuple[Any, Any]:
    """Data whose several columns of labels are one vector, and that column; single ones stay as they are."""
    if not isinstance(labels, list | tuple) or len(labels) < 2:
        return data, labels
    name = f"labels({', '.join(labels)})"
    if not is_spark_frame(data):
        return data.transform_shard(_Joined(tuple(labels), name)), name
    kinds = {label: data.schema[label].dataType.simpleString() for label in labels}
    parts = [
        f"cast(`{label}` as array<double>)"
        if kind.startswith("array")
        else f"array(cast(`{label}` as double))"
        for label, kind in kinds.items()
    ]
    return data.selectExpr("*", f"concat({', '.join(parts)}) as `{name}`"), name


class _Joined:
    """Joins columns of a pandas DataFrame; other shards have their labels in one array anyway."""

    def __init__(self, labels: tuple[str, ...], name: str) -> None:
        self.labels, self.name = labels, name

    def __call__(self, shard: Any) -> Any:
        if not hasattr(shard, "assign"):
            raise DataError(
                f"label_cols={list(self.labels)} names columns; the shards are {type(shard).__qualname__}.\n"
                'Hint: shards of {"x": ..., "y": ...} need no label_cols.'
            )
        rows = zip(*(shard[label] for label in self.labels), strict=True)
        return shard.assign(**{self.name: [np.hstack(row).astype(np.float64) for row in rows]})


class ShapedModel(nn.Module):
    """A model of BigDL's layers that gets its rows in given shapes, and floats as float32."""

    def __init__(self, model: nn.Module, shapes: Shapes | None) -> None:
        super().__init__()
        self.model, self.shapes = model, shapes

    def forward(self, *inputs: torch.Tensor) -> Any:
        given = [part.float() if part.is_floating_point() else part for part in inputs]
        if self.shapes is not None:
            given = self._shaped(given, self.shapes)
        output = self.model(given[0] if len(given) == 1 else given)
        return tuple(output) if isinstance(output, list) else output

    def _shaped(self, given: list[torch.Tensor], shapes: Shapes) -> list[torch.Tensor]:
        rows = given[0].shape[0]
        if len(given) != len(shapes):  # one vector for all inputs
            flat = torch.cat([part.reshape(rows, -1).float() for part in given], 1)
            lengths = [math.prod(shape) for shape in shapes]
            if flat.shape[1] != sum(lengths):
                raise DataError(f"rows have {flat.shape[1]} numbers; feature_preprocessing needs {shapes}.")
            given = list(torch.split(flat, lengths, 1))
        for part, shape in zip(given, shapes, strict=True):
            if math.prod(part.shape[1:]) != math.prod(shape):
                raise DataError(
                    f"rows of shape {tuple(part.shape[1:])} do not fill the shape {shape} of"
                    " feature_preprocessing."
                )
        return [part.reshape(rows, *shape) for part, shape in zip(given, shapes, strict=True)]
