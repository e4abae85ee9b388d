"""Stored models and scripts as something to call: each verb is a task.

Who sends the tasks, and when, is for whoever made the proxy: the runtime at once, a flow later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kindler.runtime.handles import Handle
from kindler.runtime.settings import TaskSettings

__all__ = ["Call", "RuntimeModel", "RuntimeScript"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What was called.

    Attributes:
        shelf: "models" or "scripts".
        name: Which.
        verb: The method.
        args: Its positional arguments.
        options: Its other arguments.
        settings: How it is to be run.
    """

    shelf: str
    name: str
    verb: str
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: TaskSettings = field(default_factory=TaskSettings)

    def __str__(self) -> str:
        return f"{self.verb}() of {self.name!r}"


Sender = Callable[[Call], Handle]


class _Proxy:
    shelf: str

    def __init__(self, name: str, send: Sender, settings: TaskSettings) -> None:
        self.name = name
        self._send = send
        self._settings = settings

    def __repr__(self) -> str:
        return f"<{self.shelf.removesuffix('s')} {self.name!r} of the runtime>"

    def _called(self, verb: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Handle:
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
    """A stored model whose verbs run elsewhere.

    Data is an array, a table, a list or a dict, which travels to the worker; or the name of a dataset,
    which the worker reads. `"iris[width]"` is a column of one, `"iris[^kind]"` all but one. Other arguments
    are those of the model's own method.
    """

    shelf = "models"

    def require(self, label: str | None) -> RuntimeModel:
        """The same on workers with this label; None is any worker."""
        return RuntimeModel(self.name, self._send, replace(self._settings, label=label or "default"))

    def predict(self, data: Any, **options: Any) -> Handle:
        """The model's outputs for each row."""
        return self._called("predict", (data,), options)

    def predict_proba(self, data: Any, **options: Any) -> Handle:
        """The probability of each class for each row, by scikit-learn models."""
        return self._called("predict_proba", (data,), options)

    def decision_function(self, data: Any, **options: Any) -> Handle:
        """The distance of each row to each class, by scikit-learn models."""
        return self._called("decision_function", (data,), options)

    def transform(self, data: Any, **options: Any) -> Handle:
        """The data as a transformer gives it."""
        return self._called("transform", (data,), options)

    def score(self, data: Any, labels: Any = None, **options: Any) -> Handle:
        """How good the model is: its own score, or loss and metrics by name."""
        return self._called("score", (data, labels), options)

    def fit(self, data: Any, labels: Any = None, **options: Any) -> Handle:
        """Train the model, and publish it as its next version, which is the result.

        Args:
            data: What to learn from.
            labels: The labels, if they are not in the data.
            **options: For Keras and PyTorch models and estimators those of `Estimator.fit`, and of
                `from_keras` or `from_torch`: `epochs`, `batch_size`, `workers`, `engine`. A PyTorch model
                needs `optimizer` and `loss`, by the names of PyTorch's classes, and may have `lr`. With
                `engine="spark"`, datasets are read by Spark, and `spark={...}` are the arguments of
                `kindler.init`. For scikit-learn those of its own `fit`.
        """
        return self._called("fit", (data, labels), options)

    def partial_fit(self, data: Any, labels: Any = None, **options: Any) -> Handle:
        """Train the model on with these rows; the same as `fit` for those that always go on from there."""
        return self._called("partial_fit", (data, labels), options)


class RuntimeScript(_Proxy):
    """A stored function that runs elsewhere. It is code, so the runtime must be one with `trusted=True`."""

    shelf = "scripts"

    def require(self, label: str | None) -> RuntimeScript:
        """The same on workers with this label; None is any worker."""
        return RuntimeScript(self.name, self._send, replace(self._settings, label=label or "default"))

    def run(self, *args: Any, **options: Any) -> Handle:
        """Call the function."""
        return self._called("run", args, options)
