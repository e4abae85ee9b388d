"""Requests that a server logs to datasets of the store: all protocols, without what is redacted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import tritonclient.grpc as triton
from sklearn.linear_model import LinearRegression

from kindler import Store
from kindler.cli import main
from kindler.errors import ConfigError
from kindler.models.signature import Signature, TensorSpec
from kindler.serve.app import create_app
from kindler.serve.payloads import PayloadLog, PayloadSample
from kindler.serve.settings import ServeSettings
from kindler.store import Version
from tests.serve.served import NAMES, X, linear, serving

SECRET = 987654.0
OWN = ["_request_id", "_time", "_model", "_version", "_row"]
DAY_S = 86400


@pytest.fixture
def om(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as made:
        made.models.put(LinearRegression().fit(pd.DataFrame(X, columns=NAMES), X[:, 0]), "frame")
        made.models.put(linear(), "plain")
        yield made


def test_requests_of_every_protocol_are_logged_without_the_redacted_column(om: Store) -> None:
    om.models.put(om.models.get("frame"), "taken")
    om.datasets.put(pd.DataFrame({"mine": [1]}), "payloads/taken/1")
    row = [1.0, SECRET, 3.0]
    columns = {"a": [1.0], "b": [SECRET], "c": [3.0]}
    tensor = {"name": "b_by_another_name", "shape": [1, 3], "datatype": "FP64", "data": row}
    asked = {
        "rest": ("PUT", "/api/v1/model/frame/predict", {"columns": NAMES, "data": columns}),
        "tfs": ("POST", "/v1/models/frame:predict", {"instances": [row]}),
        "v2": ("POST", "/v2/models/frame/infer", {"inputs": [tensor]}),
        "mlflow": ("POST", "/invocations", {"dataframe_split": {"columns": NAMES, "data": [row]}}),
        "plain": ("POST", "/v1/models/plain:predict", {"instances": [row]}),
        "taken": ("POST", "/v1/models/taken:predict", {"instances": [row]}),
    }
    arguments = ["--log-payloads", "1", "--redact-columns", "b", "--payload-s", "600", "--model", "frame"]
    with (
        serving(om.store.url, *arguments, "--grpc-port", "0") as served,
        httpx.Client(base_url=served.url, timeout=120) as client,
        triton.InferenceServerClient(served.grpc) as grpc,
    ):
        for name, (method, path, body) in asked.items():
            reply = client.request(method, path, json=body, headers={"x-request-id": name})
            assert reply.status_code == 200, reply.text
        one = triton.InferInput("x", [1, 3], "FP64")
        one.set_data_from_numpy(np.array([row]))
        grpc.infer("frame", [one], headers={"x-request-id": "grpc"})
        metrics = client.get("/metrics").text
        assert 'kindler_payload_rows_total{model="plain",outcome="columns",version="1"} 1.0' in metrics
        assert served.stop() == 0  # nothing was written before

    logged = om.datasets.get("payloads/frame/1", as_="pandas")
    assert list(logged.columns) == [*OWN, "a", "c", "prediction"]
    assert set(logged["_request_id"]) == {"rest", "tfs", "v2", "mlflow", "grpc"}
    assert (logged["a"] == 1).all()
    assert (logged["c"] == 3).all()
    assert np.allclose(logged["prediction"], 1.0)
    assert {*logged["_model"], *logged["_version"]} == {"frame", 1}
    assert not (logged.select_dtypes("number") == SECRET).any(axis=None)
    assert list(om.datasets.get("payloads/taken/1").columns) == ["mine"]
    assert not om.datasets.exists("payloads/plain/1")


def test_settings_that_cannot_be_meant_are_refused_before_anything_is_served(
    om: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for settings, why in (
        ({"log_payloads": {"frme": 1.0}}, "the store has no model 'frme'"),
        ({"log_payloads": {"*": 1.0}, "redact_columns": {"frme": ("a",)}}, "the store has no model 'frme'"),
        ({"log_payloads": {"side:frame": 1.0}}, "the store has no model 'side:frame'"),
        ({"log_payloads": {"*": 1.5}}, "must be from 0 to 1; received 1.5"),
        ({"redact_columns": {"*": ("a",)}}, "redact_columns needs log_payloads"),
    ):
        with pytest.raises(ConfigError, match=why):
            create_app(om, ServeSettings(**settings))
    for arguments, why in (
        (["--log-payloads", "frame=all"], "'all': must be a number from 0 to 1"),
        (["--log-payloads", "1", "--log-payloads", "0.5"], "set more than once"),
    ):
        assert main(["serve", "--store", om.store.url, *arguments]) != 0
        assert why in capsys.readouterr().err


class Kept:
    """A log and one sample, without a server."""

    def __init__(
        self,
        om: Store,
        *,
        names: tuple[str, ...] | None = None,
        inputs: tuple[str, ...] = ("x",),
        clock: Any = None,
        version: Version | None = None,
        **settings: Any,
    ) -> None:
        made = ServeSettings(**{"log_payloads": {"*": 1.0}, **settings})
        self.threads, self.counts = ThreadPoolExecutor(1), Counter[str]()
        options = {} if clock is None else {"clock": clock}
        signature = Signature(tuple(TensorSpec(name) for name in inputs), columns=names)

        async def begin() -> PayloadLog:
            return PayloadLog(om, made, self.threads, **options)

        self.log = asyncio.run(begin())
        sample = self.log.sample(version or om.models.metadata("frame"), signature, self.counts)
        assert sample is not None
        self.sample: PayloadSample = sample

    def add(self, request_id: str, inputs: dict[str, Any], **outputs: Any) -> None:
        rows = len(next(iter(inputs.values())))
        self.sample.add(request_id, inputs, outputs or {"y": np.zeros(rows)}, rows)

    def flush(self) -> Counter[str]:
        asyncio.run(self.log.flush())
        return self.counts


def logged(om: Store) -> pd.DataFrame:
    frame: pd.DataFrame = om.datasets.get("payloads/frame/1", as_="pandas")
    return frame


def test_a_name_that_a_model_does_not_have_keeps_all_its_payloads_out_and_is_said_once(
    om: Store, caplog: pytest.LogCaptureFixture
) -> None:
    joined = {"x": np.ones((2, 3))}
    for names, redacted in ((NAMES, "B"), (None, "b"), (("a", "b"), "b")):  # typo, no names, other width
        kept = Kept(om, names=None if names is None else tuple(names), redact_columns={"*": (redacted,)})
        caplog.clear()
        kept.add("one", joined)
        kept.add("two", joined)
        assert kept.flush() == {"columns": 4}
        [said] = [record.message for record in caplog.records]
        assert f"'{redacted}' must be redacted, and the model has no such column" in said
    assert not om.datasets.exists("payloads/frame/1")


def test_a_redacted_input_takes_its_columns_along_and_outputs_have_two_names(om: Store) -> None:
    rows = {"x": np.ones((1, 2)), "z": np.ones(1)}
    both = ["prediction_0", "prediction_1"]
    for redacted, left in (
        (("x",), ["z", *both]),
        (("u",), ["x", "z", *both[1:]]),
    ):
        kept = Kept(om, inputs=("x", "z"), redact_columns={"*": redacted})
        kept.add("one", rows, u=np.ones(1), v=np.ones(1))
        assert kept.flush() == {"written": 1}
        assert list(logged(om).columns) == [*OWN, *left]
        om.datasets.drop("payloads/frame/1")
    kept = Kept(om, names=("a", "b"), redact_columns={"*": ("x", "prediction")})
    kept.add("one", {"x": np.ones((1, 2))})
    kept.flush()
    assert list(logged(om).columns) == OWN


def test_a_column_that_is_redacted_later_goes_from_the_rows_before_too(om: Store) -> None:
    first = Kept(om, names=("a", "b"))
    first.add("one", {"x": np.array([[1.0, SECRET]])})
    first.flush()
    second = Kept(om, names=("a", "b"), redact_columns={"frame": ("b",), "*": ("nothing",)})
    second.add("two", {"x": np.array([[2.0, SECRET]])})
    second.flush()

    frame = logged(om)
    assert frame[["_request_id", "a"]].to_numpy().tolist() == [["one", 1.0], ["two", 2.0]]
    assert "b" not in frame.columns
    assert len(om.datasets.versions("payloads/frame/1")) == 1


def test_values_of_every_form_can_be_read_back_and_what_has_names_inside_is_left_out(om: Store) -> None:
    kept = Kept(om, inputs=("x", "image", "text"))
    forms: list[Any] = ["plain", None, b"\xff", 3, {"ssn": SECRET}, [["a"], {"ssn": SECRET}], "\ud800", 2**80]
    for i, form in enumerate(forms):
        text = np.empty(1, object)
        text[0] = form
        kept.add(str(i), {"x": np.array([i], np.float32), "image": np.full((1, 2, 3), i, "u1"), "text": text})
    assert kept.flush() == {"written": 8}
    other = Kept(om, inputs=("x", "image", "text"))
    other.add("8", {"x": np.array(["now a text"], object), "image": np.zeros((1, 1, 1)), "text": np.ones(1)})
    assert other.flush() == {"written": 1}

    frame = logged(om)
    texts = ["plain", None, "\ufffd", "3", None, "[['a'], None]", "?", str(2**80), "1.0"]
    assert [value if isinstance(value, str) else None for value in frame["text"]] == texts
    assert [str(value) for value in frame["x"]] == [*map(str, map(float, range(8))), "now a text"]
    assert [[list(line) for line in value] for value in frame["image"][1:2]] == [[[1, 1, 1]] * 2], frame[
        "image"
    ][1]
    assert str(SECRET) not in str(frame.to_dict())


def test_of_a_large_request_some_rows_are_kept_and_a_row_that_is_too_large_is_not(om: Store) -> None:
    kept = Kept(om)
    kept.add("rows", {"x": np.arange(100_000.0)})
    kept.add("wide", {"x": np.zeros((1, 200_000))})
    kept.add("text", {"x": np.array(["x" * (2 << 20)], object)})
    nested = np.empty(1, object)
    nested[0] = [[1] * 5000] * 5000
    kept.add("nested", {"x": nested})
    kept.add("shape", {"x": np.zeros(3)}, y=np.float64(1))

    assert kept.flush() == {"written": 1000, "large": 3, "shape": 3}
    frame = logged(om)
    assert (frame["_row"].iloc[0], frame["_row"].iloc[-1]) == (0, 99_999)
    assert (frame["_row"] == frame["x"]).all()


def test_a_store_that_hangs_costs_answers_nothing_and_memory_is_bounded(
    om: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()
    put = type(om.datasets).put
    monkeypatch.setattr(type(om.datasets), "put", lambda *a, **k: free.wait(60) and put(*a, **k))
    kept = Kept(om, drain_s=0)

    async def ask() -> None:
        writing = asyncio.create_task(kept.log.flush())
        await asyncio.sleep(0)
        for i in range(70):
            kept.add(f"during {i}", {"x": np.zeros((1000, 120))})
        await kept.log.close()  # gives up
        free.set()
        await writing

    kept.add("before", {"x": np.zeros(1)})
    asyncio.run(ask())
    kept.threads.shutdown()

    assert kept.counts["full"] == 70_000 - 34_000
    assert kept.counts["written"] == 1


def test_what_is_too_much_goes_and_files_and_versions_stay_few(om: Store) -> None:
    kept = Kept(om, payload_bytes=100_000)
    times = iter(range(10_000))
    for _ in range(80):
        kept.add(f"request {next(times)}", {"x": np.zeros((2, 1))})
        kept.flush()
    stored = om.datasets.metadata("payloads/frame/1")
    assert len(stored.files) < 64
    assert [version.number for version in om.datasets.versions("payloads/frame/1")] == [stored.number]
    assert len(logged(om)) == 160

    for _ in range(20):
        kept.add(f"request {next(times)}", {"x": np.zeros((1000, 1))})
        kept.flush()
    frame = logged(om)
    assert pa.Table.from_pandas(frame).nbytes < 110_000
    assert frame["_request_id"].iloc[-1] == "request 99"
    assert frame["_request_id"].iloc[0] != "request 0"


def test_rows_expire_also_where_nobody_asks_any_more_and_own_datasets_do_not(
    om: Store,
) -> None:
    om.datasets.put(pa.table({"_time": pa.array([0], pa.timestamp("ms", "UTC"))}), "payloads/mine")
    old = Kept(om)
    old.add("old", {"x": np.zeros(1)})
    old.flush()
    later = Kept(om, clock=lambda: time.time() + 31 * DAY_S, version=om.models.metadata("plain"))
    later.flush()

    assert len(logged(om)) == 0
    assert om.datasets.get("payloads/mine").num_rows == 1


def test_servers_that_write_to_one_dataset_lose_no_row(om: Store) -> None:
    def write(server: int) -> None:
        kept = Kept(om)
        for i in range(5):
            kept.add(f"{server} {i}", {"x": np.zeros(1)})
            assert kept.flush() == {"written": i + 1}

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    assert sorted(logged(om)["_request_id"]) == sorted(f"{s} {i}" for s in range(3) for i in range(5))
