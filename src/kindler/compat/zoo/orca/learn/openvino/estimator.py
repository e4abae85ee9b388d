"""`zoo.orca.learn.openvino.Estimator`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kindler.compat.zoo.orca.errors import InvalidInput, as_orca
from kindler.data.arrays import is_spark_frame
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
        """The outputs: for arrays as arrays, for a DataFrame or shards with them, as `prediction`.

        Args:
            data: An array or a list of arrays, an `XShards` of {"x": ...}, or a Spark DataFrame.
            feature_cols: Columns of a DataFrame.
            batch_size: Rows per call of the model; any number works, the remainder included.
            input_cols: For a DataFrame: names of the model's inputs, in the order of `feature_cols`.
            config: Properties of OpenVINO to compile the model with.

        Returns:
            Arrays for arrays, several outputs as a list; a DataFrame with columns of outputs for a
            DataFrame; shards of {"x": ..., "prediction": ...} for shards, several outputs as a list there.
        """
        made = self._made if config is None else CoreEstimator.from_openvino(self._path, config=config)
        if input_cols is not None:
            return _by_input(made, data, _several(feature_cols), _several(input_cols), batch_size)
        columns = {} if feature_cols is None else {"feature_cols": feature_cols}
        found = made.predict(data, batch_size=batch_size, **columns)
        if hasattr(data, "transform_shard") and isinstance(first := data.first(), dict):
            return found.transform_shard(_Predicted(tuple(first)))
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


class _Predicted:
    """Outputs of a shard as its `prediction`: an array, or a list of them."""

    def __init__(self, given: tuple[str, ...]) -> None:
        self.given = given

    def __call__(self, shard: Any) -> Any:
        outputs = [value for name, value in shard.items() if name not in self.given]
        rest = {name: shard[name] for name in self.given}
        return {**rest, "prediction": outputs[0] if len(outputs) == 1 else outputs}


def _by_input(made: Any, data: Any, columns: list[str], inputs: list[str], batch_size: int) -> Any:
    """Score columns under the names of the inputs that they are for."""
    if not is_spark_frame(data) or len(columns) != len(inputs):
        raise InvalidInput(
            f"input_cols={inputs} needs a DataFrame and as many feature_cols; received {columns} and"
            f" {type(data).__qualname__}."
        )
    taken = [
        name for name, column in zip(inputs, columns, strict=True) if name in data.columns and name != column
    ]
    if taken:
        raise InvalidInput(f"input_cols: the DataFrame has another column {taken[0]!r}.\nHint: rename it.")
    new = {name: column for name, column in zip(inputs, columns, strict=True) if name != column}
    named = data.selectExpr("*", *(f"`{column}` as `{name}`" for name, column in new.items()))
    return made.predict(named, batch_size=batch_size, feature_cols=inputs).drop(*new)


def _several(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())
