"""ONNX and OpenVINO models: put, got, served, exported; they answer as numpy does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kindler import Store
from kindler.errors import ConfigError, DataError
from kindler.models.loaded import load

X = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
W = np.arange(6, dtype="float32").reshape(3, 2) - 2
EXPECTED = np.maximum(X @ W, 0)


@pytest.fixture
def om(tmp_path: Path) -> Iterator[Store]:
    omega = Store(tmp_path / "store")
    yield omega
    omega.close()


def onnx_model(rows: int | str = "rows") -> Any:
    """A layer with a ReLU, for any number of rows or for one."""
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "layer",
        [helper.make_tensor_value_info("x", kind, [rows, 3])],
        [helper.make_tensor_value_info("y", kind, [rows, 2])],
        [onnx.numpy_helper.from_array(W, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def openvino_model(rows: int = -1) -> Any:
    ov = pytest.importorskip("openvino")
    ops = pytest.importorskip("openvino.opset13")
    x = ops.parameter([rows, 3], np.float32, name="x")
    x.output(0).tensor.names = {"x"}
    layer = ops.relu(ops.matmul(x, ops.constant(W), False, False))
    layer.output(0).tensor.names = {"y"}
    return ov.Model([layer], [x], "layer")


MODELS = [onnx_model, openvino_model]


def answered(om: Store, name: str) -> Any:
    predictor = load(om.store, om.models.metadata(name), trusted=False).predictor
    (spec,) = predictor.signature.inputs
    assert (spec.name, spec.dtype, spec.shape) == ("x", "float32", (None, 3))
    return predictor.call({"x": X}, "predict")["y"]


@pytest.mark.parametrize("make", MODELS)
def test_a_stored_model_answers_as_numpy_does(om: Store, make: Any) -> None:
    om.models.put(make(), "net")

    np.testing.assert_allclose(answered(om, "net"), EXPECTED, rtol=1e-6)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_model_for_a_fixed_number_of_rows_takes_any_number(om: Store, make: Any, rows: int) -> None:
    om.models.put(make(rows), "net")

    np.testing.assert_allclose(answered(om, "net"), EXPECTED, rtol=1e-6)


def test_files_come_back_as_they_were_with_those_beside_them(om: Store, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "net.onnx"
    onnx.save_model(onnx_model(), path, save_as_external_data=True, location="net.weights", size_threshold=0)
    om.models.put(path, "net")

    np.testing.assert_allclose(answered(om, "net"), EXPECTED, rtol=1e-6)
    folder = om.models.get("net", local=tmp_path / "got")
    for name in ("net.onnx", "net.weights"):
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes()


def test_openvino_files_are_served(om: Store, tmp_path: Path) -> None:
    ov = pytest.importorskip("openvino")
    ov.save_model(openvino_model(), tmp_path / "net.xml", compress_to_fp16=False)
    om.models.put(tmp_path / "net.xml", "net")

    np.testing.assert_allclose(answered(om, "net"), EXPECTED, rtol=1e-6)
    (tmp_path / "net.bin").unlink()
    with pytest.raises(ConfigError, match="is not next to it"):
        om.models.put(tmp_path / "net.xml", "net")


def test_a_file_that_its_runtime_cannot_load_is_named(om: Store, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    (tmp_path / "net.xml").write_text("<net>")
    (tmp_path / "net.bin").write_bytes(b"")
    om.models.put(tmp_path / "net.xml", "net")

    with pytest.raises(ConfigError, match=r"OpenVINO cannot load net\.xml"):
        answered(om, "net")


@pytest.mark.parametrize("make", MODELS)
def test_mlflow_loads_what_was_exported(om: Store, tmp_path: Path, make: Any) -> None:
    mlflow = pytest.importorskip("mlflow")
    om.models.put(make(), "net")

    loaded = mlflow.pyfunc.load_model(str(om.models.export_mlflow("net", tmp_path / "model")))

    np.testing.assert_allclose(loaded.predict(X), EXPECTED, rtol=1e-6)
    assert loaded.metadata.signature.outputs.to_dict()[0]["tensor-spec"]["shape"] == (-1, 2)


@pytest.mark.parametrize("make", MODELS)
def test_get_returns_a_callable_that_takes_arrays_lists_names_and_tables(om: Store, make: Any) -> None:
    pd, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    om.models.put(make(), "net")

    model = om.models.get("net")

    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    for rows in (X, X.tolist(), {"x": X}, (X,), frame, pa.Table.from_pandas(frame)):
        np.testing.assert_allclose(model(rows), EXPECTED, rtol=1e-6)
    with pytest.raises(DataError, match=r"has the shape \[5, 2\]; the model takes \[rows, 3\]"):
        model(X[:, :2])
    with pytest.raises(ConfigError, match="the model has no 'transform'; it has predict"):
        model(X, method="transform")


@pytest.mark.parametrize("make", MODELS)
def test_the_runtime_predicts_with_it_and_says_what_it_does_not_have(om: Store, make: Any) -> None:
    om.models.put(make(), "net")
    om.datasets.put(X, "rows")
    net = om.runtime.model("net")

    np.testing.assert_allclose(net.predict("rows").get(60), EXPECTED, rtol=1e-6)
    for call, complaint in (
        (net.score("rows"), "models of kind '(onnx|openvino)' have no score; they have predict"),
        (net.fit("rows"), "cannot be trained by the runtime"),
        (net.predict("rows", batch_size=2), "unexpected option batch_size"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            call.get(60)


def test_an_onnx_model_computes_on_the_device_that_was_asked_for_or_is_refused_with_the_providers(
    om: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = om.models.put(onnx_model(), "net")
    runtime = pytest.importorskip("onnxruntime")
    asked: list[Any] = []
    session = runtime.InferenceSession

    def opened(path: str, providers: list[Any]) -> Any:
        asked.append([one if isinstance(one, str) else one[0] for one in providers])
        return session(path, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(runtime, "InferenceSession", opened)
    with pytest.raises(
        ConfigError, match=r"(?s)providers .* here, but not CUDAExecutionProvider.*onnxruntime-gpu"
    ):
        load(om.store, version, trusted=False, device="cuda")
    for device in ("cpu", "auto"):
        loaded = load(om.store, version, trusted=False, device=device)
        assert loaded.kind.device == "cpu"
        np.testing.assert_allclose(loaded.predictor.call({"x": X}, "predict")["y"], EXPECTED, rtol=1e-6)

    cuda = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(runtime, "get_available_providers", lambda: ["TensorrtExecutionProvider", *cuda])
    # It is listed, and its libraries are missing: onnxruntime only warns of that.
    assert load(om.store, version, trusted=False, device="auto").kind.device == "cpu"
    with pytest.raises(ConfigError, match="could not load CUDAExecutionProvider, and uses CPU"):
        load(om.store, version, trusted=False, device="cuda")
    assert asked == [["CPUExecutionProvider"]] * 2 + [cuda] * 2


def test_openvino_models_refuse_a_gpu(om: Store) -> None:
    version = om.models.put(openvino_model(), "net")
    with pytest.raises(ConfigError, match="requested; models of kind 'openvino' compute on the CPU"):
        load(om.store, version, trusted=False, device="cuda")
    assert load(om.store, version, trusted=False, device="auto").kind.device == "cpu"
