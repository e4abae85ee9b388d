"""A Keras model as ONNX or OpenVINO, for any number of rows."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from kindler.collective import Array
from kindler.errors import ConfigError, MissingExtraError, first_line

__all__ = ["export"]

# What Keras converts with, by its backend.
_ONNX_NEEDS = {"tensorflow": "tf2onnx", "jax": "jax2onnx", "torch": "onnx"}


def export(model: Any, form: str, path: str, *, backend: str, features: Sequence[Array]) -> None:
    """Write a model.

    Args:
        model: The model, built.
        form: "onnx" or "openvino".
        path: The file.
        backend: The backend of Keras, or "tf_keras".
        features: A few rows of each input.

    Raises:
        ConfigError: The model, or the backend, has no such export.
        MissingExtraError: A package that converts it is not installed.
    """
    if form == "openvino":
        _to_openvino(model, path, backend, features)
        return
    needed = _ONNX_NEEDS.get(backend, "tf2onnx")
    try:
        importlib.import_module(needed)
    except ModuleNotFoundError as exc:
        what = f"a Keras model on {backend} as ONNX"
        raise MissingExtraError(what=what, package=needed, extra="onnx-export") from exc
    try:
        if backend == "tf_keras":
            importlib.import_module("tf2onnx").convert.from_keras(model, output_path=path)
        else:
            model.export(path, format="onnx", verbose=False)
    except Exception as exc:
        raise ConfigError(f"Keras cannot export this model to ONNX: {first_line(exc)}") from exc


def _to_openvino(model: Any, path: str, backend: str, features: Sequence[Array]) -> None:
    from kindler.frameworks.openvino.convert import convert

    if backend == "tf_keras":
        tensorflow = importlib.import_module("tensorflow")
        specs = [tensorflow.TensorSpec([None, *array.shape[1:]], array.dtype) for array in features]
        call = tensorflow.function(lambda *rows: model(rows[0] if len(rows) == 1 else list(rows)))
        convert(call.get_concrete_function(*specs), path, features=features)
        return
    try:
        model.export(path, format="openvino", verbose=False)
    except Exception as exc:
        raise ConfigError(
            f"Keras cannot export this model, on {backend}, to OpenVINO: {first_line(exc)}"
        ) from exc
