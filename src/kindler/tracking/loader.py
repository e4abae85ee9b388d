"""What MLflow calls to load a model that `kindler.tracking.models` wrote.

`mlflow.pyfunc.load_model` and `mlflow models serve` find it by its name in the `MLmodel` file. The model is
the archive that the store exports: its files are checked against their hashes, and no code in them is run
unless the caller says `model_config={"trusted": True}`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kindler.errors import ConfigError, DataError
from kindler.serve.http_errors import Problem
from kindler.serve.protocols.tables import table_columns
from kindler.serve.servables import Servable, load_files
from kindler.serve.signature import Array, fit, from_columns
from kindler.store import archive

__all__ = ["PyfuncModel"]


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> PyfuncModel:
    """The model in an archive; MLflow's name for what loads one."""
    with archive.reading(_Scratch(), Path(path)) as (told, folder):
        config = dict(model_config or {})
        if config.get("keras_backend") and "keras" not in sys.modules:
            os.environ.setdefault("KERAS_BACKEND", str(config["keras_backend"]))
        return PyfuncModel(load_files(told.kind, folder, told.meta, trusted=config.get("trusted") is True))


class PyfuncModel:
    """A model as MLflow calls it."""

    def __init__(self, servable: Servable) -> None:
        self._servable = servable

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """One array, or several by name.

        Args:
            data: A pandas DataFrame, an array, a list, or arrays by name.
            params: `{"method": "predict_proba"}` calls another method than `predict`, if the model has it.

        Raises:
            DataError: The model does not take that.
        """
        method = str((params or {}).get("method", "predict"))
        if method not in self._servable.methods:
            raise ConfigError(f"there is no {method!r}; there are {', '.join(self._servable.methods)}.")
        try:
            outputs = self._servable.call(self._inputs(data), method)
        except Problem as exc:
            raise DataError(exc.message) from exc
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def _inputs(self, data: Any) -> dict[str, Array]:
        signature = self._servable.signature
        if hasattr(data, "to_frame"):
            data = data.to_frame()
        if hasattr(data, "columns"):
            frame = data.rename(columns=str)
            columns = table_columns(pa.Table.from_pandas(frame, preserve_index=False))
            return fit(signature, from_columns(signature, columns))
        if isinstance(data, Mapping):
            given = {str(name): np.asarray(value) for name, value in data.items()}
            return fit(signature, given)
        return fit(signature, {"": np.asarray(data)})


class _Scratch:
    @contextmanager
    def stage(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="kindler-mlflow-") as folder:
            yield Path(folder)
