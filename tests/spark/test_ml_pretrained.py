"""Models that are trained already as stages: in memory, as files, and from a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import PipelineModel
from pyspark.ml.linalg import DenseVector, Vectors
from torch import nn

from kindler import Estimator, Store
from kindler.errors import ConfigError, DataError, UntrustedError
from kindler.ml import KindlerModel, PretrainedModel, pretrained

pytestmark = pytest.mark.spark

ROWS = [[0.0, 1.0], [2.0, 3.0], [-1.0, 0.5]]


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    rows = [(i, Vectors.dense(row), *row) for i, row in enumerate(ROWS)]
    return spark.createDataFrame(rows, ["id", "v", "a", "b"])


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    """x @ [[1, 2], [3, 4]]"""
    onnx: Any = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weights = helper.make_tensor("w", kind, [2, 2], [1.0, 2.0, 3.0, 4.0])
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", kind, [None, 2])],
        [helper.make_tensor_value_info("y", kind, [None, 2])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "product.onnx")
    return tmp_path / "product.onnx"


def test_an_onnx_file_scores_a_vector_column_and_columns_side_by_side(
    frame: Any, onnx_file: Path, tmp_path: Path
) -> None:
    expected = [DenseVector(row) for row in np.array(ROWS) @ [[1.0, 2.0], [3.0, 4.0]]]

    stage = pretrained(onnx_file, inputCol="v", predictionCol="p")
    beside = pretrained(str(onnx_file), inputCols=["a", "b"], predictionType="label")
    PipelineModel([stage]).write().overwrite().save(str(tmp_path / "saved"))
    again = PipelineModel.load(str(tmp_path / "saved"))

    assert isinstance(stage, PretrainedModel)
    assert [row.p for row in stage.transform(frame).collect()] == expected
    assert [row.prediction for row in beside.transform(frame).collect()] == [1.0, 1.0, 0.0]
    assert [row.p for row in again.transform(frame).collect()] == expected
    with pytest.raises(ConfigError, match="has the outputs \\['y'\\]"):
        stage.copy({stage.modelOutputs: ["z"]}).transform(frame)
    with pytest.raises(DataError, match="shape"):
        pretrained(onnx_file, inputCol="a").transform(frame)


def test_an_openvino_model_of_the_same_file_predicts_the_same(
    frame: Any, onnx_file: Path, tmp_path: Path
) -> None:
    openvino: Any = pytest.importorskip("openvino")
    openvino.save_model(openvino.convert_model(onnx_file), tmp_path / "product.xml", compress_to_fp16=False)

    rows = pretrained(tmp_path / "product.xml", inputCol="v").transform(frame).collect()
    np.testing.assert_allclose([row.prediction.toArray() for row in rows], np.array(ROWS) @ [[1, 2], [3, 4]])


def test_torch_modules_estimators_and_stored_models_become_stages(frame: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    expected = model(torch.tensor(ROWS)).detach().numpy()[:, 0]
    om = Store(str(tmp_path / "store"))
    om.models.put(model, "line")

    stages = [
        pretrained(model, inputCol="v"),
        pretrained(Estimator.from_torch(model=model), inputCol="v"),
        pretrained("line", shelf=om.models, inputCol="v"),
    ]

    for stage in stages:
        assert isinstance(stage, KindlerModel)
        rows = stage.transform(frame).collect()
        np.testing.assert_allclose([row.prediction for row in rows], expected, rtol=1e-5, atol=1e-6)


def test_sklearn_models_call_the_method_that_is_named(frame: Any, tmp_path: Path) -> None:
    linear: Any = pytest.importorskip("sklearn.linear_model")
    pytest.importorskip("skops")
    model = linear.LogisticRegression().fit(ROWS, [0, 1, 0])

    stage = pretrained(model, inputCol="v", modelMethod="predict_proba")
    stage.save(str(tmp_path / "saved"))
    rows = PretrainedModel.load(str(tmp_path / "saved")).transform(frame).collect()

    np.testing.assert_allclose(
        [row.prediction.toArray() for row in rows], model.predict_proba(ROWS), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ConfigError, match="has no 'decide'"):
        stage.copy({stage.modelMethod: "decide"}).transform(frame)


def test_code_is_refused_unless_it_is_trusted(frame: Any, tmp_path: Path) -> None:
    def double(x: Any) -> Any:
        return x * 2

    with pytest.raises(UntrustedError, match="rejected"):
        pretrained(double, inputCol="v")
    stage = pretrained(double, trusted=True, inputCol="v")
    stage.save(str(tmp_path / "saved"))

    assert stage.transform(frame).first().prediction == DenseVector([0.0, 2.0])
    with pytest.raises(UntrustedError, match="trusting"):
        PretrainedModel.load(str(tmp_path / "saved"))
