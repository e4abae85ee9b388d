"""TensorFlowOnSpark's stages of Spark ML."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from kindler.compat.tensorflowonspark import pipeline
from kindler.errors import ConfigError
from tests.whole import WHOLE


def train_line(args: Any, ctx: Any) -> None:
    """Least squares of what is fed, exported as a SavedModel."""
    import numpy as np
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
