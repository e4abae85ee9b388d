"""Proxies of stored models and scripts: each method call becomes a task.

The runtime sends tasks at once, a task group when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kindler.runtime.handles import TaskHandle
from kindler.runtime.settings import TaskSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A method call on a proxy.

    Attributes:
        shelf: "models" or "scripts".
        name: The name of the model or script.
        verb: The method.
        args: Its positional arguments.
        options: Its keyword arguments.
        settings: How to run it.
    """

    shelf: str
    name: str
    verb: str
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: TaskSettings = field(default_factory=TaskSettings)

    def __str__(self) -> str:
        return f"{self.verb}() of {self.name!r}"


Sender = Callable[[Call], TaskHandle]


class _Proxy:
    shelf: str

    def __init__(self, name: str, send: Sender, settings: TaskSettings) -> None:
        self.name = name
        self._send = send
        self._settings = settings

    def __repr__(self) -> str:
        return f"<{self.shelf.removesuffix('s')} {self.name!r} of the runtime>"

    def _called(self, verb: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> TaskHandle:
        return self._send(
            Call(
                shelf=self.shelf,
                name=self.name,
                verb=verb,
                args=args,
                options=options,
                settings=self._settings,
            )
        )


class RuntimeModel(_Proxy):
    """A stored model whose methods run on a worker.

    Data is an array, a table, a list or a dict, which is sent to the worker; or the name of a dataset,
    which the worker reads. `"iris[width]"` selects a column of it, `"iris[^kind]"` all columns but one.
    Other arguments are passed to the model's own method.
    """

    shelf = "models"

    def require(self, label: str | None) -> RuntimeModel:
        """The same, on workers with this label; None means any worker."""
        return RuntimeModel(self.name, self._send, replace(self._settings, label=label or "default"))

    def predict(self, data: Any, **options: Any) -> TaskHandle:
        """Compute the model's outputs for each row."""
        return self._called("predict", (data,), options)

    def predict_proba(self, data: Any, **options: Any) -> TaskHandle:
        """Compute the probability of each class for each row; scikit-learn models only."""
        return self._called("predict_proba", (data,), options)

    def decision_function(self, data: Any, **options: Any) -> TaskHandle:
        """Compute the decision function of each row; scikit-learn models only."""
        return self._called("decision_function", (data,), options)

    def transform(self, data: Any, **options: Any) -> TaskHandle:
        """Transform the data; scikit-learn transformers only."""
        return self._called("transform", (data,), options)

    def score(self, data: Any, labels: Any = None, **options: Any) -> TaskHandle:
        """Evaluate the model: its own score, or a dict of loss and metrics."""
        return self._called("score", (data, labels), options)

    def fit(self, data: Any, labels: Any = None, **options: Any) -> TaskHandle:
        """Train the model and store it as its next version, which is the result.

        Args:
            data: The training data.
            labels: The labels, if they are not in the data.
            **options: For Keras and PyTorch models and estimators, the arguments of `Estimator.fit` and of
                `from_keras` or `from_torch`: `epochs`, `batch_size`, `workers`, `engine`. A PyTorch model
                needs `optimizer` and `loss`, by the names of PyTorch's classes, and takes `lr`. With
                `engine="spark"` Spark reads the datasets, and `spark={...}` are the arguments of
                `kindler.init`. For scikit-learn, the arguments of the model's own `fit`.
        """
        return self._called("fit", (data, labels), options)

    def reduce(self, results: Any = None, **options: Any) -> TaskHandle:
        """Combine a list of results; stored functions only. A `mapreduce` gives the list itself."""
        return self._called("reduce", (results,), options)

    def partial_fit(self, data: Any, labels: Any = None, **options: Any) -> TaskHandle:
        """Continue training with these rows; the same as `fit` for models whose `fit` always continues."""
        return self._called("partial_fit", (data, labels), options)


class RuntimeScript(_Proxy):
    """A stored function that runs on a worker. Requires a runtime with `trusted=True`, as it is code."""

    shelf = "scripts"

    def require(self, label: str | None) -> RuntimeScript:
        """The same, on workers with this label; None means any worker."""
        return RuntimeScript(self.name, self._send, replace(self._settings, label=label or "default"))

    def run(self, *args: Any, **options: Any) -> TaskHandle:
        """Call the function."""
        return self._called("run", args, options)
