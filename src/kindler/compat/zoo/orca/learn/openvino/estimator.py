"""`zoo.orca.learn.openvino.Estimator`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kindler.compat.zoo.orca.errors import InvalidInput, as_orca
from kindler.estimator.estimator import Estimator as CoreEstimator

__all__ = ["Estimator", "OpenvinoEstimator"]


class Estimator:
    """Creates estimators of OpenVINO's models."""

    @staticmethod
    @as_orca
    def from_openvino(*, model_path: str) -> OpenvinoEstimator:
        """Create an estimator from a model of OpenVINO.

        Args:
            model_path: The .xml file; the .bin file is beside it.
        """
        return OpenvinoEstimator(model_path)


class OpenvinoEstimator:
    """Scores with a model of OpenVINO; it cannot be trained."""

    def __init__(self, model_path: str) -> None:
        self._path = model_path
        self._made = CoreEstimator.from_openvino(model_path)

    @as_orca
    def predict(
        self,
        data: Any,
        feature_cols: Any = None,
        batch_size: int = 4,
        input_cols: Any = None,
        config: Mapping[str, Any] | None = None,
    ) -> Any:
        """The outputs for arrays as arrays, for shards as shards of arrays, for a DataFrame as columns.

        Args:
            data: An array or a list of arrays, an `XShards` of {"x": ...}, or a Spark DataFrame.
            feature_cols: Columns of a DataFrame.
            batch_size: Rows per call of the model; any number works, the remainder included.
            input_cols: Names of the model's inputs, in the order of `feature_cols`.
            config: Properties of OpenVINO to compile the model with.
        """
        made = self._made if config is None else CoreEstimator.from_openvino(self._path, config=config)
        columns = {} if feature_cols is None else {"feature_cols": feature_cols}
        found = made.predict(data, batch_size=batch_size, **columns)
        if hasattr(data, "transform_shard"):
            return found.transform_shard(_outputs)
        return found

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Not possible."""
        raise InvalidInput("a model of OpenVINO cannot be trained: not implemented.")

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Not possible."""
        raise InvalidInput("a model of OpenVINO has no loss to evaluate: not implemented.")

    def get_model(self) -> Any:
        """Not possible."""
        raise InvalidInput("get_model: not implemented for models of OpenVINO.")

    def save(self, model_path: str) -> None:
        """Not possible."""
        raise InvalidInput("save: not implemented; the model is in its own files.")

    def load(self, model_path: str) -> None:
        """Go on with another model."""
        self._path, self._made = model_path, CoreEstimator.from_openvino(model_path)


def _outputs(shard: Any) -> Any:
    """What the model added to a shard of {"x": ...}: an array, or a list of them."""
    found = [value for name, value in shard.items() if name not in ("x", "y")]
    return found[0] if len(found) == 1 else found
