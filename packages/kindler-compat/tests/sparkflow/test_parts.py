"""SparkFlow's functions and parameters that need no workers."""

from __future__ import annotations

import functools
import json
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow
import tensorflow.compat.v1 as tf
import v1_graphs
import v1_helpers
from pyspark.ml.linalg import Vectors
from pyspark.sql import Row
from v1_graphs import clouds, returned

from kindler.compat.sparkflow import graph_utils, ml_util
from kindler.compat.sparkflow.graph_utils import build_graph
from kindler.compat.sparkflow.graphs import OpenGraph
from kindler.compat.sparkflow.HogwildSparkModel import HogwildSparkModel
from kindler.compat.sparkflow.tensorflow_async import SparkAsyncDL, SparkAsyncDLModel, build_optimizer
from kindler.errors import ConfigError

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore:.*tf.layers.dense.*:UserWarning")]


def test_a_graph_is_text_whose_loss_is_that_of_tf_losses_or_the_one_returned() -> None:
    text = build_graph(clouds)
    opened = OpenGraph.of(text)

    assert "graphDef" in json.loads(text)
    assert opened.loss().name == "mean_squared_error/value:0"
    assert [v.shape.as_list() for v in opened.trained] == [[10, 12], [12], [12, 7], [7], [7, 1], [1]]
    assert v1_graphs.tf is tensorflow
    assert OpenGraph.of(build_graph(returned)).loss().shape.rank == 0
    with pytest.raises(ConfigError, match="created no loss"):
        build_graph(lambda: None)
    with pytest.raises(ConfigError, match="not the text that build_graph returns"):
        OpenGraph.of("{'x'")


class Network:
    """A graph as an object that is called, with a helper of another module and an import of its own."""

    def __init__(self, units: int) -> None:
        self.units = units

    def __call__(self) -> Any:
        import tensorflow as tf
        from tensorflow import placeholder

        x = placeholder(tf.float32, shape=[None, 2], name="x")
        y = tf.compat.v1.placeholder(tf.float32, shape=[None, 1], name="y")
        hidden = v1_helpers.perceptron(x, self.units)
        return tf.losses.mean_squared_error(y, tf.layers.dense(hidden, 1))

    def built(self, units: int) -> Any:
        self.units = units
        return self()


@pytest.mark.parametrize(
    "function", [Network(3), Network(3).__call__, functools.partial(Network(0).built, 3)]
)
def test_tensorflow_is_tensorflow_1_in_helpers_imports_and_whatever_can_be_called(function: Any) -> None:
    variable, keras = tensorflow.Variable, tensorflow.keras
    opened = OpenGraph.of(build_graph(function))

    assert [v.shape.as_list() for v in opened.trained] == [[2, 3], [3], [3, 1], [1]]
    assert tensorflow.Variable is variable
    assert tensorflow.keras is keras
    assert not hasattr(tensorflow, "placeholder")


def test_tensorflow_is_as_before_after_functions_that_fail_or_run_side_by_side() -> None:
    first_is_in, second_is_out = threading.Event(), threading.Event()

    def slow() -> Any:
        first_is_in.set()
        assert second_is_out.wait(60)
        return Network(1)()

    def fails() -> None:
        v1_graphs.tf.placeholder("float32")
        raise LookupError("no such layer")

    made: list[str] = []
    thread = threading.Thread(target=lambda: made.append(build_graph(slow)))
    thread.start()
    assert first_is_in.wait(60)
    with pytest.raises(LookupError, match="no such layer"):
        build_graph(fails)
    second_is_out.set()
    thread.join()

    assert made
    assert not hasattr(tensorflow, "placeholder")


