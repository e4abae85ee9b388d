"""Exports a Keras model to ONNX or OpenVINO, in a process with another backend if this one cannot.

That process: python -m kindler.frameworks.keras.export FOLDER FORM PATH
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from kindler.collective import Array
from kindler.errors import ConfigError, KindlerError, MissingExtraError
from kindler.frameworks.keras.backends import environment
from kindler.frameworks.keras.spec import custom_objects
from kindler.temporary import Folder

# The backends that can, best first.
_ABLE = {"openvino": ("tensorflow", "torch"), "onnx": ("torch",)}
_TITLES = {"openvino": "OpenVINO", "onnx": "ONNX"}


def export(model: Any, form: str, path: str, *, backend: str, features: Sequence[Array]) -> None:
    if backend == "tf_keras":
        _export_keras_2(model, form, path, features)
    elif backend in _ABLE[form]:
        _export_here(model, form, path, backend)
    else:
        _export_elsewhere(model, form, path, backend, features)


def _export_here(model: Any, form: str, path: str, backend: str) -> None:
    if form == "onnx":
        _require("onnx", "onnx", backend)
    try:
        model.export(path, format=form, verbose=False)
    except Exception as exc:
        raise ConfigError(f"Keras cannot export this model to {_TITLES[form]}: {_last_line(exc)}") from exc


def _export_elsewhere(model: Any, form: str, path: str, backend: str, features: Sequence[Array]) -> None:
    other = next((name for name in _ABLE[form] if importlib.util.find_spec(name)), None)
    if other is None:
        _require(_ABLE[form][0], _ABLE[form][0], backend)
    with Folder("kindler-export-") as folder:
        model.save(folder / "model.keras")
        np.savez(folder / "rows.npz", *_in_order(model, features))
        (folder / "objects").write_bytes(cloudpickle.dumps(custom_objects(model, "keras")))
        done = subprocess.run(
            [sys.executable, "-m", "kindler.frameworks.keras.export", str(folder), form, path],
            env={**os.environ, **dict(environment(str(other))), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise ConfigError(
            f"Keras on {backend} does not export to {_TITLES[form]}, and on {other} it cannot export this"
            f" model: {_last_line(done.stderr)}"
        )


def _in_order(model: Any, features: Sequence[Array]) -> list[Array]:
    """The columns may be in another order than the model's inputs."""
    if not getattr(model, "inputs", None):
        return list(features)
    shapes = [[1, *(1 if size is None else size for size in each.shape[1:])] for each in model.inputs]
    return [np.zeros(shape, each.dtype) for shape, each in zip(shapes, model.inputs, strict=True)]


def _export_keras_2(model: Any, form: str, path: str, features: Sequence[Array]) -> None:
    if form == "onnx":
        if importlib.util.find_spec("tf2onnx") is None:
            raise ConfigError(
                "Keras 2 exports to ONNX through the package tf2onnx, which is not installed.\n"
                "Hint: pip install tf2onnx, or use to_openvino()."
            )
        importlib.import_module("tf2onnx").convert.from_keras(model, output_path=path)
        return
    from kindler.frameworks.openvino.graph import convert

    tensorflow = importlib.import_module("tensorflow")
    specs = [tensorflow.TensorSpec([None, *array.shape[1:]], array.dtype) for array in features]
    call = tensorflow.function(lambda *rows: model(rows[0] if len(rows) == 1 else list(rows)))
    convert(call.get_concrete_function(*specs), path, features=features)


def _require(package: str, extra: str, backend: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(what=f"exporting a model of Keras on {backend}", package=package, extra=extra)


def _last_line(output: object) -> str:
    """The lines before the last are places in code."""
    lines = [line.strip() for line in str(output).splitlines() if line.strip()]
    return (lines[-1] if lines else "it did not say why")[:300]


def _main(folder: str, form: str, path: str) -> None:
    import keras

    # The user's own program sent it: its lambdas are as trustworthy as its functions.
    objects = cloudpickle.loads((Path(folder) / "objects").read_bytes())
    model = keras.saving.load_model(
        Path(folder) / "model.keras", custom_objects=objects, compile=False, safe_mode=False
    )
    with np.load(Path(folder) / "rows.npz", allow_pickle=False) as file:
        rows = [file[name] for name in file.files]
    model.predict_on_batch(rows[0] if len(rows) == 1 else rows)  # Keras exports what was called
    try:
        export(model, form, path, backend=keras.backend.backend(), features=rows)
    except KindlerError as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    _main(*sys.argv[1:])
