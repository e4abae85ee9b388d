"""SparkAsyncDL: what it trains, with each of its parameters, and how it is kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from google.protobuf import json_format
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import DenseVector, Vectors
from v1_graphs import autoencoder, clouds, normalised, returned, xor

from kindler.compat.sparkflow import graph_utils
from kindler.compat.sparkflow.graph_utils import build_graph
from kindler.compat.sparkflow.HogwildSparkModel import HogwildSparkModel
from kindler.compat.sparkflow.pipeline_util import PysparkPipelineWrapper
from kindler.compat.sparkflow.tensorflow_async import SparkAsyncDL, SparkAsyncDLModel
from kindler.compat.sparkflow.tensorflow_model_loader import (
    attach_tensorflow_model_to_pipeline,
    load_tensorflow_model,
)
from kindler.errors import ConfigError, UntrustedError
from tests.whole import whole_only

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:.*tf.layers.dense.*:UserWarning"),
]

PARAMS: dict[str, Any] = {
    "inputCol": "features",
    "labelCol": "label",
    "tfInput": "x:0",
    "tfLabel": "y:0",
    "tfOutput": "outer/Sigmoid:0",
    "partitions": 2,
    "predictionCol": "predicted",
}


@pytest.fixture(scope="module")
def two_clouds(spark: Any) -> Any:
    random = np.random.default_rng(12345)
    rows = [(0.0, Vectors.dense(random.normal(0, 1, 10))) for _ in range(200)]
    rows += [(1.0, Vectors.dense(random.normal(2, 1, 10))) for _ in range(200)]
    return spark.createDataFrame(rows, ["label", "features"]).repartition(2).cache()


@pytest.fixture(scope="module")
def graph() -> str:
    return build_graph(clouds)


def accuracy(model: Any, frame: Any) -> float:
    rows = model.transform(frame).collect()
    return float(np.mean([round(row.predicted) == row.label for row in rows]))


@pytest.mark.parametrize(
    "params",
    [
        {"acquireLock": False, "tfLearningRate": 0.01, "iters": 20},
        pytest.param(
            {
                "acquireLock": True,
                "tfOptimizer": "momentum",
                "optimizerOptions": graph_utils.build_momentum_config(0.5, use_nesterov=True),
                "miniBatchSize": -1,
                "iters": 60,
            },
            marks=whole_only,
        ),
        pytest.param(
            {
                "strategy": "local_sgd",
                "tfOptimizer": "rmsprop",
                "optimizerOptions": graph_utils.build_rmsprop_config(0.02),
                "partitionShuffles": 2,
                "iters": 20,
            },
            marks=whole_only,
        ),
        {
            "strategy": "allreduce",
            "tfOptimizer": "adagrad",
            "optimizerOptions": graph_utils.build_adagrad_config(0.1),
            "miniBatchSize": 20,
            "miniStochasticIters": 2,
            "shufflePerIter": False,
            "iters": 60,
        },
    ],
    ids=["hogwild", "locked", "local_sgd", "allreduce"],
)
def test_two_clouds_are_told_apart(params: dict[str, Any], two_clouds: Any, graph: str) -> None:
    model = SparkAsyncDL(tensorflowGraph=graph, **{**PARAMS, **params}).fit(two_clouds)
    assert accuracy(model, two_clouds) >= 0.98


def test_sparse_vectors_of_xor_are_learned_though_a_batch_is_larger_than_all_rows(spark: Any) -> None:
    rows = [(0.0, [0, 0]), (1.0, [0, 1]), (1.0, [1, 0]), (0.0, [1, 1])]
    frame = spark.createDataFrame(
        [(label, Vectors.sparse(2, list(range(2)), x)) for label, x in rows], ["label", "features"]
    ).coalesce(1)
    model = SparkAsyncDL(
        tensorflowGraph=build_graph(xor), **{**PARAMS, "iters": 150, "tfLearningRate": 0.1}
    ).fit(frame)
    assert accuracy(model, frame) == 1.0


def test_a_graph_that_tensorflow_exported_is_trained_by_workers_of_a_row_or_two(spark: Any) -> None:
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 2], name="x")
        y = tf.placeholder(tf.float32, [None, 1], name="y")
        hidden = tf.nn.relu(tf.matmul(x, tf.get_variable("hidden/kernel", (2, 4))))
        out = tf.sigmoid(tf.matmul(hidden, tf.get_variable("outer/kernel", (4, 1))), name="outer/Sigmoid")
        tf.losses.mean_squared_error(y, out)
        graph = json_format.MessageToJson(tf.train.export_meta_graph())
    rows = [(0.0, {0: 0.0, 1: 0.0}), (0.0, {0: 1.0, 1: 1.0}), (1.0, {0: 1.0}), (1.0, {1: 1.0})]
    frame = spark.createDataFrame(
        [(label, Vectors.sparse(2, x)) for label, x in rows], ["label", "features"]
    ).repartition(4)

    params = {**PARAMS, "partitions": 4, "iters": 3, "optimizerOptions": graph_utils.build_adam_config(0.1)}
    scored = SparkAsyncDL(tensorflowGraph=graph, **params).fit(frame).transform(frame)

    assert scored.columns == ["label", "features", "predicted"]
    assert all(0.0 < row.predicted < 1.0 for row in scored.collect())


def test_an_autoencoder_needs_no_labels_and_predicts_vectors(two_clouds: Any) -> None:
    features = two_clouds.select("features")
    params = {**PARAMS, "labelCol": None, "tfLabel": None, "tfOutput": "out/BiasAdd:0", "iters": 15}
    model = SparkAsyncDL(tensorflowGraph=build_graph(autoencoder), **params).fit(features)

    rows = model.transform(features).collect()
    assert all(isinstance(row.predicted, DenseVector) and len(row.predicted) == 10 for row in rows)
    off = np.mean([(row.predicted.toArray() - row.features.toArray()) ** 2 for row in rows])
    assert off < np.var([row.features.toArray() for row in rows])
    with pytest.raises(ConfigError, match="needs neither"):
        SparkAsyncDL(tensorflowGraph=build_graph(autoencoder), **{**params, "tfLabel": "y:0"}).fit(features)


def test_dropout_is_at_work_in_training_and_off_at_transform(spark: Any) -> None:
    graph, frame = build_graph(returned), spark.createDataFrame([(Vectors.dense([1.0, 1.0]),)] * 8, ["v"])

    def scored(output: str, dropout: str | None, to_keep: bool) -> set[float]:
        model = SparkAsyncDLModel(
            inputCol="v",
            modelJson=graph,
            tfInput="x:0",
            tfOutput=output,
            tfDropout=dropout,
            toKeepDropout=to_keep,
        )
        return {row.predicted for row in model.transform(frame).collect()}

    assert scored("dropped:0", "drop:0", False) == {3.0}
    assert scored("kept:0", "keep:0", True) == {3.0}
    assert scored("kept:0", "keep:0", False) != {3.0}  # keeps nothing


def test_the_returned_loss_is_trained_and_statistics_are_kept(spark: Any, tmp_path: Path) -> None:
    rows = [(Vectors.dense([4.0, 2.0]), 1.0), (Vectors.dense([4.0, 2.0]), 1.0)]
    frame = spark.createDataFrame(rows, ["features", "label"]).coalesce(1)
    step = {
        **PARAMS,
        "tfOutput": "out:0",
        "iters": 1,
        "tfOptimizer": "gradient_descent",
        "tfLearningRate": 0.01,
    }
    plain = SparkAsyncDL(tensorflowGraph=build_graph(returned), **step).fit(frame)
    # d/dw (w . x - y)^2 = 2 (8 - 1) x, from w = (1, 2)
    weights = json.loads(plain.getOrDefault("modelWeights"))
    np.testing.assert_allclose(weights[0], [[1 - 0.14 * 4], [2 - 0.14 * 2]], rtol=1e-5)

    trained = SparkAsyncDL(
        tensorflowGraph=build_graph(normalised), **{**step, "tfOutput": "out/BiasAdd:0"}
    ).fit(frame)
    trained.save(str(tmp_path / "model"))
    again = SparkAsyncDLModel.load(str(tmp_path / "model"))
    np.testing.assert_allclose(again._values["mean:0"], [2.0, 1.0])
    assert [row.predicted for row in again.transform(frame).collect()] == [
        row.predicted for row in trained.transform(frame).collect()
    ]


def test_a_pipeline_is_read_in_a_new_process_and_predicts_the_same(
    spark: Any, two_clouds: Any, graph: str, tmp_path: Path
) -> None:
    names = [f"c{i}" for i in range(10)]
    rows = [(float(row.label), *map(float, row.features)) for row in two_clouds.collect()]
    flat = spark.createDataFrame(rows, ["label", *names])
    flat.write.parquet(str(tmp_path / "rows"))
    assembler = VectorAssembler(inputCols=names, outputCol="features")
    stage = SparkAsyncDL(tensorflowGraph=graph, **{**PARAMS, "iters": 3})
    piped = Pipeline(stages=[assembler, stage]).fit(flat)
    path = str(tmp_path / "location")
    piped.write().overwrite().save(path)
    expected = sorted(row.predicted for row in piped.transform(flat).collect())

    loaded = PipelineModel.load(path)
    assert PysparkPipelineWrapper.unwrap(loaded) is loaded
    assert sorted(row.predicted for row in loaded.transform(flat).collect()) == expected
    with pytest.raises(TypeError, match="expected a Pipeline"):
        PysparkPipelineWrapper.unwrap(loaded.stages[-1])
    program = (
        "import json, sys, kindler\n"
        "from pyspark.ml import PipelineModel\n"
        "spark = kindler.init(cores=1)\n"
        "rows = PipelineModel.load(sys.argv[1]).transform(spark.read.parquet(sys.argv[2]))\n"
        "print(json.dumps(sorted(row.predicted for row in rows.collect())))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, path, str(tmp_path / "rows")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    Pipeline(stages=[assembler, stage]).write().overwrite().save(path)
    assert Pipeline.load(path).getStages()[1].getIters() == 3


def test_hogwild_spark_model_trains_an_rdd_and_reports_losses(spark: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    rows = [(np.array([4.0, 2.0]), 1.0)] * 4

    def heard(loss: float, number: int, partition: int) -> None:
        Path(folder, f"{partition}-{number}").write_text(str(loss))

    model = HogwildSparkModel(
        tensorflowGraph=build_graph(returned),
        iters=2,
        tfInput="x:0",
        tfLabel="y:0",
        optimizer=tf.train.GradientDescentOptimizer(0.001),
        loss_callback=heard,
    )
    weights = model.train(spark.sparkContext.parallelize(rows, 1))
    model.stop_server()

    assert [weight.shape for weight in weights] == [(2, 1)]
    losses = [float(Path(folder, f"0-{number}").read_text()) for number in (1, 2)]
    assert losses[0] == pytest.approx(49.0)
    assert losses[1] < losses[0]


def test_checkpoints_of_tensorflow_become_stages(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    with tf.Graph().as_default(), tf.Session() as sess:
        x = tf.placeholder(tf.float32, [None, 2], name="x")
        w = tf.get_variable("w", initializer=[[1.0], [1.0]])
        tf.matmul(x, w, name="out")
        sess.run(tf.global_variables_initializer())
        saver = tf.train.Saver()
        saver.save(sess, path, global_step=1)
        sess.run(tf.assign(w, [[5.0], [5.0]]))
        saver.save(sess, path, global_step=2)
    frame = spark.createDataFrame([(1.0, 2.0)], ["a", "b"])
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="v")

    first = load_tensorflow_model(f"{path}-1", "v", "x:0", "out:0")
    piped = attach_tensorflow_model_to_pipeline(f"{path}-2", PipelineModel([assembler]), "v", "x:0", "out:0")
    piped.save(str(tmp_path / "saved"))

    assert first.transform(assembler.transform(frame)).first().predicted == 3.0
    assert PipelineModel.load(str(tmp_path / "saved")).transform(frame).first().predicted == 15.0
    with pytest.raises(ConfigError, match="the newest one there is .*model-2"):
        load_tensorflow_model(path, "v", "x:0", "out:0")


def test_a_saved_graph_that_does_more_than_compute_is_refused(spark: Any, tmp_path: Path) -> None:
    def writes() -> Any:
        x = tf.placeholder(tf.float32, [None, 2], name="x")
        w = tf.get_variable("w", initializer=[[1.0], [1.0]])
        with tf.control_dependencies([tf.io.write_file(str(tmp_path / "evil"), "x")]):
            out = tf.matmul(x, w, name="out")
        return tf.reduce_mean(out)

    model = SparkAsyncDLModel(inputCol="v", modelJson=build_graph(writes), tfInput="x:0", tfOutput="out:0")
    model.save(str(tmp_path / "saved"))

    with pytest.raises(UntrustedError, match="WriteFile"):
        SparkAsyncDLModel.load(str(tmp_path / "saved"))
    assert not (tmp_path / "evil").exists()
