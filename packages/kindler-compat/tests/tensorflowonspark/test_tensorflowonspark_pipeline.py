"""TensorFlowOnSpark's stages of Spark ML."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler.compat.tensorflowonspark import pipeline
from kindler.errors import ConfigError
from tests.whole import WHOLE, whole_only


def train_line(args: Any, ctx: Any) -> None:
    """Least squares of what is fed, exported as a SavedModel."""
    import tensorflow as tf

    feed = ctx.get_data_feed(input_mapping=args.input_mapping)
    x, y = [], []
    while not feed.should_stop():
        batch = feed.next_batch(args.batch_size)
        x += batch["x"]
        y += batch["y_"]
    w = np.linalg.lstsq(np.array(x), np.array(y), rcond=None)[0]
    module = tf.Module()
    module.w = tf.Variable(w.astype("float32")[:, None])

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="inputs")])
    def serve(inputs: Any) -> Any:
        return {"outputs": tf.matmul(inputs, module.w)}

    tf.saved_model.save(module, args.export_dir, signatures={"serving_default": serve})


def train_in_step(args: Any, ctx: Any) -> None:
    """Linear regression under MultiWorkerMirroredStrategy, a row at a time from the feed."""
    import tensorflow as tf
    import tf_keras

    from kindler.compat.tensorflowonspark import TFNode, compat

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=[2], name="dense")])
        model.compile(tf_keras.optimizers.Adam(0.2), "mse")
    feed = TFNode.DataFeed(ctx.mgr, input_mapping=args.input_mapping)

    def rows() -> Iterator[Any]:
        while not feed.should_stop():
            batch = feed.next_batch(1)
            if not batch["x"]:
                return
            yield batch["x"][0], batch["y_"][0]

    kinds = (tf.TensorSpec([2]), tf.TensorSpec([1]))
    options = tf.data.Options()
    compat.disable_auto_shard(options)
    dataset = tf.data.Dataset.from_generator(rows, output_signature=kinds).with_options(options)
    steps = int(1000 * 0.9 // (args.batch_size * ctx.num_workers))
    model.fit(dataset.batch(args.batch_size), epochs=args.epochs, steps_per_epoch=steps, verbose=0)
    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")
    feed.terminate()


def test_a_namespace_is_made_of_whatever_has_arguments() -> None:
    values = {"text": "foo", "number": 1, "several": [1, 2]}
    of_a_dict = pipeline.Namespace(values)

    assert (of_a_dict.text, of_a_dict.number) == ("foo", 1)
    assert pipeline.Namespace(of_a_dict) == of_a_dict == pipeline.Namespace(argparse.Namespace(**values))
    assert pipeline.Namespace(["--a", "1"]).argv == ["--a", "1"]
    assert "text" in of_a_dict
    with pytest.raises(ConfigError, match="received int"):
        pipeline.Namespace(3)


@pytest.mark.usefixtures("spark")
def test_params_that_were_set_win_over_arguments_and_defaults_do_not() -> None:
    estimator: Any = pipeline.TFEstimator(train_line, {"batch_size": 64, "mine": 1})
    assert estimator.merge_args_params().batch_size == 64
    merged = estimator.setBatchSize(10).setClusterSize(2).merge_args_params()

    assert (merged.batch_size, merged.cluster_size, merged.epochs, merged.mine) == (10, 2, 1, 1)
    assert estimator.args.batch_size == 64


@pytest.mark.skipif(not WHOLE, reason="importing TensorFlow on executors takes long (KINDLER_TEST_WHOLE=1)")
def test_an_estimator_trains_on_the_feed_and_its_model_keeps_all_columns(spark: Any, tmp_path: Path) -> None:
    rows = [(n, [float(n), 1.0], 3.0 * n - 2.0) for n in range(20)]
    frame = spark.createDataFrame(rows, "id int, features array<float>, label double")
    estimator: Any = pipeline.TFEstimator(train_line, {})
    estimator.setInputMapping({"features": "x", "label": "y_"}).setExportDir(str(tmp_path / "export"))
    model: Any = estimator.setBatchSize(4).fit(frame)
    model.setInputMapping({"features": "inputs"}).setOutputMapping({"outputs": "prediction"})
    scored = model.transform(frame)

    assert scored.columns == ["id", "features", "label", "prediction"]
    for row in scored.collect():
        assert row["prediction"] == pytest.approx([row["label"]], abs=1e-3)


@whole_only
def test_two_nodes_that_train_in_step_learn_the_weights(spark: Any, tmp_path: Path) -> None:
    features = np.random.default_rng(1234).random((1000, 2))
    weights = np.array([3.14, 1.618])
    rows = [(one.tolist(), [float(one @ weights)]) for one in features]
    train = spark.sparkContext.parallelize(rows, 2).toDF(["col1", "col2"])
    estimator: Any = pipeline.TFEstimator(train_in_step, {})
    estimator.setInputMapping({"col1": "x", "col2": "y_"}).setModelDir(str(tmp_path / "model"))
    estimator.setExportDir(str(tmp_path / "export")).setClusterSize(2).setMasterNode("chief").setNumPS(0)
    model: Any = estimator.setBatchSize(1).setEpochs(1).fit(train)
    model.setTagSet("serve").setSignatureDefKey("serving_default")
    model.setInputMapping({"c1": "dense_input"}).setOutputMapping({"dense": "cout"})
    test = spark.createDataFrame([([1.0, 1.0], [0.0])], ["c1", "c2"])

    assert model.transform(test).head().cout[0] == pytest.approx(weights.sum(), abs=0.01)
