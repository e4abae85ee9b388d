"""RDDs, DataFrames, strings and images of one Spark session as datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler.compat import tensorflow as tf
from kindler.compat.bigdl.nn.layer import Linear, Sequential
from kindler.compat.bigdl.optim.optimizer import Adam, MaxEpoch
from kindler.compat.bigdl.util.common import Sample
from kindler.compat.zoo.feature import common
from kindler.compat.zoo.feature.common import ChainedPreprocessing, FeatureSet
from kindler.compat.zoo.feature.image import (
    ImageCenterCrop,
    ImageMatToTensor,
    ImageResize,
    ImageSet,
    ImageSetToSample,
)
from kindler.compat.zoo.orca.learn.tf.estimator import Estimator
from kindler.compat.zoo.tfpark import KerasModel, TFDataset, TFNet, TFOptimizer, TFPredictor
from kindler.errors import ConfigError, DataError

pytestmark = pytest.mark.timeout(400)


def collected(dataset: TFDataset) -> list[Any]:
    """The columns of a dataset's frame, as arrays."""
    columns = dataset.columns()
    names = [*columns.features, *columns.labels]
    rows = columns.data.select(*names).collect()
    return [
        np.stack([np.frombuffer(row[i], columns.dtypes[n]).reshape(columns.shapes[n]) for row in rows])
        for i, n in enumerate(names)
    ]


def test_elements_of_an_rdd_have_the_declared_structure(sc: Any, rows: Any, graph: Any) -> None:
    x, y = rows
    pairs = sc.parallelize(list(zip(x, y, strict=True)), 2)
    dataset = TFDataset.from_rdd(pairs, features=(tf.float32, [6]), labels=(tf.int32, []), batch_size=16)
    np.testing.assert_array_equal(collected(dataset)[0], x)
    np.testing.assert_array_equal(collected(dataset)[1], y)

    # Wrapped in a list, or with labels that nobody asked for.
    for form in (lambda r: r[0], lambda r: [r[0]], lambda r: [r[0], r[1]]):
        only = TFDataset.from_rdd(pairs.map(form), features=(tf.float32, [6]), batch_per_thread=4)
        np.testing.assert_array_equal(collected(only)[0], x)

    named = pairs.map(lambda r: ({"a": r[0][:2], "b": r[0][2:]}, [r[1], r[1]]))
    structure = {"b": (tf.float32, [4]), "a": (tf.float64, [2])}
    nested = TFDataset.from_rdd(
        named, features=structure, labels=[(tf.int64, [1]), (tf.int32, [])], batch_size=4
    )
    b, a, first, second = collected(nested)
    np.testing.assert_array_equal(np.hstack([a, b]), x)
    assert (a.dtype, first.dtype, first.shape, second.shape) == (np.float64, np.int64, (96, 1), (96,))
    assert [tensor.name for tensor in nested.feature_tensors.values()] == ["b:0", "a:0"]
    assert [tensor.name for tensor in nested.label_tensors] == ["list_input_0:0", "list_input_1:0"]

    flat = TFDataset.from_rdd(
        pairs.map(lambda r: [r[0], r[0], r[1]]), names=["p", "q", "r"], shapes=[[6], [6], []],
        types=[tf.float32, tf.float32, tf.int32], batch_size=4,
    )  # fmt: skip
    p, q, r = flat.tensors
    assert (p.name, q.name, r.name) == ("p:0", "q:0", "r:0")
    np.testing.assert_array_equal(collected(flat)[2], y)

    opened = TFDataset.from_rdd(pairs, features=(tf.float32, [None]), labels=(tf.int32, []), batch_size=4)
    assert opened.columns().shapes["feature_0"] == (6,)


