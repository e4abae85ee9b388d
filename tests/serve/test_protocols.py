"""Unmodified clients of four protocols, and bodies without text, against a real server."""

from __future__ import annotations

import io
import json
import subprocess
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from kindler.models.signature import Signature
from kindler.serve.protocols import RawRequest, Target
from kindler.serve.protocols.mlflow import Mlflow
from tests.serve.served import NAMES, Served, X, expected

ARROW = "application/vnd.apache.arrow.stream"
ROWS = X[:4]


def test_triton_client_in_binary_and_in_json(server: Served) -> None:
    triton = pytest.importorskip("tritonclient.http")
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("net")
        assert client.is_model_ready("net", "1")
        told = client.get_model_metadata("net", "prod")
        assert told["inputs"] == [{"name": "x", "datatype": "FP64", "shape": [-1, 3]}]
        for binary in (True, False):
            given = triton.InferInput("x", list(ROWS.shape), "FP64")
            given.set_data_from_numpy(ROWS, binary_data=binary)
            wanted = [triton.InferRequestedOutput("predict", binary_data=binary)]
            for outputs in (wanted, None):
                result = client.infer("net", [given], request_id="7", outputs=outputs)
                np.testing.assert_allclose(result.as_numpy("predict"), expected(ROWS))
                assert result.get_response()["id"] == "7"
        first = client.infer("net", [given], model_version="1", request_compression_algorithm="gzip")
        assert first.as_numpy("predict").tolist() == [1.0] * 4
        assert first.get_response()["model_version"] == "1"


def test_v2_chooses_the_method_by_the_output_that_is_asked_for(client: httpx.Client) -> None:
    inputs = [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [[1, 0, 0]]}]
    body = {"inputs": inputs, "outputs": [{"name": "predict_proba"}]}
    (output,) = client.post("/v2/models/team/frame/infer", json=body).json()["outputs"]
    assert output["shape"] == [1, 2]
    assert sum(output["data"]) == pytest.approx(1)


def test_v2_takes_a_body_of_nothing_but_the_tensor(client: httpx.Client) -> None:
    headers = {"Inference-Header-Content-Length": "0"}
    reply = client.post("/v2/models/net/infer", content=ROWS.tobytes(), headers=headers)
    length = int(reply.headers["inference-header-content-length"])
    np.testing.assert_allclose(np.frombuffer(reply.content[length:]), expected(ROWS))


@pytest.mark.parametrize(
    "where", ["net", "net/versions/2", "net/labels/prod", "net@prod", "net@2", "net@latest"]
)
def test_tensorflow_serving_by_rows_and_by_columns(client: httpx.Client, where: str) -> None:
    url = f"/v1/models/{where}:predict"
    rows = client.post(url, json={"signature_name": "serving_default", "instances": ROWS.tolist()})
    assert rows.json() == {"predictions": pytest.approx(expected(ROWS))}
    named = client.post(url, json={"instances": [{"x": row} for row in ROWS.tolist()]})
    assert named.json() == rows.json()
    columns = client.post(url, json={"inputs": {"x": ROWS.tolist()}})
    assert columns.json() == {"outputs": rows.json()["predictions"]}


def test_tensorflow_serving_tells_versions_and_signatures(client: httpx.Client) -> None:
    states = client.get("/v1/models/net").json()["model_version_status"]
    assert [(s["version"], s["state"]) for s in states] == [("2", "AVAILABLE"), ("1", "AVAILABLE")]
    told = client.get("/v1/models/net/labels/prod/metadata").json()
    assert told["model_spec"] == {"name": "net", "signature_name": "", "version": "2"}
    (given,) = told["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"].values()
    assert given["dtype"] == "DT_DOUBLE"


FRAME = pd.DataFrame(ROWS, columns=NAMES)
SPLIT = FRAME.to_dict(orient="split")