def test_of_several_losses_the_returned_one_is_taken() -> None:
    def two() -> Any:
        x = tf.placeholder(tf.float32, [None, 1], name="x")
        first, second = tf.losses.mean_squared_error(x, 2 * x), tf.losses.absolute_difference(x, 3 * x)
        return tf.add(first, second, name="both")

    def forgotten() -> None:
        two()

    assert OpenGraph.of(build_graph(two)).loss().name == "both:0"
    with pytest.warns(UserWarning, match="created 2 losses and returned none"):
        build_graph(forgotten)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("adam", graph_utils.build_adam_config(0.5, beta1=0.8)),
        ("rmsprop", graph_utils.build_rmsprop_config(0.5, centered=True)),
        ("momentum", graph_utils.build_momentum_config(0.5, use_nesterov=True)),
        ("adadelta", graph_utils.build_adadelta_config(0.5, rho=0.8)),
        ("adagrad", graph_utils.build_adagrad_config(0.5, initial_accumulator=0.2)),
        ("gradient_descent", graph_utils.build_gradient_descent(0.5)),
        ("adagrad", '{"initial_accumulator": 0.2}'),
        ("adagrad_da", None),
        ("ftrl", None),
        ("proximal_adagrad", None),
        ("proximal_gradient_descent", graph_utils.generate_config(l1_regularization_strength=0.1)),
        ("momentum", None),
    ],
)
def test_each_optimizer_takes_a_step_with_its_options(name: str, config: str | None) -> None:
    with tf.Graph().as_default(), tf.Session() as sess:
        w = tf.get_variable("w", initializer=1.0)
        optimizer = build_optimizer(name, 0.25, config)
        step = optimizer.minimize(w * w, global_step=tf.train.get_or_create_global_step())
        sess.run(tf.global_variables_initializer())
        sess.run(step)
        assert sess.run(w) < 1.0
    rate = getattr(optimizer, "_lr", getattr(optimizer, "_learning_rate", None))
    assert rate == (0.5 if config and "0.5" in config else 0.25)


def test_unknown_optimizers_and_options_are_errors_that_list_the_known() -> None:
    with pytest.raises(ConfigError, match="tfOptimizer='adamm': must be one of adam, rmsprop"):
        build_optimizer("adamm", 0.1, None)
    with pytest.raises(ConfigError, match="'adam' has no rho; it has learning_rate"):
        build_optimizer("adam", 0.1, '{"rho": 1}')
    with pytest.raises(ConfigError, match="must be a JSON object"):
        build_optimizer("adam", 0.1, "[1]")


def test_params_have_the_defaults_and_getters_of_the_original() -> None:
    stage = SparkAsyncDL()

    found = {
        "inputCol": stage.getInputCol(),
        "tensorflowGraph": stage.getTensorflowGraph(),
        "tfInput": stage.getTfInput(),
        "tfLabel": stage.getTfLabel(),
        "tfOutput": stage.getTfOutput(),
        "tfOptimizer": stage.getTfOptimizer(),
        "tfLearningRate": stage.getTfLearningRate(),
        "iters": stage.getIters(),
        "predictionCol": stage.getPredictionCol(),
        "partitions": stage.getPartitions(),
        "miniBatchSize": stage.getMiniBatchSize(),
        "miniStochasticIters": stage.getMiniStochasticIters(),
        "acquireLock": stage.getAqcuireLock(),
        "shufflePerIter": stage.getShufflePerIter(),
        "tfDropout": stage.getTfDropout(),
        "toKeepDropout": stage.getToKeepDropout(),
        "verbose": stage.getVerbose(),
        "labelCol": stage.getLabelCol(),
        "partitionShuffles": stage.getPartitionShuffles(),
        "optimizerOptions": stage.getOptimizerOptions(),
        "port": stage.getPort(),
    }
    assert found == {
        "inputCol": "transformed",
        "tensorflowGraph": "",
        "tfInput": "x:0",
        "tfLabel": None,
        "tfOutput": "out/Sigmoid:0",
        "tfOptimizer": "adam",
        "tfLearningRate": 0.01,
        "iters": 1000,
        "predictionCol": "predicted",
        "partitions": 5,
        "miniBatchSize": 128,
        "miniStochasticIters": -1,
        "acquireLock": False,
        "shufflePerIter": True,
        "tfDropout": None,
        "toKeepDropout": False,
        "verbose": 0,
        "labelCol": None,
        "partitionShuffles": 1,
        "optimizerOptions": None,
        "port": 5000,
    }
    assert all(param.doc for param in stage.params)
    assert (SparkAsyncDLModel().getInputCol(), SparkAsyncDLModel().getPredictionCol()) == (
        "encoded",
        "predicted",
    )
    with pytest.raises(TypeError, match="iters"):
        SparkAsyncDL(iters="many")  # type: ignore[arg-type]