def test_rows_that_differ_from_the_declaration_are_a_data_error(rows: Any) -> None:
    x, _ = rows
    unpack: Any = TFDataset.from_rdd.__globals__["_unpack"]
    declared = TFDataset.from_rdd.__globals__["_declared"]((tf.float32, [6]), (tf.int8, []), None, None, None)

    taken = unpack(*declared)

    assert [part.tolist() for part in taken.arrays((x[0], 5))] == [x[0].tolist(), 5]
    for element, complaint in (
        ((x[0][:5], 1), r"has rows of shape \(5,\); the dataset declares \[6\]"),
        ((x[0], 300), "values that int8 cannot represent"),
        ((x[0], "a"), "not numbers"),
        (x[0], "must be a pair"),
    ):
        with pytest.raises(DataError, match=complaint):
            taken.arrays(element)


def test_an_rdd_trains_and_predicts_row_for_row(sc: Any, rows: Any, graph: Any) -> None:
    x, y = rows
    pairs = sc.parallelize(list(zip(x, y, strict=True)), 3)
    dataset = TFDataset.from_rdd(
        pairs, features=(tf.float32, [6]), labels=(tf.int32, []), batch_size=32, val_rdd=pairs
    )
    images, labels = dataset.tensors
    logits = tf.layers.dense(images, 2)
    loss = tf.reduce_mean(tf.losses.sparse_softmax_cross_entropy(logits=logits, labels=tf.squeeze(labels)))
    optimizer = TFOptimizer.from_loss(loss, Adam(0.05), metrics={"loss": loss})

    optimizer.optimize(MaxEpoch(2))

    assert optimizer.estimator.counters == (2, 6)
    scoring = TFDataset.from_rdd(pairs, features=(tf.float32, [6]), batch_per_thread=4)
    found = TFPredictor(optimizer.sess, [logits], inputs=[images], dataset=scoring).predict().collect()
    plain = [optimizer.sess.run(logits, {images: x[i : i + 4]}) for i in range(0, len(x), 4)]
    np.testing.assert_allclose(np.stack(found), np.concatenate(plain), rtol=1e-6)


def test_dataframes_feed_graphs_and_keras_models(sc: Any, rows: Any, tmp_path: Path) -> None:
    import pandas as pd

    import kindler

    x, y = rows
    frame = kindler.init().createDataFrame(pd.DataFrame({"image": list(x), "label": y}))
    tf.keras.backend.clear_session()
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, activation="softmax", input_shape=(6,))])
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    estimator = Estimator.from_keras(keras_model=model)

    estimator.fit(data=frame, batch_size=32, epochs=1, feature_cols=["image"], label_cols=["label"])

    scored = estimator.predict(data=frame, feature_cols=["image"]).toPandas()
    np.testing.assert_allclose(np.stack(scored["prediction"]), model.predict(x), rtol=1e-5)
    here = KerasModel(model).evaluate(x, y)
    there = KerasModel(model).evaluate(
        TFDataset.from_dataframe(frame, ["image"], ["label"], batch_per_thread=8)
    )
    assert there["acc"] == pytest.approx(here["acc"])

    # A frozen net scores the same frame.
    backend = tf.keras.backend
    net = TFNet.from_session(backend.get_session(), model.inputs, model.outputs)
    scored = net.predict(frame, batch_per_thread=16, feature_cols=["image"]).toPandas()
    np.testing.assert_allclose(np.stack(scored["prediction"]), model.predict(x), rtol=1e-5)


def test_strings_are_tensors_of_a_graph(sc: Any, graph: Any) -> None:
    words = ["7", "-1.5", "", "1e3"]
    dataset = TFDataset.from_string_rdd(sc.parallelize(words, 2), batch_per_thread=2)
    text = dataset.feature_tensors
    lengths = tf.strings.length(text)
    with tf.Session() as sess:
        found = TFPredictor.from_outputs(sess, [lengths]).predict().collect()
    assert [int(length) for length in found] == [1, 4, 0, 3]

    own = tf.placeholder(tf.string, [None])
    numbers = tf.string_to_number(own)
    blob = TFDataset.from_bytes_rdd(sc.parallelize([b"7", b"-1.5", b"1e3"], 2), batch_per_thread=2)
    with tf.Session() as sess:
        net = TFNet.from_session(sess, [own], [numbers])
    assert [float(number) for number in net.predict(blob).collect()] == [7, -1.5, 1000]


