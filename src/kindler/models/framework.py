"""Models of the frameworks that `Estimator` trains: Keras and PyTorch, alone or in a stored estimator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from kindler.estimator.estimator import Estimator
from kindler.models.kind import ModelKind
from kindler.models.predictor import Predictor

# What an estimator is made with; the other options of a fit are arguments of `Estimator.fit`.
_MAKING = (
    "workers",
    "engine",
    "device",
    "seed",
    "model_dir",
    "log_dir",
    "metrics",
    "config",
    "keras_backend",
    "optimizer",
    "loss",
)


class FrameworkKind(ModelKind):
    """A kind whose models an estimator can hold and train.

    Attributes:
        to_predict: Options of `write` that leave out what only training needs.
    """

    to_predict: ClassVar[Mapping[str, Any]] = {}

    def estimator(self, **options: Any) -> Estimator:
        """Make an estimator of a model of this kind, by one of `Estimator`'s constructors."""
        raise NotImplementedError

    def named_predictor(self, model: Any, inputs: str, names: Sequence[str]) -> Predictor | None:
        """The model ready to predict, where an estimator calls it with inputs of these names."""
        return None

    def describe_training(self, estimator: Estimator) -> dict[str, Any] | None:
        """What trains an estimator's model, as JSON that is read without trust; None if there is more."""
        return None

    def training_options(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `estimator` that `describe_training` returned; they may come from anybody."""
        return {}

    def fit_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a fit, with objects for what is sent by name."""
        return options

    def train(
        self,
        read: Callable[..., Any],
        meta: Mapping[str, Any],
        verb: str,
        data: tuple[Any, ...],
        options: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        """The history of the fit becomes an attribute of the version."""
        estimator, history = fitted(
            lambda **making: self.estimator(model=read(), **making), data, self.fit_options(options)
        )
        return estimator.get_model(), {"history": list(history)}


def fitted(
    make: Callable[..., Estimator], data: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[Estimator, Any]:
    """Make an estimator with its share of the options and fit it. One process, unless more are asked for."""
    making = {"workers": 1, "engine": "local"}
    making |= {name: options[name] for name in _MAKING if name in options}
    rest = {name: value for name, value in options.items() if name not in making}
    estimator = make(**making)
    return estimator, estimator.fit(data[0] if len(data) == 1 else data, **{"verbose": 0, **rest})


def matrix(data: Any) -> Any:
    """Tables as matrices; anything else as it is."""
    module = type(data).__module__.partition(".")[0]
    if module == "pyarrow":
        data = data.to_pandas()
        module = "pandas"
    return data.to_numpy() if module == "pandas" else data
