"""A stored model as an MLflow model: a folder that `mlflow.pyfunc.load_model` and `mlflow models serve` take.

All kinds are written alike: the archive that the store exports, and `kindler.tracking.loader` to load it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import mlflow.pyfunc
from mlflow.models import Model

from kindler.errors import AlreadyExistsError
from kindler.models.loaded import load
from kindler.store import Store, Version, archive
from kindler.tracking.signature import signature_of

_LOADER = "kindler.tracking.loader"


def write(
    store: Store, version: Version, path: str | os.PathLike[str], *, trusted: bool = False, **fields: Any
) -> Path:
    """Write a version to a folder as an MLflow model.

    The model is loaded once, so that its signature is what it says itself.

    Args:
        store: Where it is.
        version: Which.
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
    loaded = load(store, version, trusted=trusted)
    packages = loaded.kind.requirements(version.meta)
    with tempfile.TemporaryDirectory(prefix="kindler-mlflow-") as scratch:
        packed = Path(scratch) / "model.zip"
        archive.write(store, version, packed)
        with warnings.catch_warnings():
            # MLflow wants an example to find the signature by; the model has told it.
            warnings.filterwarnings("ignore", r".*An input example was not provided", UserWarning)
            mlflow.pyfunc.save_model(
                str(folder),
                loader_module=_LOADER,
                data_path=str(packed),
                mlflow_model=Model(**fields),
                signature=signature_of(loaded.predictor),
                pip_requirements=requirements(packages),
                model_config=_config(packages),
                metadata={"kindler": {"name": version.name, "version": version.number, "kind": version.kind}},
            )
    return folder


def requirements(packages: Sequence[str]) -> list[str]:
    """What must be installed to load a model, as pip writes it, with the versions that are here."""
    wanted = ["kindler", "numpy", "pandas", "pyarrow", "orjson", *packages]
    return [f"{name}=={_version(name)}" for name in wanted if _version(name)]


def _config(packages: Sequence[str]) -> dict[str, Any]:
    """What whoever loads the model may change; MLflow takes nothing that is not here."""
    if "keras" not in packages:
        return {"trusted": False}
    # The backend that the model was just loaded with.
    return {"trusted": False, "keras_backend": str(sys.modules["keras"].backend.backend())}


def _version(package: str) -> str | None:
    """Without what says where a build is from: no index has `2.13.0+cpu` for others."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None
