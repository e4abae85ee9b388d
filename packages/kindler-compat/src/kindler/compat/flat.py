"""Estimators whose arguments are all in one place, as the old systems have them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from kindler import Estimator
from kindler.callbacks import TensorBoard
from kindler.estimator.groups import grouped

if TYPE_CHECKING:
    from typing_extensions import Self

    from kindler import History


class FlatEstimator(Estimator):
    """An `Estimator` that knows its folders, and takes the fields of groups as arguments."""

    _folder: Any = None
    _log_dir: Any = None

    @classmethod
    def from_torch(cls, model: Any = None, **options: Any) -> Self:
        return cls._with_folders(super().from_torch, options | {"model": model})

    @classmethod
    def from_keras(cls, model: Any = None, **options: Any) -> Self:
        return cls._with_folders(super().from_keras, options | {"model": model})

    @classmethod
    def from_framework(
        cls, framework: str, *, model_dir: Any = None, log_dir: Any = None, **options: Any
    ) -> Self:
        made = super().from_framework(framework, **options)
        made._folder, made._log_dir = model_dir, log_dir
        return made

    @classmethod
    def _with_folders(cls, make: Any, options: dict[str, Any]) -> Self:
        folders = {name: options.pop(name, None) for name in ("model_dir", "log_dir")}
        made: Self = make(**grouped(options))
        made._folder, made._log_dir = folders["model_dir"], folders["log_dir"]
        return made

    def fit(self, data: Any, *args: Any, **options: Any) -> History:
        given = inspect.signature(Estimator.fit).bind_partial(self, data, *args).arguments
        options |= {name: value for name, value in given.items() if name not in ("self", "data")}
        if self._folder is not None:
            options["model_dir"] = self._folder
        if self._log_dir is not None:
            options["callbacks"] = [*(options.get("callbacks") or ()), TensorBoard(self._log_dir)]
        return super().fit(data, **grouped(options))

    def evaluate(self, data: Any, *args: Any, **options: Any) -> dict[str, Any]:
        return super().evaluate(data, *args, **grouped(options))

    def predict(self, data: Any, *args: Any, **options: Any) -> Any:
        return super().predict(data, *args, **grouped(options))
