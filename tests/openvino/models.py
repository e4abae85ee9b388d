"""Small OpenVINO models, written to files, and what OpenVINO itself makes of arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops

__all__ = ["classifier", "direct", "named", "save", "two_inputs"]


def named(node: Any, name: str) -> Any:
    node.output(0).tensor.names = {name}
    return node


def save(model: Any, path: Path) -> Path:
    ov.save_model(model, str(path), compress_to_fp16=False)
    return path


def classifier(path: Path, shape: list[int], classes: int = 5) -> Path:
    """Images of three channels, averaged, and a layer with softmax; `shape` is the input's, -1 for free."""
    image = named(ops.parameter(shape, np.float32, name="image"), "image")
    pooled = ops.reduce_mean(image, ops.constant(np.array([-2, -1])), False)
    weights = np.random.default_rng(1).normal(size=(3, classes)).astype("float32")
    layer = ops.matmul(pooled, ops.constant(weights * 20), False, False)
    return save(ov.Model([named(ops.softmax(layer, -1), "scores")], [image], "classifier"), path)


def two_inputs(path: Path, rows: int = -1) -> Path:
    """The sum and the difference of a vector of 3 and a scaled number."""
    a = named(ops.parameter([rows, 3], np.float32, name="a"), "a")
    b = named(ops.parameter([rows, 1], np.float32, name="b"), "b")
    outputs = [named(ops.add(a, b), "sum"), named(ops.subtract(a, b), "difference")]
    return save(ov.Model(outputs, [a, b], "two"), path)


def direct(path: Path, *inputs: Any) -> list[Any]:
    """What OpenVINO computes for these inputs, in one call."""
    found = ov.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(list(inputs))
    return [np.array(value) for value in found.values()]
