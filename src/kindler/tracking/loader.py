"""What MLflow calls to load a model that `kindler.tracking.models` wrote.

`mlflow.pyfunc.load_model` and `mlflow models serve` find it by its name in the `MLmodel` file. The model is
the archive that the store exports: its files are checked against their hashes, and no code in them is run
unless the caller says `model_config={"trusted": True}`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kindler.models.loaded import load_files
from kindler.models.predictor import Predictor
from kindler.store import archive


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> PyfuncModel:
    with tempfile.TemporaryDirectory(prefix="kindler-mlflow-") as scratch:
        folder = Path(scratch)
        version = archive.extract(Path(path), folder)
        config = dict(model_config or {})
        if config.get("keras_backend") and "keras" not in sys.modules:
            os.environ.setdefault("KERAS_BACKEND", str(config["keras_backend"]))
        loaded = load_files(version.kind, folder, version.meta, trusted=config.get("trusted") is True)
        return PyfuncModel(loaded.predictor)


class PyfuncModel:
    """A model as MLflow calls it."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """One array, or several by name; `params={"method": "predict_proba"}` calls another method."""
        return self._predictor(data, method=str((params or {}).get("method", "predict")))
