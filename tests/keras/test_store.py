"""Keras models, SavedModels and tf.train.Example records in a store."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import flavour
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kindler import Estimator, Store
from kindler.errors import ConfigError, UntrustedError

on_tensorflow = pytest.mark.skipif(flavour.FLAVOUR != "tensorflow", reason="a thing of TensorFlow's")


@pytest.fixture
def om(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def model(keras: Any) -> Any:
    inputs = keras.layers.Input((4,))
    made = keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(keras.layers.Dense(3)(inputs)))
    made.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return made


X = np.random.default_rng(0).random((5, 4), np.float32)


def test_a_model_comes_back_and_predicts_the_same(om: Store, model: Any, keras: Any) -> None:
    version = om.models.put(model, "net", attributes={"by": "me"})

    assert version.kind == ("tf_keras" if flavour.FLAVOUR == "tf_keras" else "keras")
    assert version.meta["inputs"][0]["shape"] == [None, 4]
    again = om.models.get("net")
    assert isinstance(again, keras.Model)
    np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))


def test_a_model_with_a_lambda_is_refused_on_both_sides(om: Store, keras: Any, tmp_path: Path) -> None:
    evil = keras.Sequential([keras.layers.Input((4,)), keras.layers.Lambda(lambda x: x * 2)])
    with pytest.raises(UntrustedError, match="Lambda"):
        om.models.put(evil, "evil")
    om.models.put(evil, "evil", trusted=True)
    with pytest.raises(UntrustedError, match="Lambda"):
        om.models.get("evil")
    np.testing.assert_allclose(om.models.get("evil", trusted=True).predict(X, verbose=0), X * 2)


@flavour.one_is_enough
def test_a_layer_of_a_notebook_is_stored_with_its_code_for_those_who_trust_it(om: Store, keras: Any) -> None:
    class Doubled(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x * 2

    Doubled.__module__ = "__main__"
    om.models.put(keras.Sequential([keras.layers.Input((4,)), Doubled()]), "net")

    with pytest.raises(UntrustedError, match=r"(?s)Doubled of a notebook or script.*trusted=True"):
        om.models.get("net")
    np.testing.assert_allclose(om.models.get("net", trusted=True).predict(X, verbose=0), X * 2)
    given = om.models.get("net", custom_objects={"Doubled": Doubled, "Custom>Doubled": Doubled})
    np.testing.assert_allclose(given.predict(X, verbose=0), X * 2)


@flavour.one_is_enough
def test_a_file_that_names_modules_of_others_is_refused(om: Store, model: Any, tmp_path: Path) -> None:
    model.save(tmp_path / "good.keras")
    om.models.put(tmp_path / "good.keras", "good")
    assert om.models.get("good").count_params() == model.count_params()

    for module, name in (
        ("os", "system"),
        ("keras.utils", "get_file"),
        ("keras.src.saving", "x"),
        ("subprocess", "Popen"),
    ):
        with (
            zipfile.ZipFile(tmp_path / "good.keras") as good,
            zipfile.ZipFile(tmp_path / "evil.keras", "w") as evil,
        ):
            for entry in good.namelist():
                data = good.read(entry)
                if entry == "config.json":
                    told = json.loads(data)
                    told["config"]["layers"][1] |= {
                        "module": module,
                        "class_name": name,
                        "registered_name": None,
                    }
                    data = json.dumps(told).encode()
                evil.writestr(entry, data)
        with pytest.raises(UntrustedError, match=name):
            om.models.put(tmp_path / "evil.keras", "evil")
    (tmp_path / "evil.keras").write_bytes(b"no zip")
    with pytest.raises(ConfigError, match=r"not a \.keras file"):
        om.models.put(tmp_path / "evil.keras", "evil")


@flavour.one_is_enough
def test_a_custom_layer_is_found_where_it_is_registered_or_given(om: Store, keras: Any) -> None:
    class Twice(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x * 2

    om.models.put(keras.Sequential([keras.layers.Input((4,)), Twice()]), "custom")
    with pytest.raises(UntrustedError, match="Twice"):
        om.models.get("custom")
    again = om.models.get("custom", custom_objects={"Twice": Twice})
    np.testing.assert_allclose(again.predict(X, verbose=0), X * 2)


@flavour.one_is_enough
def test_an_estimator_comes_back_and_can_be_trained_on(om: Store, model: Any) -> None:
    data = {"x": np.tile(X, (4, 1)), "y": np.arange(20) % 2}
    estimator = Estimator.from_keras(model=model, workers=1, engine="local")
    estimator.fit(data, epochs=1, batch_size=10, verbose=0)
    om.models.put(estimator, "est")

    again = om.models.get("est", workers=1, engine="local")
    assert list(again.history) == list(estimator.history)
    np.testing.assert_allclose(
        again.predict(data)["prediction"], estimator.predict(data)["prediction"], rtol=1e-6
    )
    again.fit(data, epochs=1, batch_size=10, verbose=0)
    assert len(again.history) == 2


@on_tensorflow
def test_a_saved_model_is_stored_as_it_is(om: Store, model: Any, tmp_path: Path) -> None:
    model.export(str(tmp_path / "saved"), verbose=False)
    om.models.put(tmp_path / "saved", "served")

    again = om.models.get("served")
    np.testing.assert_allclose(again.serve(X), model.predict(X, verbose=0), rtol=1e-6)


@on_tensorflow
def test_a_saved_model_that_touches_files_is_refused_on_both_sides(om: Store, tmp_path: Path) -> None:
    import tensorflow as tf

    class Writes(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([], tf.string)])
        def __call__(self, text: Any) -> Any:
            tf.io.write_file(str(tmp_path / "mark"), text)
            return text

    class Saves(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.variable = tf.Variable([1.0])

        @tf.function(input_signature=[tf.TensorSpec([1], tf.float32)])
        def __call__(self, x: Any) -> Any:
            tf.raw_ops.SaveV2(
                prefix=str(tmp_path / "mark"), tensor_names=["x"], shape_and_slices=[""], tensors=[x]
            )
            return x + self.variable

    for made, op in ((Writes(), "WriteFile"), (Saves(), "SaveV2")):
        folder = tmp_path / op
        tf.saved_model.save(made, str(folder))
        with pytest.raises(UntrustedError, match=op):
            om.models.put(folder, op)
        om.models.put(folder, op, trusted=True)
        with pytest.raises(UntrustedError, match=op):
            om.models.get(op)
        assert om.models.get(op, trusted=True) is not None
    (tmp_path / "WriteFile" / "saved_model.pb").write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match="not a SavedModel"):
        om.models.put(tmp_path / "WriteFile", "x")


@on_tensorflow
def test_examples_come_back_as_examples_tables_and_tf_data(om: Store) -> None:
    import tensorflow as tf

    def example(i: int) -> Any:
        values = {
            "n": tf.train.Feature(int64_list=tf.train.Int64List(value=[i])),
            "x": tf.train.Feature(float_list=tf.train.FloatList(value=[i, 0.5])),
        }
        return tf.train.Example(features=tf.train.Features(feature=values))

    examples = [example(i) for i in range(5)]
    om.datasets.put(examples, "records")
    om.datasets.put(examples[:2], "records", mode="append")
    om.datasets.put(examples[0], "one")

    assert om.datasets.get("records") == [*examples, *examples[:2]]
    assert om.datasets.get("records@1") == examples
    assert om.datasets.get("one") == examples[0]
    assert om.datasets.get("records", as_="arrow").column("n").to_pylist() == [0, 1, 2, 3, 4, 0, 1]
    assert [len(piece) for piece in om.datasets.iterate("records", 3)] == [3, 3, 1]
    parsed = om.datasets.get("records@1", as_="tf.data").map(
        lambda record: tf.io.parse_single_example(record, {"n": tf.io.FixedLenFeature([], tf.int64)})["n"]
    )
    assert [int(n) for n in parsed] == [0, 1, 2, 3, 4]


def made_data(rows: int = 4) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.range(int(rows)).batch(2)


@on_tensorflow
def test_a_virtual_dataset_may_be_a_tf_data_dataset(om: Store) -> None:
    om.datasets.put(made_data, "virtual")
    assert [batch.numpy().tolist() for batch in om.datasets.get("virtual", trusted=True, rows=3)] == [
        [0, 1],
        [2],
    ]


@flavour.two_unless_whole
def test_an_estimator_is_made_again_to_the_bit(om: Store, model: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((60, 4), np.float32)
    pq.write_table(pa.table({"x": list(x), "y": np.arange(60) % 2}), tmp_path / "rows.parquet")
    estimator = Estimator.from_keras(model, workers=2, seed=3)
    estimator.fit(str(tmp_path / "rows.parquet"), epochs=2, batch_size=8, verbose=0)
    om.models.put(estimator, "net")

    (fit,) = om.models.metadata("net").meta["lineage"]
    assert (fit["start"], fit["workers"], len(fit["weights"])) == ("given weights", 2, 4)
    assert om.models.reproduce("net", trusted=True).equal

    held_out = (x[:20], np.arange(20) % 2)
    before = estimator.evaluate(held_out, verbose=0)
    newer = (x[::-1], np.arange(60) % 2)
    again = om.models.retrain("net", holdout=held_out, data=newer, trusted=True)
    assert again.version.number == 2
    assert again.metrics["loss"][0] == pytest.approx(before["loss"])
    assert again.metrics["loss"][1] != again.metrics["loss"][0]
    assert om.models.reproduce("net@1", trusted=True).equal
