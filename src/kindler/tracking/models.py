"""A stored model as an MLflow model: a folder that `mlflow.pyfunc.load_model` and `mlflow models serve` take.

All kinds are written alike: the archive that the store exports, and `kindler.tracking.loader` to load it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import mlflow.pyfunc
from mlflow.models import Model

from kindler.errors import AlreadyExistsError
from kindler.serve.servables import load
from kindler.shelves.models import Models
from kindler.store import Version
from kindler.tracking.signature import signature_of

__all__ = ["requirements", "write"]

_LOADER = "kindler.tracking.loader"
# What a kind is read with, besides Kindler itself.
_PACKAGES = {
    "keras": ("keras",),
    "tf_keras": ("tf_keras", "tensorflow"),
    "torch": ("torch", "safetensors"),
    "sklearn": ("scikit-learn", "skops"),
    "savedmodel": ("tensorflow",),
    "onnx": ("onnxruntime",),
    "openvino": ("openvino",),
}


def write(
    models: Models, name: str, path: str | os.PathLike[str], *, trusted: bool = False, **fields: Any
) -> Path:
    """Write a version to a folder as an MLflow model.

    The model is loaded once, so that its signature is what it says itself.

    Args:
        models: Where it is.
        name: Its name, which may say which version.
        path: The folder, which must not be there.
        trusted: Allow what runs code when it is loaded; who loads the folder must too.
        **fields: Fields of the `MLmodel` file, such as `run_id`.

    Returns:
        The folder.

    Raises:
        AlreadyExistsError: The folder is there.
        UntrustedError: Loading the model could run code, and `trusted` was not given.
    """
    folder = Path(path)
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise AlreadyExistsError(f"{str(folder)!r} is there already.", name=str(folder))
    version = models.metadata(name)
    signature = signature_of(load(models, version, trusted=trusted))
    with tempfile.TemporaryDirectory(prefix="kindler-mlflow-") as scratch:
        archive = models.export(str(version), Path(scratch) / "model.zip")
        with warnings.catch_warnings():
            # MLflow wants an example to find the signature by; the model has told it.
            warnings.filterwarnings("ignore", r".*An input example was not provided", UserWarning)
            mlflow.pyfunc.save_model(
                str(folder),
                loader_module=_LOADER,
                data_path=str(archive),
                mlflow_model=Model(**fields),
                signature=signature,
                pip_requirements=requirements(version),
                model_config=_config(version),
                metadata={"kindler": {"name": version.name, "version": version.number, "kind": version.kind}},
            )
    return folder


def requirements(version: Version) -> list[str]:
    """What must be installed to load a version, as pip writes it, with the versions that are here."""
    kind = str(version.meta.get("model_kind", version.kind))
    wanted = ["kindler", "numpy", "pandas", "pyarrow", "orjson", *_PACKAGES.get(kind, ())]
    if kind == "keras":
        wanted.append(_keras_backend())
    return [f"{name}=={_version(name)}" for name in wanted if _version(name)]


def _config(version: Version) -> dict[str, Any]:
    """What whoever loads the model may change; MLflow takes nothing that is not here."""
    is_keras = version.meta.get("model_kind", version.kind) == "keras"
    return {"trusted": False} | ({"keras_backend": _keras_backend()} if is_keras else {})


def _keras_backend() -> str:
    """The one that the model was just loaded with."""
    return str(sys.modules["keras"].backend.backend())


def _version(package: str) -> str | None:
    """Without what says where a build is from: no index has `2.13.0+cpu` for others."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None
