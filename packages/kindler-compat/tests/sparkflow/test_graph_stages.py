"""Estimators of TensorFlow graphs as stages of Spark ML: saved and loaded with their pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler

from kindler import Estimator
from kindler.errors import ConfigError, UntrustedError
from kindler.ml import KindlerEstimator
from kindler.models.registry import MODEL_KINDS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]


def line(path: str = "", *, rate: float = 0.05) -> Estimator:
    """Two numbers to one, with dropout that is at work in training only; writes a file if it is told to."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 2], name="x")
        y = tf.placeholder(tf.float32, [None, 1], name="y")
        keep = tf.placeholder(tf.float32, [], name="keep")
        w = tf.get_variable("w", initializer=[[1.0], [0.0]])
        b = tf.get_variable("b", initializer=[0.5])
        kept = tf.nn.dropout(x, rate=1 - keep, seed=1)
        with tf.control_dependencies([tf.io.write_file(path, "x")] if path else []):
            out = tf.add(tf.matmul(kept, w), b, name="out")
        loss = tf.reduce_mean(tf.square(out - y))
        return Estimator.from_graph(
            inputs=x,
            labels=y,
            outputs={"price": out},
            loss=loss,
            optimizer=tf.train.AdamOptimizer(rate),
            metrics={"off": tf.reduce_mean(tf.abs(out - y))},
            tensor_with_value={keep: (0.9, 1.0)},
            workers=1,
        )


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    rows = [(float(i % 3), float(i % 5), 2.0 * (i % 3) - (i % 5) + 1.0) for i in range(40)]
    return spark.createDataFrame(rows, ["a", "b", "label"]).coalesce(1)


def stage_of(est: Estimator) -> KindlerEstimator:
    stage: KindlerEstimator = est.as_stage(
        inputCol="v", labelCol="label", predictionCol="price", epochs=2, batchSize=8, shapes={"label": (1,)}
    )
    return stage


def test_a_pipeline_with_a_graph_is_saved_loaded_and_trained_on(
    spark: Any, frame: Any, tmp_path: Path
) -> None:
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="v")
    pipeline = Pipeline(stages=[assembler, stage_of(line())])
    fitted = pipeline.fit(frame)
    fitted.save(str(tmp_path / "fitted"))
    pipeline.save(str(tmp_path / "unfitted"))
    expected = [row.price for row in fitted.transform(frame).collect()]

    again = PipelineModel.load(str(tmp_path / "fitted"))
    trained = Pipeline.load(str(tmp_path / "unfitted")).fit(frame)

    model = again.stages[-1]
    assert [row.price for row in again.transform(frame).collect()] == expected
    assert model.history["loss"] == fitted.stages[-1].history["loss"]
    first, last = trained.stages[-1].history["loss"]
    assert last < first


def test_a_saved_graph_that_does_more_than_compute_is_refused(tmp_path: Path, frame: Any) -> None:
    stage = stage_of(line(str(tmp_path / "evil")))

    with pytest.raises(UntrustedError, match="WriteFile"):
        stage.save(str(tmp_path / "stage"))
    assert not (tmp_path / "evil").exists()


def test_a_graph_in_files_is_no_pickle_and_predicts_as_its_estimator(tmp_path: Path) -> None:
    est = line()
    kind = MODEL_KINDS.model_kind("estimator")
    meta = kind.write(est, tmp_path, trusted=False)
    files = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    x = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)

    read = kind.read(tmp_path, meta, trusted=False)
    assert files == {"graph.pb", "ends.json", "values.npz", "constants.npz"}
    expected = x @ [[1.0], [0.0]] + 0.5
    np.testing.assert_allclose(kind.predictor(read)(x), expected)
    ends = tmp_path / "model" / "ends.json"
    ends.write_text(ends.read_text().replace("w/Assign", "missing/Assign"))
    with pytest.raises(ConfigError, match="the files of the graph do not match"):
        kind.read(tmp_path, meta, trusted=False)