@pytest.mark.parametrize(
    "body",
    [
        {"dataframe_split": SPLIT},
        {"dataframe_records": FRAME.to_dict(orient="records")},
        {"instances": ROWS.tolist()},
        {"inputs": ROWS.tolist(), "params": {"unknown": 1}},
        {"inputs": {"x": ROWS.tolist()}},
    ],
    ids=lambda body: next(iter(body)),
)
def test_mlflow_in_all_its_forms(client: httpx.Client, body: dict[str, Any]) -> None:
    assert client.get("/ping").status_code == client.get("/version").status_code == 200
    reply = client.post("/invocations", json=body)
    assert reply.json() == {"predictions": pytest.approx(expected(ROWS))}
    assert client.post("/models/net@prod/invocations", json=body).json() == reply.json()


def test_mlflow_has_nulls_among_numbers_as_nan() -> None:
    records = {"dataframe_records": [{"a": 1, "s": "x"}, {"a": None, "s": None}]}
    split = {"dataframe_split": {"columns": ["a", "s"], "data": [[1, "x"], [None, None]]}}
    for body in (records, split):
        sent = RawRequest(json.dumps(body).encode(), {"content-type": "application/json"}, {})
        found = Mlflow().decode(sent, Signature(()), Target("net")).inputs
        np.testing.assert_array_equal(found["a"], [1.0, np.nan])
        assert found["s"].tolist() == ["x", None]


def test_mlflow_takes_csv_parquet_and_arrow_and_no_other(client: httpx.Client) -> None:
    parquet, arrow = io.BytesIO(), pa.BufferOutputStream()
    FRAME.to_parquet(parquet)
    table = pa.table({name: FRAME[name] for name in NAMES})
    with pa.ipc.new_stream(arrow, table.schema) as writer:
        writer.write_table(table)
    bodies = {
        "text/csv; charset=utf-8": FRAME.to_csv(index=False).encode(),
        "application/vnd.apache.parquet": parquet.getvalue(),
        ARROW: arrow.getvalue().to_pybytes(),
    }
    for kind, body in bodies.items():
        reply = client.post("/invocations", content=body, headers={"content-type": kind})
        assert reply.json() == {"predictions": pytest.approx(expected(ROWS))}, kind
    other = client.post("/invocations", content=b"x", headers={"content-type": "image/png"})
    assert (other.status_code, other.headers["content-type"]) == (415, "text/plain")


def test_omega_by_columns_by_rows_and_with_a_shape(client: httpx.Client) -> None:
    url = "/api/v1/model/net/predict"
    by_column = client.put(url, json={"columns": NAMES, "data": FRAME.to_dict(orient="list")}).json()
    assert by_column["result"] == pytest.approx(expected(ROWS))
    assert by_column["model"] == by_column["resource_uri"] == "net"
    assert (by_column["shape"], by_column["dtype"]) == ([4], "float64")
    assert (
        client.put(url, json={"columns": NAMES, "data": FRAME.to_dict(orient="records")}).json() == by_column
    )
    flattened = [{"x": row} for row in ROWS.tolist()]
    assert client.put(url, json={"columns": ["x"], "data": flattened, "shape": [3]}).json() == by_column
    assert client.put(f"{url}?datax=two", json={}).json()["result"] == pytest.approx(expected(X[:2]))
    assert len(client.put(f"{url}?datax=rows", json={}).json()["result"]) == len(X)


def test_omega_keeps_shapes_takes_versions_and_other_methods(client: httpx.Client) -> None:
    data = {"data": {name: [1.0, -1.0] for name in NAMES}}
    proba = client.put("/api/v1/model/team/frame/predict_proba", json=data).json()
    assert proba["shape"] == [2, 2]
    flat = client.put("/api/v1/model/team/frame/predict_proba?flat=1", json=data).json()
    assert flat["result"] == [value for row in proba["result"] for value in row]
    older = client.put("/api/v1/model/net^/predict", json=data).json()
    assert (older["result"], older["version"]) == ([1.0, 1.0], 1)
    missing = client.put("/api/v1/model/net/predict_proba", json=data)
    assert (missing.status_code, "has no method predict_proba" in missing.json()["message"]) == (400, True)


