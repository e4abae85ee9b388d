"""OpenVINO's own objects: reading, converting and writing models, their shapes and errors."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kindler.collective import Array
from kindler.errors import ConfigError
from kindler.temporary import Folder

# Where a processor has them, OpenVINO would compute in 16 bits, and answer otherwise than elsewhere.
SETTINGS = {"INFERENCE_PRECISION_HINT": "f32"}

openvino: Any = importlib.import_module("openvino")


@functools.cache
def core() -> Any:
    """One per process: several leave a stale signal stack, and the next signal would end the process."""
    return openvino.Core()


def read_ir(xml: bytes, weights: bytes, name: str) -> Any:
    try:
        return core().read_model(xml, weights)
    except RuntimeError as exc:
        raise ConfigError(f"OpenVINO cannot load {name}: {cause(exc)}") from exc


def read_file(path: Path) -> Any:
    """OpenVINO, ONNX, TensorFlow or TensorFlow Lite files."""
    try:
        return core().read_model(str(path))
    except RuntimeError as exc:
        raise ConfigError(f"OpenVINO cannot load {path.name}: {cause(exc)}") from exc


def written(model: Any) -> tuple[bytes, bytes]:
    with Folder("kindler-openvino-") as folder:
        path = folder / "model.xml"
        # By itself, OpenVINO would make 16 bits of its weights.
        openvino.save_model(model, str(path), compress_to_fp16=False)
        return path.read_bytes(), path.with_suffix(".bin").read_bytes()


def shape_of(port: Any) -> list[int | None] | None:
    """None in place of a free dimension, or of the shape if its rank is free."""
    shape = port.get_partial_shape()
    return [_length(n) for n in shape] if shape.rank.is_static else None


def names_of(ports: Sequence[Any], what: str) -> list[str]:
    return [next(iter(sorted(port.get_names())), f"{what}_{i}") for i, port in enumerate(ports)]


def cause(error: BaseException) -> str:
    """The lines before the last are places in OpenVINO's source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


def _length(dimension: Any) -> int | None:
    return None if dimension.is_dynamic else int(dimension.get_length())


def convert(
    model: Any,
    path: str,
    *,
    features: Sequence[Array],
    names: Sequence[str] = (),
    outputs: Sequence[str] = (),
    example: Any = None,
) -> None:
    try:
        converted = openvino.convert_model(model, **({} if example is None else {"example_input": example}))
        if len(converted.inputs) != len(features):
            raise ConfigError(
                f"OpenVINO finds {len(converted.inputs)} inputs in the model, which takes {len(features)}.\n"
                "Hint: every input must contribute to the outputs."
            )
        shapes = [[-1, *array.shape[1:]] for array in features]
        converted.reshape({i: openvino.PartialShape(shape) for i, shape in enumerate(shapes)})
    except ConfigError:
        raise
    except Exception as exc:  # its errors, and those of the framework that it traces
        raise ConfigError(f"OpenVINO cannot convert this model: {cause(exc)}") from exc
    for ports, wanted in ((converted.inputs, names), (converted.outputs, outputs)):
        if len(ports) == len(wanted):
            for port, name in zip(ports, wanted, strict=True):
                port.get_tensor().set_names({name})
    openvino.save_model(converted, path, compress_to_fp16=False)
