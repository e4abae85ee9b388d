"""A stored model as an MLflow model: a folder that `mlflow.pyfunc.load_model` and `mlflow models serve` take.

All kinds are written alike: the archive that the store exports, and `kindler.tracking.loader` to load it.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
from mlflow.models import Model, ModelSignature
from mlflow.types.schema import AnyType, ColSpec, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import TensorSpec as MlflowTensor

from kindler.errors import AlreadyExistsError
from kindler.models.loaded import load_files
from kindler.models.predictor import Predictor
from kindler.models.signature import Array, Signature, example
from kindler.store import Version, archive
from kindler.tracking import package_version

_LOADER = "kindler.tracking.loader"


def write(version: Version, files: Path, folder: Path, *, trusted: bool, **fields: Any) -> None:
    """Write a version to a new folder as an MLflow model, with `fields` of its `MLmodel` (`run_id`, ...).

    The model is loaded once, so that its signature is what it says itself.
    """
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise AlreadyExistsError(f"{str(folder)!r} already exists.", name=str(folder))
    loaded = load_files(version.kind, files, version.meta, trusted=trusted)
    packages = loaded.kind.requirements(version.meta)
    wanted = ["kindler", "numpy", "pandas", "pyarrow", "orjson", *packages]
    installed = [(name, package_version(name)) for name in wanted]
    config: dict[str, Any] = {"trusted": False}  # what may be changed when it is loaded, and nothing else
    if "keras" in packages:  # the backend that the model was just loaded with
        config["keras_backend"] = str(sys.modules["keras"].backend.backend())
    with tempfile.TemporaryDirectory(prefix="kindler-mlflow-") as scratch:
        packed = Path(scratch) / "model.zip"
        archive.write(version, files, packed)
        with warnings.catch_warnings():
            # MLflow wants an example to find the signature by; the model has told it.
            warnings.filterwarnings("ignore", r".*An input example was not provided", UserWarning)
            mlflow.pyfunc.save_model(
                str(folder),
                loader_module=_LOADER,
                data_path=str(packed),
                mlflow_model=Model(**fields),
                signature=_signature(loaded.predictor),
                # Without what says where a build is from: no index has `2.13.0+cpu` for others.
                pip_requirements=[f"{name}=={found.partition('+')[0]}" for name, found in installed if found],
                model_config=config,
                metadata={"kindler": {"name": version.name, "version": version.number, "kind": version.kind}},
            )


def _signature(predictor: Predictor) -> ModelSignature | None:
    """The signature; None for a model that does not say what it takes before it is called."""
    inputs = _inputs(predictor.signature)
    if inputs is None:
        return None
    outputs = _example_outputs(predictor)
    by_name = [
        _tensor(array.dtype, array.shape, name if len(outputs) > 1 else None)
        for name, array in outputs.items()
    ]
    methods = predictor.methods
    params: Any = None
    if len(methods) > 1:
        params = ParamSchema([ParamSpec(name="method", dtype="string", default=methods[0])])
    return ModelSignature(inputs=inputs, outputs=Schema(by_name) if by_name else None, params=params)


def _inputs(signature: Signature) -> Schema | None:
    specs = signature.inputs
    if signature.columns is not None:
        # Not float: MLflow rejects doubles, which every table has, for a signature of floats.
        kind = AnyType() if specs[0].dtype in (None, "object") else "double"
        return Schema([ColSpec(type=kind, name=name) for name in signature.columns])
    if not all(spec.dtype and spec.shape for spec in specs):
        return None
    return Schema(
        [
            _tensor(spec.dtype or "object", spec.shape or (), spec.name if len(specs) > 1 else None)
            for spec in specs
        ]
    )


def _tensor(dtype: Any, shape: Sequence[int | None], name: str | None) -> MlflowTensor:
    return MlflowTensor(np.dtype(dtype), (-1, *(-1 if size is None else size for size in shape[1:])), name)


def _example_outputs(predictor: Predictor) -> dict[str, Array]:
    """The outputs for one row, where one can be made up."""
    row = example(predictor.signature)
    try:
        return {} if row is None else predictor.call(row, "predict")
    except Exception:  # noqa: BLE001  the row may be nothing to this model; then its outputs stay unsaid
        return {}