def test_tfrecord_files_are_read_record_by_record(sc: Any, graph: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "rows.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for number in range(5):
            feature = {"x": tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))}
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    dataset = TFDataset.from_tfrecord_file(sc, path, batch_per_thread=2)
    parsed = tf.parse_example(dataset.feature_tensors, {"x": tf.FixedLenFeature([], tf.int64)})

    with tf.Session() as sess:
        found = TFPredictor.from_outputs(sess, [parsed["x"]]).predict().collect()

    assert [int(number) for number in found] == [0, 1, 2, 3, 4]


def test_image_sets_are_read_transformed_and_scored(sc: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(["cat", "dog"]):
        (tmp_path / name).mkdir()
        for shade in (10, 90):
            pixels = np.full((8, 10, 3), [shade, 0, number * 100], np.uint8)
            image.fromarray(pixels).save(tmp_path / name / f"{shade}.png")
    steps = ChainedPreprocessing(
        [ImageResize(8, 8), ImageCenterCrop(4, 4), ImageMatToTensor(to_RGB=True, format="NHWC"),
         ImageSetToSample(input_keys=["imageTensor"], target_keys=["label"])]
    )  # fmt: skip
    images = ImageSet.read(str(tmp_path), sc, with_label=True, one_based_label=False)
    features, labels = (tf.float32, [4, 4, 3]), (tf.int32, [1])
    dataset = TFDataset.from_image_set(images.transform(steps), image=features, label=labels, batch_size=2)

    pixels, classes = collected(dataset)

    assert classes.reshape(-1).tolist() == [0, 0, 1, 1]
    assert pixels[:, 0, 0].tolist() == [[10, 0, 0], [90, 0, 0], [10, 0, 100], [90, 0, 100]]
    nearest = ImageResize(1, 2, resize_mode=0).change(
        np.array([[[0.0], [9.0], [5.0], [7.0]]] * 2, np.float32)
    )
    assert nearest[..., 0].tolist() == [[9.0, 7.0]]
    for build in (lambda: ImageSet.read(str(tmp_path), sc, image_codec=0), lambda: ImageResize(2, 2, 9)):
        with pytest.raises(
            ConfigError, match=r"image_codec=0: images are decoded|resize_mode must be 0 to 4"
        ):
            build()
    as_features = FeatureSet.image_frame(images.to_image_frame()).transform(steps)
    same = TFDataset.from_feature_set(as_features, features=features, labels=labels, batch_size=2)
    np.testing.assert_array_equal(collected(same)[0], pixels)

    tf.keras.backend.clear_session()
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [layers.Flatten(input_shape=(4, 4, 3)), layers.Dense(2, activation="softmax")]
    )
    scoring = TFDataset.from_image_set(images.transform(steps), image=features, batch_per_thread=2)
    scored = KerasModel(model).predict(scoring).get_predict().collect()
    assert [Path(uri).parent.name for uri, _ in scored] == ["cat", "cat", "dog", "dog"]
    np.testing.assert_allclose(np.stack([part for _, part in scored]), model.predict(pixels), atol=1e-6)


def test_samples_of_bigdl_and_of_analytics_zoo_are_one_class(sc: Any) -> None:
    assert Sample is common.Sample
    rdd = sc.parallelize(range(6), 2).map(lambda i: Sample.from_ndarray(np.array([i, 2.0]), np.array([i])))
    features = FeatureSet.sample_rdd(rdd, sequential_order=True)
    dataset = TFDataset.from_feature_set(
        features, features=(tf.float32, [2]), labels=(tf.int32, [1]), batch_size=2
    )
    x, y = collected(dataset)
    assert x.tolist() == [[i, 2.0] for i in range(6)]
    assert y.reshape(-1).tolist() == list(range(6))
    assert not dataset.shuffle
    model = Sequential().add(Linear(2, 1))
    np.testing.assert_allclose(np.stack(model.predict(rdd).collect()), model.predict(x), rtol=1e-6)