def test_what_cannot_be_trained_is_said_before_workers_start(spark: Any) -> None:
    frame = spark.createDataFrame([(Vectors.dense([1.0, 2.0]), 1.0)], ["v", "y"])
    graph = build_graph(returned)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tensorflowGraph": ""}, "there is no graph"),
        ({"tfInput": "z:0"}, "tfInput='z:0': the graph has no such tensor; its placeholders are x:0, y:0"),
        ({"labelCol": None}, "a loss with labels needs both"),
        ({"tfOptimizer": "sgdd"}, "must be one of adam"),
        ({"tfDropout": "y:0"}, "a placeholder without a value"),
        ({"iters": 0}, "iters must be at least 1"),
    ]
    for params, said in wrong:
        given = {"tensorflowGraph": graph, "inputCol": "v", "labelCol": "y", "tfLabel": "y:0", **params}
        with pytest.raises(ConfigError, match=said):
            SparkAsyncDL(**given).fit(frame)


def test_helpers_of_ml_util_do_what_their_names_say() -> None:
    weights = [np.array([[1.0, 2.0]]), np.array([3.0])]
    again = ml_util.convert_json_to_weights(ml_util.convert_weights_to_json(weights))
    assert [a.tolist() for a in again] == [w.tolist() for w in weights]
    mean = ml_util.calculate_weights([weights, [w * 3 for w in weights]])
    assert [m.tolist() for m in mean] == [[[2.0, 4.0]], [6.0]]
    assert weights[0].tolist() == [[1.0, 2.0]]

    features, labels = ml_util.handle_features(
        [(np.array([1.0, 2.0]), 1), (Vectors.sparse(2, {1: 3.0}), 0)], True
    )
    assert features.tolist() == [[1.0, 2.0], [0.0, 3.0]]
    assert labels is not None
    assert labels.tolist() == [[1], [0]]
    assert ml_util.handle_features([np.array([1.0])])[1] is None
    fed = ml_util.handle_feed_dict(features, "x", "y", labels, mini_batch_size=5)
    assert [len(fed["x"]), len(fed["y"])] == [2, 2]
    assert ml_util.handle_feed_dict(features, "x", mini_batch_size=1, idx=1)["x"].tolist() == [[0.0, 3.0]]
    shuffled, other = ml_util.handle_shuffle(features, labels)
    assert other is not None
    assert sorted(zip(shuffled[:, 1], other[:, 0], strict=True)) == [(2.0, 1), (3.0, 0)]
    row = Row(v=Vectors.dense([1.0, 2.0]), y=5.0)
    assert ml_util.handle_data(row, "v", "y")[1] == 5.0

    scored = ml_util.predict_func([row], build_graph(returned), "p", "[[[1.0], [3.0]]]", "v", "out:0", "x:0")
    assert scored == [Row(v=row.v, y=5.0, p=7.0)]
    assert ml_util.predict_func([], "", "p", "", "v", "out:0", "x:0") == []


def test_weights_of_a_session_are_read_and_set_without_growing_its_graph() -> None:
    with tf.Graph().as_default() as graph, tf.Session() as sess:
        w = tf.get_variable("w", initializer=[1.0, 2.0])
        sess.run(tf.global_variables_initializer())
        before = len(graph.get_operations())
        ml_util.tensorflow_set_weights([np.array([3.0, 4.0])])
        assert ml_util.tensorflow_get_weights()[0].tolist() == [3.0, 4.0]
        assert sess.run(w).tolist() == [3.0, 4.0]
        assert len(graph.get_operations()) <= before + 1


def test_a_master_has_the_port_it_is_asked_for() -> None:
    assert HogwildSparkModel.determine_master(3000).endswith(":3000")
