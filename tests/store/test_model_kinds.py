"""The contract of a model kind, for the kinds whose tests need neither PyTorch nor Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from sklearn.neighbors import KNeighborsRegressor

from kindler.testing.models import ModelKindContract
from tests.store.test_runtimes import EXPECTED, X, onnx_model, openvino_model


class _Numbers:
    @pytest.fixture
    def rows(self) -> Any:
        return X

    @pytest.fixture
    def expected(self) -> Any:
        return EXPECTED


class TestOnnx(_Numbers, ModelKindContract):
    kind = "onnx"

    @pytest.fixture
    def model(self) -> Any:
        return onnx_model()

    @pytest.fixture
    def refused(self) -> Any:
        model = onnx_model()
        model.graph.node[1].domain = "of.others"
        return model


class TestOpenvino(_Numbers, ModelKindContract):
    kind = "openvino"

    @pytest.fixture
    def model(self) -> Any:
        return openvino_model()


class TestSklearn(ModelKindContract):
    kind = "sklearn"

    @pytest.fixture
    def model(self) -> Any:
        return LinearRegression(fit_intercept=False).fit(X, X @ [1.0, 2.0, 3.0])

    @pytest.fixture
    def rows(self) -> Any:
        return X.astype("float64")

    @pytest.fixture
    def expected(self) -> Any:
        return X @ [1.0, 2.0, 3.0]

    @pytest.fixture
    def refused(self) -> Any:
        return KNeighborsRegressor(1, algorithm="kd_tree").fit(X, X[:, 0])


class TestFunction(_Numbers, ModelKindContract):
    kind = "function"

    @pytest.fixture
    def model(self) -> Any:
        def relu_layer(x, verb="predict"):  # type: ignore[no-untyped-def]
            import numpy

            weights = numpy.arange(6, dtype="float32").reshape(3, 2) - 2
            return numpy.maximum(x @ weights, 0)

        return relu_layer


class Layer:
    """An object that can only be pickled."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def predict(self, x: Any) -> Any:
        return np.maximum(x @ self.weights, 0)


class TestPickle(_Numbers, ModelKindContract):
    kind = "pickle"

    @pytest.fixture
    def model(self) -> Any:
        return Layer(np.arange(6, dtype="float32").reshape(3, 2) - 2)