def test_arrow_and_raw_bodies_come_and_go_without_text(client: httpx.Client) -> None:
    url = "/api/v1/model/net/predict"
    sink = pa.BufferOutputStream()
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(ROWS)
    table = pa.table({"x": tensor})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    headers = {"content-type": ARROW, "accept": ARROW}
    reply = client.put(url, content=sink.getvalue().to_pybytes(), headers=headers)
    np.testing.assert_allclose(
        pa.ipc.open_stream(reply.content).read_all()["predict"].to_numpy(), expected(ROWS)
    )

    headers = {"content-type": "application/octet-stream", "accept": "application/octet-stream"}
    reply = client.put(f"{url}?dtype=float64&shape=4,3", content=ROWS.tobytes(), headers=headers)
    assert (reply.headers["x-dtype"], reply.headers["x-shape"]) == ("float64", "4")
    np.testing.assert_allclose(np.frombuffer(reply.content), expected(ROWS))


def test_datasets_are_read_by_condition_written_and_dropped(client: httpx.Client) -> None:
    above = client.get("/api/v1/dataset/rows", params={"a__gt": "0", "orient": "list"}).json()
    assert above["data"]["a"] == [value for value in X[:, 0] if value > 0]
    assert client.get("/api/v1/dataset/rows?limit=2&orient=records").json()["data"] == [
        dict(zip(NAMES, row, strict=True)) for row in X[:2].tolist()
    ]
    arrow = client.get("/api/v1/dataset/rows", headers={"accept": ARROW})
    assert pa.ipc.open_stream(arrow.content).read_all().num_rows == len(X)

    url, body = "/api/v1/dataset/made", {"data": {"n": [1, 2], "s": ["x", "y"]}, "dtypes": {"n": "int32"}}
    assert client.put(url, json=body).json() == {"dataset": "made", "version": 1}
    assert client.put(url, json=body).status_code == 409
    assert client.put(url, json={**body, "append": True}).json()["version"] == 2
    assert client.get(url, params={"n": "2", "orient": "list"}).json()["data"] == {
        "n": [2, 2],
        "s": ["y", "y"],
    }
    assert client.get(url).json()["columns"]["n"] == "int32"
    assert client.delete(url).status_code == 200
    assert client.delete(url).status_code == client.get(url).status_code == 404


def test_what_there_is_can_be_asked(client: httpx.Client) -> None:
    models = client.get("/api/v1/models").json()["models"]
    assert [(m["name"], m["version"], m["tags"]) for m in models][:2] == [
        ("net", 2, {"prod": 2}),
        ("team/frame", 1, {}),
    ]
    told = client.get("/api/v1/model/team/frame/signature").json()
    assert (told["columns"], told["methods"][:2]) == (NAMES, ["predict", "predict_proba"])
    model = client.get("/api/v1/model/net").json()["result"]
    assert [v["version"] for v in model["versions"]] == [2, 1]
    assert model["versions"][0]["tags"] == ["prod"]
    stats = client.get("/api/v1/stats").json()
    assert stats["models"]["team/frame"]["batches"] >= 0
    assert {"p50", "p99"} <= stats["latency_ms"].keys()
    assert client.get("/api/v1/key").json()["open"] is True
    assert "kindler_requests_total" in client.get("/metrics").text


def test_stored_code_is_not_run_by_a_server_that_was_not_told_to_trust_it(client: httpx.Client) -> None:
    reply = client.post("/api/v1/script/code/run", json="/a/b")
    assert reply.status_code == 403
    assert "trusted" in reply.json()["message"]


def test_curl(server: Served) -> None:
    url = f"{server.url}/api/v1/model/net/predict"
    command = ["curl", "-s", "-X", "PUT", url, "-d", '{"data":[[1,1,1]]}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert '"result":[6' in done.stdout or '"result":[5.9' in done.stdout
