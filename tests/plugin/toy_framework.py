"""A framework from outside: linear regression in numpy, trained by gradient descent with momentum."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kindler import current_worker
from kindler.collective import Array, Gradients
from kindler.errors import ConfigError
from kindler.frameworks.base import BaseReplica
from kindler.frameworks.contract import Batch, Facts, Variables
from kindler.frameworks.registry import FrameworkSpec

ROW = FrameworkSpec(name="toy", target="toy_framework:ToyReplica")


class Plane:
    """The user's model: outputs are `x @ weights + bias`."""

    def __init__(self, width: int) -> None:
        self.weights, self.bias = np.zeros((width, 1)), np.zeros(1)

    def __call__(self, x: Array) -> Array:
        return x @ self.weights + self.bias


class Fragile(Plane):
    """A plane whose fifth call ends the process of worker 1, unless a file says that it has done so."""

    def __init__(self, width: int, file: str) -> None:
        super().__init__(width)
        self.calls, self.file = 0, Path(file)

    def __call__(self, x: Array) -> Array:
        self.calls += 1
        if self.calls == 5 and current_worker().rank == 1 and not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(x)


class ToyReplica(BaseReplica):
    """One rank's copy of a `Plane`."""

    def __init__(self, spec: dict[str, Any], **options: Any) -> None:
        super().__init__(spec, **options)
        self.model: Plane = spec["model"]
        self.rate, self.momentum = spec["lr"], spec["momentum"]
        self.speeds = [np.zeros_like(self.model.weights), np.zeros_like(self.model.bias)]

    @classmethod
    def make_spec(cls, **options: Any) -> dict[str, Any]:
        if unknown := set(options) - {"model", "lr", "momentum"}:
            raise ConfigError(f"a toy model takes model, lr and momentum; received {sorted(unknown)}.")
        return {"lr": 0.1, "momentum": 0.0, **options}

    @classmethod
    def facts(cls, spec: dict[str, Any]) -> Facts:
        return Facts(has_instance=True)

    def variables(self, *groups: str) -> Variables:
        speeds = dict(zip(("speed of weights", "speed of bias"), self.speeds, strict=True))
        parameters = {"weights": self.model.weights.copy(), "bias": self.model.bias.copy()}
        return {"parameters": parameters, "optimizer": speeds}

    def assign(self, variables: Mapping[str, Mapping[str, Array]]) -> None:
        if parameters := variables.get("parameters"):
            self.model.weights, self.model.bias = (
                np.array(array, np.float64) for array in parameters.values()
            )
        if speeds := variables.get("optimizer"):
            self.speeds = [np.array(array) for array in speeds.values()]

    def gradients(self, batch: Batch) -> Gradients:
        x, errors = self._judged(batch) if batch.rows else (np.zeros((0, 0)), np.zeros(0))
        self.before_exchange()
        if not batch.rows:
            return Gradients([np.zeros_like(array) for array in self.read()], 0.0)
        return Gradients([2 * x.T @ errors / len(x), 2 * errors.mean(axis=0)], float(len(x)))

    def apply(self, gradients: Sequence[Array]) -> None:
        pairs = zip(self.speeds, gradients, strict=True)
        self.speeds = [self.momentum * speed + gradient for speed, gradient in pairs]
        moved = zip(self.read(), self.speeds, strict=True)
        self.write([array - self.rate * speed for array, speed in moved])
        self.step += 1

    @property
    def regroups(self) -> bool:
        return True

    def snapshot(self) -> bytes:
        return self.local_state()

    def restore(self, snapshot: bytes) -> None:
        self.load_local_state(snapshot)

    def eval_step(self, batch: Batch) -> None:
        if batch.rows:
            self._judged(batch)

    def predict(self, features: tuple[Array, ...]) -> list[Array]:
        return [self.model(features[0].astype(np.float64))]

    def learning_rate(self) -> float:
        return float(self.rate)

    def _judged(self, batch: Batch) -> tuple[Array, Array]:
        x = batch.features[0].astype(np.float64)
        errors = self.model(x) - batch.labels[0].reshape(-1, 1)
        self.count(len(x), loss=float(np.square(errors).mean()), mae=float(np.abs(errors).mean()))
        return x, errors
