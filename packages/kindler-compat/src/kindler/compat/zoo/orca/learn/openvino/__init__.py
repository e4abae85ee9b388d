"""`zoo.orca.learn.openvino`: scores with models of OpenVINO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kindler.compat.flat import FlatEstimator as CoreEstimator
from kindler.compat.zoo.orca import InvalidInputError
from kindler.compat.zoo.orca.learn.base import OrcaEstimator

__all__ = ["Estimator", "OpenvinoEstimator"]


def _not_implemented(method: str, why: str) -> Any:
    def method_(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise InvalidInputError(f"{method}: not implemented: {why}.")

    return method_


class Estimator(OrcaEstimator):
    """Made by `from_openvino`, of a model's .xml file, with the .bin file beside it."""

    def __init__(self, model_path: str) -> None:
        self._path = model_path
        self._core = CoreEstimator.from_openvino(model_path)

    @staticmethod
    def from_openvino(*, model_path: str) -> Estimator:
        return Estimator(model_path)

    def predict(
        self,
        data: Any,
        feature_cols: Any = None,
        batch_size: int = 4,
        input_cols: Any = None,
        config: Mapping[str, Any] | None = None,
    ) -> Any:
        """The outputs: for arrays as arrays, for a DataFrame as columns of it, for shards as `prediction`.

        Several outputs of arrays or shards are a list. `input_cols` names the model's inputs, in the order of
        `feature_cols` or of the arrays; `config` has properties of OpenVINO to compile the model with.
        """
        made = self._core if config is None else CoreEstimator.from_openvino(self._path, config=config)
        if input_cols is not None:
            data, feature_cols = _by_input(self._path, input_cols, data, feature_cols)
        columns = {} if feature_cols is None else {"feature_cols": feature_cols}
        found = made.predict(data, batch_size=batch_size, **columns)
        if hasattr(data, "transform_shard") and isinstance(first := data.first(), dict):
            return found.transform_shard(_Predicted(tuple(first)))
        return found

    fit = _not_implemented("fit", "an OpenVINO model cannot be trained")
    evaluate = _not_implemented("evaluate", "an OpenVINO model has no loss to evaluate")
    get_model = _not_implemented("get_model", "an OpenVINO model is in its own files")
    save = _not_implemented("save", "the model is in its own files")

    def load(self, model_path: str) -> None:
        self._path, self._core = model_path, CoreEstimator.from_openvino(model_path)


OpenvinoEstimator = Estimator


@dataclass(frozen=True)
class _Predicted:
    """Outputs of a shard as its `prediction`: an array, or a list of them."""

    given: tuple[str, ...]

    def __call__(self, shard: Any) -> Any:
        outputs = [value for name, value in shard.items() if name not in self.given]
        rest = {name: shard[name] for name in self.given}
        return {**rest, "prediction": outputs[0] if len(outputs) == 1 else outputs}


def _by_input(path: str, inputs: Any, data: Any, feature_cols: Any) -> tuple[Any, Any]:
    """Data, or its columns, in the order of the model's inputs."""
    from kindler.frameworks.openvino.graph import names_of, read_file

    given, names = _several(inputs), names_of(read_file(Path(path)).inputs, "input")
    if sorted(given) != sorted(names):
        raise InvalidInputError(f"input_cols={given}: the model has the inputs {names}.")
    order = [given.index(name) for name in names]
    if hasattr(data, "transform_shard"):
        return data.transform_shard(
            lambda shard: {**shard, "x": [shard["x"][place] for place in order]}
        ), feature_cols
    columns = data if feature_cols is None else _several(feature_cols)
    if not isinstance(columns, list | tuple) or len(columns) != len(order):
        raise InvalidInputError(f"input_cols={given} needs as many arrays or feature_cols.")
    arranged = [columns[place] for place in order]
    if feature_cols is None:
        return arranged, None
    for name, column in zip(names, arranged, strict=True):
        if column in names and column != name:  # columns with names of inputs go to those
            raise InvalidInputError(f"column {column!r} has the name of another input.\nHint: rename it.")
    return data, arranged


def _several(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
