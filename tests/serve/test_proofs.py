"""Which kinds of models share calls between requests: only those whose rows are provably their own."""

from __future__ import annotations

import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from kindler import Store
from kindler.errors import DataError
from kindler.models.loaded import load, wrap
from kindler.models.predictor import free_rows
from kindler.serve.model_process import warmed
from tests.serve.served import linear, serving

ROWS = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
W = np.arange(6, dtype="float32").reshape(3, 2) - 2


def onnx_model(rows: int | str, output: str, shape: list[Any]) -> Any:
    """A layer whose rows are its own, and beside it an output that is something else."""
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    constant = onnx.numpy_helper.from_array
    others = {
        "priors": [helper.make_node("Identity", ["four"], ["z"])],
        "total": [helper.make_node("ReduceSum", ["x"], ["z"], keepdims=0)],
        "batch": [helper.make_node("Softmax", ["h"], ["z"], axis=0)],
        "flat": [helper.make_node("Reshape", ["h", "any"], ["z"])],
        "rows": [helper.make_node("Relu", ["h"], ["z"])],
    }
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), *others[output]],
        "layer",
        [helper.make_tensor_value_info("x", kind, [rows, 3])],
        [
            helper.make_tensor_value_info("h", kind, [rows, 2]),
            helper.make_tensor_value_info("z", kind, shape),
        ],
        [
            constant(W, "w"),
            constant(np.array([0.1, 0.2, 0.3, 0.4], "float32"), "four"),
            constant(np.array([-1]), "any"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def openvino_model(rows: int, output: str, shape: list[Any]) -> Any:
    ov = pytest.importorskip("openvino")
    ops = pytest.importorskip("openvino.opset13")
    x = ops.parameter([rows, 3], np.float32, name="x")
    x.output(0).tensor.names = {"x"}
    layer = ops.matmul(x, ops.constant(W), False, False)
    axes = ops.constant(np.array([0, 1]))
    made = {
        "priors": lambda: ops.add(
            ops.constant(np.array([0.1, 0.2, 0.3, 0.4], "float32")),
            ops.multiply(ops.reduce_sum(x, axes, False), ops.constant(np.float32(0))),
        ),
        "total": lambda: ops.reduce_sum(x, axes, False),
        "batch": lambda: ops.softmax(layer, 0),
        "flat": lambda: ops.reshape(layer, ops.constant(np.array([-1])), False),
        "rows": lambda: ops.relu(layer),
    }[output]()
    layer.output(0).tensor.names = {"h"}
    made.output(0).tensor.names = {"z"}
    return ov.Model([layer, made], [x], "layer")


KINDS = {"onnx": onnx_model, "openvino": openvino_model}
FREE = {"onnx": "rows", "openvino": -1}
OTHERS = {
    "priors": [4],
    "total": [],
    "batch": ["rows", 2],
    "flat": ["values"],
    "rows": ["rows", 2],
}


def loaded(tmp_path: Path, model: Any) -> Any:
    om = Store(tmp_path / "store")
    om.models.put(model, "net")
    servable = load(om.store, om.models.metadata("net"), trusted=False).predictor
    om.close()
    return servable


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("output", OTHERS)
def test_a_free_number_of_rows_is_shared_only_if_all_outputs_have_it(
    tmp_path: Path, kind: str, output: str
) -> None:
    servable = loaded(tmp_path, KINDS[kind](FREE[kind], output, OTHERS[output]))
    assert warmed(servable) == {"predict": output == "rows"}
    assert warmed(servable, batching=False) == {"predict": False}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("output", OTHERS)
def test_a_model_for_four_rows_is_never_shared_and_filled_up_only_if_its_rows_are_its_own(
    tmp_path: Path, kind: str, output: str
) -> None:
    shape = {"flat": [8], "priors": [4], "total": []}.get(output, [4, 2])
    servable = loaded(tmp_path, KINDS[kind](4, output, shape))
    assert warmed(servable) == {"predict": False}
    whole = servable.call({"x": ROWS[:4]}, "predict")
    if output == "rows":
        np.testing.assert_allclose(servable.call({"x": ROWS}, "predict")["z"], np.maximum(ROWS @ W, 0), 1e-6)
        return
    assert whole["z"].shape == tuple(shape)
    for rows in (1, 3, 5):
        with pytest.raises(DataError, match=f"takes 4 rows at a time, but the request has {rows}"):
            servable.call({"x": ROWS[:rows]}, "predict")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_for_one_row_is_called_row_by_row(tmp_path: Path, kind: str) -> None:
    servable = loaded(tmp_path, KINDS[kind](1, "rows", [1, 2]))
    assert warmed(servable) == {"predict": True}
    np.testing.assert_allclose(servable.call({"x": ROWS}, "predict")["h"], ROWS @ W, 1e-6)
    other = loaded(tmp_path / "other", KINDS[kind](1, "priors", [4]))
    assert warmed(other) == {"predict": False}
    assert other.call({"x": ROWS[:1]}, "predict")["z"].shape == (4,)
    with pytest.raises(DataError, match="takes 1 rows at a time, but the request has 2"):
        other.call({"x": ROWS[:2]}, "predict")


def test_names_of_lengths_must_be_the_same() -> None:
    assert free_rows([["n", 3], ["n"]], [["n", 2]])
    assert free_rows([[None, 3]], [[None]])
    for outputs in ([["m", 2]], [[4, 2]], [[]], [None], [["n"], [1]]):
        assert not free_rows([["n", 3]], outputs)


class Odd:
    """What a trusted store may hold."""

    def predict(self, x: Any) -> Any:
        return x - x.mean(axis=0)

    def transform(self, x: Any) -> Any:
        return x * 2


def test_scikit_learn_is_tried_when_it_is_loaded_and_functions_with_what_is_sent() -> None:
    assert warmed(wrap(linear()).predictor) == {"predict": True}
    assert warmed(wrap(Odd()).predictor) == {"predict": None, "transform": None}
    classes = LogisticRegression().fit(np.eye(3), [0, 1, 2])
    assert set(warmed(wrap(classes).predictor).values()) == {True}


COLOURS = pd.DataFrame({"colour": ["red", "blué", "red", "green"]})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with models of text, and with ones that their owner, or the server's, does not let join."""
    folder = tmp_path_factory.mktemp("texts") / "store"
    om = Store(folder)
    encoder = make_column_transformer((OneHotEncoder(handle_unknown="ignore"), ["colour"]))
    model = make_pipeline(encoder, LogisticRegression(C=1e6)).fit(COLOURS, COLOURS["colour"])
    om.models.put(model, "colours")
    om.models.put(model, "declared", attributes={"batching": True})
    om.models.put(linear(), "alone", attributes={"batching": False})
    om.models.put(linear(), "kept")
    om.close()
    with (
        serving(folder, "--alone", "kept") as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        yield client


def test_text_is_text_in_all_protocols(texts: httpx.Client) -> None:
    words = COLOURS["colour"].tolist()
    raw = [word.encode() for word in words]
    tensor: dict[str, Any] = {"name": "x", "shape": [4, 1], "datatype": "BYTES"}
    packed = b"".join(struct.pack("<I", len(word)) + word for word in raw)
    head = {"inputs": [{**tensor, "parameters": {"binary_data_size": len(packed)}}]}
    encoded = [base64.b64encode(word).decode() for word in raw]
    infer, model = "/v2/models/colours/infer", "/api/v1/model/colours/predict"
    replies = [
        texts.post(infer, json={"inputs": [{**tensor, "data": words}]}),
        texts.post(
            infer,
            json={"inputs": [{**tensor, "data": encoded, "parameters": {"content_type": "base64"}}]},
        ),
        texts.post(
            infer,
            content=(start := json.dumps(head).encode()) + packed,
            headers={"inference-header-content-length": str(len(start))},
        ),
        texts.post("/v1/models/colours:predict", json={"instances": [[word] for word in words]}),
        texts.post("/v1/models/colours:predict", json={"instances": [[{"b64": word}] for word in encoded]}),
        texts.post("/models/colours/invocations", json={"dataframe_split": COLOURS.to_dict(orient="split")}),
        texts.put(model, json={"data": {"colour": words}}),
    ]
    for kind in (pa.string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int8(), pa.binary())):
        sink, parquet = pa.BufferOutputStream(), io.BytesIO()
        table = pa.table({"colour": pa.array(raw, pa.binary()).cast(kind)})
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        pq.write_table(table, parquet)
        arrow = {"content-type": "application/vnd.apache.arrow.stream"}
        replies.append(texts.put(model, content=sink.getvalue().to_pybytes(), headers=arrow))
        headers = {"content-type": "application/vnd.apache.parquet"}
        replies.append(texts.post("/models/colours/invocations", content=parquet.getvalue(), headers=headers))
    for i, reply in enumerate(replies):
        assert reply.status_code == 200, (i, reply.text)
        told = reply.json()
        found = told.get("predictions") or told.get("result") or told["outputs"][0]["data"]
        assert found == words, i


def test_bytes_that_are_no_text_are_refused(texts: httpx.Client) -> None:
    tensor = {"name": "x", "shape": [1, 1], "datatype": "BYTES", "parameters": {"content_type": "base64"}}
    reply = texts.post("/v2/models/colours/infer", json={"inputs": [{**tensor, "data": ["/w=="]}]})
    assert (reply.status_code, "not valid UTF-8" in reply.json()["error"]) == (400, True)
    reply = texts.post("/v1/models/colours:predict", json={"instances": [[{"b64": "/w=="}]]})
    assert (reply.status_code, "not valid UTF-8" in reply.json()["error"]) == (400, True)


def test_batching_can_be_turned_off_and_on_for_a_model(texts: httpx.Client) -> None:
    for name in ("alone", "kept", "colours", "declared"):
        texts.get(f"/v2/models/{name}").raise_for_status()
    words = {"data": {"colour": ["red", "green"]}}
    texts.put("/api/v1/model/colours/predict", json=words).raise_for_status()
    # Nothing can be made up that the model of text takes, and what clients send is not tried.
    batched = {"alone": False, "kept": False, "colours": False, "declared": True}
    shown = texts.get("/api/v1/stats").json()["loaded"]
    assert {m["name"]: m["batches_join"] for m in shown} == batched


def test_an_unknown_signature_is_refused_with_the_known_ones(texts: httpx.Client) -> None:
    body = {"instances": [[1.0, 1.0, 1.0]]}
    url = "/v1/models/kept:predict"
    for name in ("serving_default", "", None):
        assert texts.post(url, json={**body, "signature_name": name}).status_code == 200
    reply = texts.post(url, json={**body, "signature_name": "other"})
    assert reply.status_code == 400
    assert reply.json()["error"] == "the model has no signature 'other'; available: 'serving_default'."
    assert texts.post(url, json={**body, "signature_name": 3}).status_code == 400
