"""Datasets without Spark: batches, tensors, and what a graph cannot be trained with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kindler.compat import tensorflow as tf
from kindler.compat.bigdl.optim.optimizer import Adam, MaxEpoch
from kindler.compat.bigdl.optim.validation import AUC, NDCG, HitRatio, Scores, Top1Accuracy, Top5Accuracy
from kindler.compat.zoo.feature.text import TextSet
from kindler.compat.zoo.tfpark import KerasModel, TFDataset, TFOptimizer, TFPredictor, tf_dataset
from kindler.errors import ConfigError, DataError

X, Y = np.zeros((12, 3)), np.zeros(12, "int64")


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf_dataset, "total_cores", lambda: 4)


def test_tensors_have_the_structure_of_the_data_and_float64_becomes_float32(graph: Any) -> None:
    dataset = TFDataset.from_ndarrays(({"a": X, "b": [X, Y]}, Y), batch_size=8)

    features, label = dataset.tensors

    assert features["a"].dtype == tf.float32
    assert features["b"][0].shape.as_list() == [None, 3]
    assert label.dtype == tf.int64
    assert dataset.output_shapes == ({"a": [None, 3], "b": [[None, 3], [None]]}, [None])
    assert dataset.feature_tensors is features
    assert dataset.label_tensors is label


def test_without_labels_the_second_tensor_is_none(graph: Any) -> None:
    images, labels = TFDataset.from_ndarrays(X, batch_per_thread=4).tensors

    assert images.shape.as_list() == [None, 3]
    assert labels is None


def test_without_a_batch_tensors_are_single_elements(graph: Any) -> None:
    images, labels = TFDataset.from_ndarrays((X, Y)).tensors

    assert images.shape.as_list() == [3]
    assert labels.shape.as_list() == []


def test_a_hard_coded_batch_is_the_share_of_a_core(graph: Any) -> None:
    training = TFDataset.from_ndarrays((X, Y), batch_size=8, hard_code_batch_size=True)
    scoring = TFDataset.from_ndarrays((X, Y), batch_per_thread=6, hard_code_batch_size=True)

    assert training.tensors[0].shape.as_list() == [2, 3]
    assert scoring.tensors[0].shape.as_list() == [6, 3]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"batch_size": 8, "batch_per_thread": 2}, "should not be set simultaneously"),
        ({"batch_size": 6}, r"batch_size should be a multiple of total core number.*\n.*batch_size=4 works"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
    ],
)
def test_wrong_batch_arguments_are_refused(arguments: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        TFDataset.from_ndarrays((X, Y), **arguments)


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="same number of rows"):
        TFDataset.from_ndarrays((X, Y[:5]), batch_size=4)


def test_factories_of_rdds_say_what_they_take_and_what_else_there_is() -> None:
    for factory in (TFDataset.from_rdd, TFDataset.from_string_rdd, TFDataset.from_bytes_rdd):
        with pytest.raises(ConfigError, match="takes an RDD; received list(.|\n)*from_dataframe"):
            factory([1, 2])  # type: ignore[operator]


def test_keras_models_need_the_batch_that_the_call_uses() -> None:
    tf.keras.backend.clear_session()
    keras = tf.keras
    model = keras.Sequential([keras.layers.Dense(2, input_shape=(3,))])
    model.compile("sgd", "mse")
    wrapped, unbatched = KerasModel(model), TFDataset.from_ndarrays((X, Y))

    with pytest.raises(
        ConfigError, match="batch_size of TFDataset must be specified when used in KerasModel fit"
    ):
        wrapped.fit(unbatched)
    with pytest.raises(ConfigError, match="batch_per_thread of TFDataset must be .* KerasModel evaluate"):
        wrapped.evaluate(unbatched)
    with pytest.raises(ConfigError, match="batch_per_thread of TFDataset must be .* KerasModel predict"):
        wrapped.predict(unbatched)
    with pytest.raises(ConfigError, match="validation_data must be None"):
        wrapped.fit(TFDataset.from_ndarrays((X, Y), batch_size=4), validation_data=(X, Y))


def test_a_batched_or_repeated_tf_data_dataset_is_refused(graph: Any) -> None:
    rows = tf.data.Dataset.from_tensor_slices((X, Y))

    with pytest.raises(ConfigError, match="is batched"):
        TFDataset.from_tf_data_dataset(rows.batch(4), batch_size=4)
    with pytest.raises(ConfigError, match="repeats"):
        TFDataset.from_tf_data_dataset(rows.shuffle(4).repeat(), batch_size=4)
    TFDataset.from_tf_data_dataset(rows.shuffle(4).batch(2).unbatch(), batch_size=4)


def test_a_graph_that_cannot_be_trained_is_refused_on_the_driver(graph: Any) -> None:
    dataset = TFDataset.from_ndarrays((X, Y), batch_size=8)
    images, _ = dataset.tensors
    variable = tf.get_variable("w", [3])
    rate, elsewhere = tf.placeholder(tf.float32, [], "rate"), tf.placeholder(tf.float32, [None, 3], "other")

    with pytest.raises(ConfigError, match="depends on no dataset"):
        TFOptimizer.from_loss(tf.reduce_mean(elsewhere * variable), Adam())
    with pytest.raises(
        ConfigError, match="no value is fed to the placeholder 'rate'(.|\n)*tensor_with_value"
    ):
        TFOptimizer.from_loss(tf.reduce_mean(images * variable * rate), Adam())
    with pytest.raises(ConfigError, match="must be a scalar"):
        TFOptimizer.from_loss(images * variable, Adam())
    with pytest.raises(ConfigError, match="no trainable variable"):
        TFOptimizer.from_loss(tf.reduce_mean(images), Adam()).optimize(MaxEpoch(1))
    with pytest.raises(ConfigError, match="optimizer must be one of"):
        TFOptimizer.from_loss(tf.reduce_mean(images * variable), "adam")
    with pytest.raises(ConfigError, match="end_trigger must be a trigger"):
        TFOptimizer.from_loss(tf.reduce_mean(images * variable), Adam()).optimize(5)  # type: ignore[arg-type]
    scoring = TFDataset.from_ndarrays((X, Y), batch_per_thread=4)
    with pytest.raises(ConfigError, match="batch_size of TFDataset must be specified"):
        TFOptimizer.from_loss(tf.reduce_mean(scoring.tensors[0] * variable), Adam())
    with (
        tf.Session() as sess,
        pytest.raises(ConfigError, match="batch_per_thread of TFDataset must be specified"),
    ):
        TFPredictor.from_outputs(sess, [images * variable])


def test_scores_are_found_by_every_usual_name() -> None:
    scores = Scores({"loss": 0.5, "acc Top1Accuracy": 0.9})

    assert [scores[name] for name in ("acc", "accuracy", "Top1Accuracy", "acc Top1Accuracy")] == [0.9] * 4
    assert "top5acc" not in scores
    assert scores.get("auc", -1) == -1
    with pytest.raises(KeyError, match="mae"):
        scores["mae"]


def test_validation_methods_give_the_same_in_a_graph_and_on_arrays() -> None:
    generator = np.random.default_rng(1)
    outputs = generator.uniform(size=(50, 8)).astype("float32")
    labels = generator.integers(0, 8, 50)
    with tf.Graph().as_default(), tf.Session() as sess:
        for method in (Top1Accuracy(), Top5Accuracy()):
            inside = sess.run(method.tensor(tf, tf.constant(outputs), tf.constant(labels)))
            assert inside == pytest.approx(method.score(outputs, labels))
    assert Top1Accuracy().score(outputs, np.eye(8)[labels]) == Top1Accuracy().score(outputs, labels)


def test_auc_counts_pairs_and_ties_half() -> None:
    assert AUC().score(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])) == pytest.approx(0.75)
    assert AUC().score(np.zeros(4), np.array([0, 1, 0, 1])) == pytest.approx(0.5)


def test_ranking_methods_judge_groups_of_one_positive_row() -> None:
    scores, labels = np.array([0.9, 0.1, 0.2, 0.3, 0.8, 0.7]), np.array([1, 0, 0, 1, 0, 0])

    assert HitRatio(k=1, neg_num=2).score(scores, labels) == 0.5
    assert NDCG(k=3, neg_num=2).score(scores, labels) == pytest.approx((1 + 0.5) / 2)
    with pytest.raises(ConfigError, match="groups of 4 rows"):
        HitRatio(k=1, neg_num=3).score(scores, labels)


def test_texts_become_sequences_of_indices(graph: Any) -> None:
    texts = TextSet(["Hello, hello world", "world of worlds"], [0, 1])
    done = texts.tokenize().normalize().word2idx().shape_sequence(4)

    assert done.get_word_index() == {"hello": 1, "world": 2, "of": 3, "worlds": 4}
    dataset = TFDataset.from_text_set(done, text=(tf.int32, [4]), label=(tf.int32, []), batch_size=4)
    columns = dataset.columns()
    assert columns.data["feature_0"].tolist() == [[1, 1, 2, 0], [2, 3, 4, 0]]
    with pytest.raises(ConfigError, match="call tokenize"):
        texts.word2idx()
    with pytest.raises(DataError, match="declares \\[5\\]"):
        TFDataset.from_text_set(done, text=(tf.int32, [5]), batch_per_thread=1)
