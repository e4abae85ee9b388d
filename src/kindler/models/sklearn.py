"""scikit-learn estimators, by skops: types that are not known to be harmless are refused.

A type is harmless if a file that lies about its fields gets wrong numbers, and no more. Trees and neighbours
are not: their compiled code follows what the file says without looking.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kindler.errors import MissingExtraError
from kindler.models.kind import require_trust
from kindler.models.own_methods import OwnMethods
from kindler.models.predictor import Predictor
from kindler.models.sklearn_predictor import SklearnPredictor

__all__ = ["SklearnKind"]

_FILE = "model.skops"
# Beside what skops knows by itself: plain Python with numbers in it, and pure functions.
_HARMLESS = frozenset(
    {
        "numpy.dtype",
        "numpy.mean",
        "sklearn._loss.loss.HalfTweedieLossIdentity",
        "sklearn.calibration._CalibratedClassifier",
        "sklearn.calibration._SigmoidCalibration",
        "sklearn.feature_selection._univariate_selection.f_classif",
        "sklearn.feature_selection._univariate_selection.f_regression",
        "sklearn.gaussian_process._gpc._BinaryGaussianProcessClassifierLaplace",
        "sklearn.gaussian_process.kernels.ConstantKernel",
        "sklearn.gaussian_process.kernels.Product",
        "sklearn.gaussian_process.kernels.RBF",
        "sklearn.gaussian_process.kernels.Sum",
        "sklearn.gaussian_process.kernels.WhiteKernel",
        "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
        "sklearn.neural_network._stochastic_optimizers.SGDOptimizer",
    }
)


class SklearnKind(OwnMethods):
    """Estimators and pipelines."""

    kind: ClassVar[str] = "sklearn"
    packages: ClassVar[tuple[str, ...]] = ("scikit-learn", "skops")

    def can(self, obj: Any) -> bool:
        """See `Handler`."""
        return any(
            cls.__name__ == "BaseEstimator" and cls.__module__.startswith("sklearn.")
            for cls in type(obj).__mro__
        )

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        """See `Handler`."""
        _skops().dump(obj, folder / _FILE)
        _unknown(folder / _FILE, trusted=trusted)
        return {}

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        """See `Handler`."""
        path = folder / _FILE
        # What is trusted is for the caller to say, and never for the file.
        return _skops().load(path, trusted=_unknown(path, trusted=trusted))

    def predictor(self, model: Any) -> Predictor:
        """See `ModelKind`."""
        return SklearnPredictor(model)


def _unknown(path: Path, *, trusted: bool) -> list[str]:
    found = set(_skops().get_untrusted_types(file=path))
    if strange := sorted(found - _HARMLESS):
        shown = ", ".join(strange[:5])
        require_trust(trusted, what="the scikit-learn model", reason=f"it has objects of {shown}")
    return sorted(found)


def _skops() -> Any:
    """Found when it is needed: that an object is no model of scikit-learn's can be said without it."""
    try:
        return importlib.import_module("skops.io")
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "skops":
            raise
        raise MissingExtraError(what="a scikit-learn model", package="skops", extra="sklearn") from exc
