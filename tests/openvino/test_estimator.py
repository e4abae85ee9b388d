"""Models of OpenVINO predict every row as OpenVINO itself does, whatever the data and the batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pandas as pd
import pytest

from kindler import Estimator, RunSettings, XShards
from kindler.errors import ConfigError, DataError
from tests.openvino.models import classifier, direct, named, save, two_inputs

IMAGES = np.random.default_rng(0).random((23, 3, 8, 8)).astype("float32")


def estimator(path: Path, **options: Any) -> Estimator:
    return Estimator.from_openvino(model_path=path, **options)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_array_of_batches_is_scored_batch_by_batch(tmp_path: Path) -> None:
    path = classifier(tmp_path / "net.xml", [4, 3, 224, 224])
    data = np.random.default_rng(0).random([20, 4, 3, 224, 224])
    est = estimator(path)
    expected = np.stack([direct(path, batch.astype("float32"))[0] for batch in data])

    assert expected.shape == (20, 4, 5)
    close(est.predict(data), expected)
    shards = est.predict(XShards.partition({"x": data[:6]}, 3, engine="local"))
    close(np.concatenate([shard["prediction"] for shard in shards.collect()]), expected[:6])


@pytest.mark.parametrize("rows", [-1, 1, 4], ids=["free", "one", "four"])
def test_any_number_of_rows_is_exact_for_models_made_for_any_one_or_four(tmp_path: Path, rows: int) -> None:
    free = classifier(tmp_path / "free.xml", [-1, 3, 8, 8])
    est = estimator(classifier(tmp_path / "net.xml", [rows, 3, 8, 8]))
    expected = direct(free, IMAGES)[0]

    for batch_size in (4, 7, 1024):
        close(est.predict(IMAGES, batch_size=batch_size), expected)
    close(est.predict(IMAGES[:1]), expected[:1])


def test_a_model_whose_rows_cannot_be_freed_is_called_with_its_number_and_the_rest_filled(
    tmp_path: Path,
) -> None:
    image = named(ops.parameter([4, 3], np.float32), "x")
    flat = ops.reshape(image, ops.constant(np.array([4, 3])), False)  # made for four rows
    weights = np.arange(6, dtype="float32").reshape(3, 2)
    path = save(
        ov.Model([ops.matmul(flat, ops.constant(weights), False, False)], [image]), tmp_path / "n.xml"
    )
    rows = np.random.default_rng(2).normal(size=(23, 3)).astype("float32")

    close(estimator(path).predict(rows, batch_size=10), rows @ weights)


def test_rows_that_depend_on_each_other_are_never_filled_up(tmp_path: Path) -> None:
    x = named(ops.parameter([4, 3], np.float32), "x")
    path = save(ov.Model([ops.softmax(x, 0)], [x]), tmp_path / "net.xml")
    rows = np.random.default_rng(2).normal(size=(8, 3)).astype("float32")
    est = estimator(path)

    halves = [direct(path, rows[:4])[0], direct(path, rows[4:])[0]]
    close(est.predict(rows, batch_size=8), np.concatenate(halves))
    with pytest.raises(DataError, match=r"takes 4 rows at a time.*depends on the others"):
        est.predict(rows[:7])


def test_several_inputs_and_outputs_by_order_and_by_name(tmp_path: Path) -> None:
    path = two_inputs(tmp_path / "two.xml")
    random = np.random.default_rng(3)
    a, b = random.normal(size=(9, 3)).astype("float32"), random.normal(size=9).astype("float32")
    expected = [a + b[:, None], a - b[:, None]]
    est = estimator(path)

    for found in (est.predict([a, b], batch_size=4), est.predict([a, b[:, None]])):
        assert isinstance(found, list)
        close(found[0], expected[0])
        close(found[1], expected[1])
    by_name = est.predict({"b": b, "a": a, "id": np.arange(9)}, feature_cols=["b", "a"])
    close(by_name["prediction_1"], expected[1])
    frame = pd.DataFrame({"a": list(a), "b": b})
    scored = est.predict(frame, feature_cols=["a", "b"], output_cols=["plus", "minus"])
    close(np.stack(scored["minus"]), expected[1])
    shards = XShards.from_shards([{"x": (a[:2], b[:2])}, {"x": (a[2:], b[2:])}], engine="local")
    found = est.predict(shards, batch_size=2).collect()
    close(np.concatenate([shard["prediction_0"] for shard in found]), expected[0])


def test_free_lengths_inside_a_row_may_differ_from_call_to_call(tmp_path: Path) -> None:
    x = named(ops.parameter([-1, -1, 2], np.float32), "x")
    summed = ops.reduce_sum(x, ops.constant(np.array([1])), False)
    est = estimator(save(ov.Model([summed], [x]), tmp_path / "net.xml"))

    for length in (1, 5, 3):
        rows = np.random.default_rng(length).normal(size=(6, length, 2)).astype("float32")
        close(est.predict(rows, batch_size=4), rows.sum(axis=1))


def test_onnx_files_are_read_with_their_tensors_beside_them(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weights = np.arange(6, dtype="float32").reshape(3, 2) - 2
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "layer",
        [helper.make_tensor_value_info("x", kind, ["rows", 3])],
        [helper.make_tensor_value_info("y", kind, ["rows", 2])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = tmp_path / "net.onnx"
    onnx.save_model(model, str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    rows = np.random.default_rng(2).normal(size=(5, 3)).astype("float32")

    est = estimator(path)
    path.unlink()  # what was read travels
    close(est.predict(rows), rows @ weights)


def test_numbers_are_cast_where_nothing_is_lost(tmp_path: Path) -> None:
    x = named(ops.parameter([-1, 2], np.int32), "x")
    est = estimator(save(ov.Model([ops.multiply(x, ops.constant(np.int32(3)))], [x]), tmp_path / "net.xml"))

    np.testing.assert_array_equal(est.predict(np.array([[1, 2]], "int64")), [[3, 6]])
    with pytest.raises(DataError, match=r"is float32, and net.xml takes int32"):
        est.predict(np.array([[1.5, 2.0]]))
    with pytest.raises(DataError, match=r"takes int32"):
        est.predict(np.array([[2**40, 0]]))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (np.zeros((4, 3, 9, 8), "float32"), r"has the shape \[4, 3, 9, 8\]; net.xml takes \[rows, 3, 8, 8\]"),
        ([np.zeros((4, 3, 8, 8)), np.zeros(4)], r"takes 1 inputs \(image\), and the data has 2"),
    ],
)
def test_data_that_does_not_fit_is_refused_with_what_does(tmp_path: Path, data: Any, says: str) -> None:
    est = estimator(classifier(tmp_path / "net.xml", [-1, 3, 8, 8]))

    with pytest.raises((DataError, ConfigError), match=says):
        est.predict(data)


def test_files_that_are_not_models_are_refused_at_once(tmp_path: Path) -> None:
    broken = tmp_path / "broken.xml"
    broken.write_text("<net>")
    with pytest.raises(ConfigError, match=r"no file 'broken.bin' next to 'broken.xml'"):
        estimator(broken)
    broken.with_suffix(".bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"OpenVINO cannot load broken.xml"):
        estimator(broken)
    with pytest.raises(ConfigError, match=r"there is no file 'none.xml'"):
        estimator(tmp_path / "none.xml")
    with pytest.raises(ConfigError, match=r"nothing exists at this path"):
        estimator(tmp_path / "none.onnx")
    path = classifier(tmp_path / "net.xml", [-1, 3, 8, 8])
    with pytest.raises(ConfigError, match=r"threads must be a whole number of at least 1"):
        estimator(path, threads=0)
    with pytest.raises(ConfigError, match=r"OpenVINO properties are strings"):
        estimator(path, config={"X": object()})


def test_it_only_predicts_and_says_so(tmp_path: Path) -> None:
    est = estimator(classifier(tmp_path / "net.xml", [-1, 3, 8, 8]))
    labels = np.zeros(23)

    with pytest.raises(ConfigError, match=r"models of 'openvino' cannot train"):
        est.fit((IMAGES, labels))
    with pytest.raises(ConfigError, match=r"models of 'openvino' cannot evaluate"):
        est.evaluate((IMAGES, labels))
    with pytest.raises(ConfigError, match=r"to_openvino\('model.xml'\) writes both"):
        est.save(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"from_openvino\(model_path"):
        est.load_weights(tmp_path / "net.xml")


def test_a_whole_estimator_and_the_models_files_are_read_again(tmp_path: Path) -> None:
    est = estimator(classifier(tmp_path / "net.xml", [4, 3, 8, 8]), threads=1)
    est.save(tmp_path / "net.estimator")
    est.to_openvino(tmp_path / "again.xml")

    expected = est.predict(IMAGES)
    close(Estimator.load(tmp_path / "net.estimator", trusted=True).predict(IMAGES), expected)
    close(estimator(tmp_path / "again.xml").predict(IMAGES), expected)
    assert isinstance(est.get_model(), ov.Model)


def test_parquet_files_are_scored_by_processes_of_their_own(tmp_path: Path) -> None:
    path = two_inputs(tmp_path / "two.xml", rows=2)
    frame = pd.DataFrame({"a": [[float(i), 0.0, 1.0] for i in range(7)], "b": np.arange(7.0)})
    frame.to_parquet(tmp_path / "rows.parquet")
    est = estimator(path, workers=2, settings=RunSettings(threads=1))

    est.predict(str(tmp_path / "rows.parquet"), 3, ["a", "b"], output_path=tmp_path / "scored", verbose=0)
    scored = pd.read_parquet(tmp_path / "scored").sort_values("b")
    close(np.stack(scored["prediction_1"]), np.stack(frame["a"]) - frame["b"].to_numpy()[:, None])


def test_kindler_itself_does_not_import_openvino() -> None:
    program = "import sys, kindler; kindler.Estimator; assert 'openvino' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
