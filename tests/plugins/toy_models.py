"""A model kind of another package: a weighted sum of columns, stored as a .npy file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kindler.models.kind import ModelKind
from kindler.models.predictor import Predictor
from kindler.models.signature import Arrays, Signature, TensorSpec


class WeightedSum:
    def __init__(self, weights: Any) -> None:
        self.weights = np.asarray(weights, "float64")

    def __call__(self, x: Any) -> Any:
        return x @ self.weights


class ToyKind(ModelKind):
    kind = "toy"

    def can(self, obj: Any) -> bool:
        return isinstance(obj, WeightedSum)

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        np.save(folder / "weights.npy", obj.weights)
        return {}

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        return WeightedSum(np.load(folder / "weights.npy", allow_pickle=False))

    def predictor(self, model: Any) -> Predictor:
        return ToyPredictor(model)

    def gpu_problem(self, meta: Mapping[str, Any]) -> str | None:
        """Stands in for a framework that finds a GPU wherever one is visible."""
        return None if os.environ.get("CUDA_VISIBLE_DEVICES") else "nothing is visible."

    def device_bytes(self, meta: Mapping[str, Any]) -> int:
        """Tells which GPU this process sees."""
        return 1000 + int(os.environ["CUDA_VISIBLE_DEVICES"]) if self.device == "cuda" else 0


class ToyPredictor(Predictor):
    def __init__(self, model: WeightedSum) -> None:
        self._model = model
        self.signature = Signature((TensorSpec("x", "float64", (None, len(model.weights))),))

    def call(self, inputs: Arrays, method: str) -> Arrays:
        return {"sum": self._model(inputs["x"])}
