"""A few bytes that stand for gigabytes, and bodies that take long to read: nobody else notices."""

from __future__ import annotations

import gzip
import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kindler import Store, sandbox
from kindler.models.signature import Signature, TensorSpec
from kindler.serve.bodies import where_read
from kindler.serve.http_errors import Problem
from kindler.serve.predictions import codec_of
from kindler.serve.protocols import RawRequest, Target
from kindler.serve.protocols.tables import read_arrow
from kindler.serve.protocols.v2 import TooManyTexts
from kindler.serve.protocols.values import as_tensor
from tests.serve.served import Served, linear, serving
from tests.serve.test_hostile import arrow_of

ARROW, PARQUET = "application/vnd.apache.arrow.stream", "application/vnd.apache.parquet"
SIGNATURE = Signature((TensorSpec("x", "float64", (None, 3)),), ())
GROWTH = 200 << 20  # bytes; what is tried below would take gigabytes


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with the limits that it comes with."""
    folder = tmp_path_factory.mktemp("bombs") / "store"
    om = Store(folder)
    om.models.put(linear(), "net")
    wide = np.random.default_rng(0).integers(0, 255, (40, 300_000), np.uint8)
    texts = pa.array([row.tobytes() for row in wide], pa.binary())
    om.datasets.put(pa.table({"n": pa.array(range(40)), "content": texts}), "large")
    om.close()
    with (
        patch.dict(os.environ, {"PASSWORD_OF_THE_SERVER": "hush"}),
        serving(folder) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        client.put("/api/v1/model/net/predict", json={"data": [[1, 1, 1]]}).raise_for_status()
        client.post("/invocations", content=parquet({"a": [1.0]}), headers={"content-type": PARQUET})
        yield served


@pytest.fixture
def client(roomy: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=roomy.url, timeout=60) as made:
        yield made


class Watch:
    """The most memory that a server and its processes had while something went on."""

    def __init__(self, served: Served) -> None:
        self._server = psutil.Process(served.process.pid)
        self._over = threading.Event()
        self.before = self.most = self._now()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *told: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.most - self.before

    def _look(self) -> None:
        while not self._over.wait(0.01):
            self.most = max(self.most, self._now())

    def _now(self) -> int:
        total = self._server.memory_info().rss
        own = self._server.cmdline()
        for process in self._server.children(recursive=True):
            try:
                # Between fork and exec a child still shares all memory of the server.
                total += 0 if process.cmdline() == own else process.memory_info().rss
            except psutil.NoSuchProcess:
                pass
        return total


def parquet(columns: dict[str, Any], **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, **options)
    return sink.getvalue()


def a_list(count: int, value: Any, kind: pa.DataType) -> bytes:
    """One row, whose list has the same value many times."""
    values = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int8)), pa.array([value], kind))
    lists = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), values)
    return parquet({"x": lists}, store_schema=False)


PARQUETS: dict[str, Callable[[], bytes]] = {
    "a list of nulls": lambda: parquet(
        {"x": pa.ListArray.from_arrays([0, 20_000_000], pa.nulls(20_000_000))}
    ),
    "a list of one number": lambda: a_list(20_000_000, 1.0, pa.float64()),
    "a long text, many times": lambda: parquet(
        {"x": pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int8)), ["x" * 100_000])},
        store_schema=False,
    ),
    "a list of a long text": lambda: a_list(20_000, "x" * 100_000, pa.string()),
    "the same beginning": lambda: parquet(
        {"x": pa.array(["x" * 100_000] * 2_000)},
        use_dictionary=False,
        column_encoding={"x": "DELTA_BYTE_ARRAY"},
        compression="zstd",
    ),
    "packed zeros": lambda: parquet(
        {"x": pa.array(np.zeros(8_000_000))}, use_dictionary=False, compression="zstd"
    ),
}


@pytest.mark.parametrize("make", PARQUETS.values(), ids=PARQUETS)
@pytest.mark.parametrize("where", ["predict", "store"])
def test_a_parquet_file_takes_no_more_memory_than_its_bytes_are_worth(
    roomy: Served, client: httpx.Client, make: Callable[[], bytes], where: str
) -> None:
    body, headers = make(), {"content-type": PARQUET}
    with Watch(roomy) as watch:
        if where == "predict":
            reply = client.post("/invocations", content=body, headers=headers)
        else:
            reply = client.put("/api/v1/dataset/bomb?mode=replace", content=body, headers=headers)
    assert reply.status_code in (400, 413), reply.text
    told = reply.json()["message"]
    assert told.endswith(".")
    assert "bytes" in told
    assert "not a Parquet file" not in told  # it is one, and too much
    assert watch.growth < GROWTH


ARROWS: dict[str, Callable[[], bytes]] = {
    "views": lambda: arrow_of(pa.array(["x" * 100], pa.string_view())),
    "views in lists": lambda: arrow_of(
        pa.ListArray.from_arrays([0, 1], pa.array(["x" * 100]).cast(pa.string_view()))
    ),
    "views of lists": lambda: arrow_of(pa.array([[1.0]], pa.list_view(pa.float64()))),
    "a dictionary of lists": lambda: arrow_of(
        pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int8()), pa.array([[1.0] * 1000]))
    ),
    "runs": lambda: arrow_of(pa.RunEndEncodedArray.from_arrays([2], [1.0])),
}


@pytest.mark.parametrize("make", ARROWS.values(), ids=ARROWS)
def test_arrow_types_that_repeat_their_bytes_are_refused_by_name(
    roomy: Served, client: httpx.Client, make: Callable[[], bytes]
) -> None:
    body = make()
    with Watch(roomy) as watch:
        reply = client.put("/api/v1/model/net/predict", content=body, headers={"content-type": ARROW})
    assert (reply.status_code, "which is not supported" in reply.json()["message"]) == (400, True)
    assert watch.growth < GROWTH


def no_bytes(columns: int, values: int) -> bytes:
    """Columns of values that take no bytes."""
    empty = pa.FixedSizeBinaryArray.from_buffers(pa.binary(0), values, [None, pa.py_buffer(b"")])
    sink = pa.BufferOutputStream()
    table = pa.table({f"c{i}": empty for i in range(columns)})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def many_batches() -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"x": pa.array([1.0])})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(12_000):
            writer.write_batch(batch)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: no_bytes(1, 1000), "texts of no bytes"),
        (lambda: no_bytes(200, 100_000), "values in"),
        (many_batches, "messages"),
        (lambda: arrow_table({f"c{i}": pa.array([1.0]) for i in range(12_000)}), "columns"),
    ],
)
def test_arrow_is_refused_by_what_it_claims_in_all_columns_together(
    make: Callable[[], bytes], told: str
) -> None:
    with pytest.raises(Problem, match=told):
        read_arrow(make())


def arrow_table(columns: dict[str, Any]) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table(columns)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def test_too_many_rows_are_refused_before_they_become_what_the_model_takes(
    roomy: Served, client: httpx.Client
) -> None:
    bits = pa.array(np.zeros(60_000_000, bool))
    body = arrow_table(dict.fromkeys("abc", bits))  # 22 MB, which would be 1.4 GB
    with Watch(roomy) as watch:
        reply = client.put("/api/v1/model/net/predict", content=body, headers={"content-type": ARROW})
    assert (reply.status_code, "at most 100000 are allowed" in reply.text) == (413, True), reply.text
    assert watch.growth < 3 * GROWTH


def test_arrow_buffers_must_not_lie_over_each_other() -> None:
    content = bytearray(arrow_of(pa.array(["a" * 64] * 8)))
    assert read_arrow(bytes(content)).num_rows == 8
    # The buffers of a message are pairs of an offset and a length.
    at = content.index((512).to_bytes(8, "little"))
    content[at : at + 8] = (5000).to_bytes(8, "little")
    with pytest.raises(Problem, match="its buffers claim more than the"):
        read_arrow(bytes(content))


@pytest.mark.parametrize(
    "values", [["x" * 100_000, *["a"] * 20_000], [*[1] * 20_000, "x" * 100_000, None]], ids=["texts", "mixed"]
)
def test_a_long_text_makes_no_other_text_longer(values: list[Any]) -> None:
    array = as_tensor(values, "it")
    assert (array.dtype, array.tolist()) == (np.dtype(object), values)
    assert as_tensor([values, values], "it").shape == (2, len(values))
    with pytest.raises(Problem, match="mixes numbers, text"):
        as_tensor([1, "x" * 100_000] * 10_000, "it")


def test_nested_lists_become_what_numpy_makes_of_them() -> None:
    for value in (
        [[1, 2], [3, 4]],
        [[1.5, 2]],
        [[True, False]],
        [],
        [[], []],
        3,
        [1 << 40, 1],
        [[[1 << 70]]],
    ):
        array = as_tensor(value, "it")
        expected = np.array(value, dtype=np.float64 if value == [[[1 << 70]]] else None)
        np.testing.assert_array_equal(array, expected)
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    for ragged in ([[1], [1, 2]], [[1], 2], [1, [2]], [[[1]], [[1], [2]]]):
        with pytest.raises(Problem, match="its rows have different lengths"):
            as_tensor(ragged, "it")


BODIES: dict[str, tuple[str, str, Callable[[], bytes]]] = {
    "a row of 24 MB": ("POST", "application/json", lambda: b'{"inputs":[[' + b"0.5," * 6_000_000 + b"1]]}"),
    "120,000 columns of CSV": (
        "POST",
        "text/csv",
        lambda: ",".join(f"c{i}" for i in range(120_000)).encode() + b"\n" + b"1," * 119_999 + b"1\n",
    ),
    "120,000 columns of JSON": (
        "POST",
        "application/json",
        lambda: json.dumps({"dataframe_records": [{f"c{i}": 1 for i in range(120_000)}]}).encode(),
    ),
    "a dataset of 10 MB": (
        "PUT",
        "application/json",
        lambda: json.dumps({"data": [{"a": i, "b": str(i)} for i in range(300_000)]}).encode(),
    ),
}


def processes_that_read(served: Served) -> list[psutil.Process]:
    """Forks of a process that has imported what they need; it reads nothing itself."""
    for child in psutil.Process(served.process.pid).children():
        if "kindler.serve.bodies" in " ".join(child.cmdline()):
            return child.children()
    return []


def reading_s(served: Served) -> float:
    """What the processes of a server that read bodies have computed."""
    readers = processes_that_read(served)
    assert len(readers) <= 2
    return sum(sum(reader.cpu_times()[:2]) for reader in readers)


@pytest.mark.parametrize("name", BODIES)
def test_large_bodies_are_read_by_another_process(roomy: Served, client: httpx.Client, name: str) -> None:
    method, kind, make = BODIES[name]
    body = make()
    path = "/invocations" if method == "POST" else "/api/v1/dataset/rows?mode=replace"
    before = reading_s(roomy)
    reply = client.request(method, path, content=body, headers={"content-type": kind})
    assert reply.status_code == (200 if method == "PUT" else 413 if "columns" in name else 400), reply.text
    assert reading_s(roomy) > before or "CSV" in name  # which is refused by its first line
    if method == "PUT":
        rows = client.get("/api/v1/dataset/rows?limit=2&orient=list").json()["data"]
        assert rows == {"a": [0, 1], "b": ["0", "1"]}


def test_texts_of_a_binary_tensor_are_taken_apart_by_another_process(
    roomy: Served, client: httpx.Client
) -> None:
    texts = b"\1\0\0\0x" * 200_000
    tensor = {"name": "x", "shape": [1, 200_000], "datatype": "BYTES"}
    head = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": len(texts)}}]}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    codec, sent = codec_of("/v2/models/net/infer"), RawRequest(head + texts, headers, {})
    with pytest.raises(TooManyTexts, match="bytes of texts"):
        codec.decode(sent, SIGNATURE, Target("net"))
    before = reading_s(roomy)
    reply = client.post("/v2/models/net/infer", content=head + texts, headers=headers)
    assert (reply.status_code, "shape" in reply.text) == (400, True), reply.text
    assert reading_s(roomy) > before


@pytest.mark.skipif(sandbox.unavailable_reason() is not None, reason="processes cannot be sandboxed here")
def test_what_reads_bodies_is_sandboxed_and_knows_nothing_of_the_servers_environment(
    roomy: Served, client: httpx.Client
) -> None:
    client.post("/invocations", content=parquet({"a": [1.0]}), headers={"content-type": PARQUET})
    (reader, *_) = processes_that_read(roomy)
    status = Path(f"/proc/{reader.pid}/status").read_text()
    assert "Seccomp:\t2\n" in status
    assert "NoNewPrivs:\t1\n" in status
    assert b"PASSWORD_OF_THE_SERVER" not in Path(f"/proc/{reader.pid}/environ").read_bytes()
    opened = [os.readlink(path) for path in Path(f"/proc/{reader.pid}/fd").iterdir()]
    assert len([path for path in opened if path.startswith("socket:")]) == 1  # to the server
    assert not [path for path in opened if str(roomy.store) in path]


def test_where_a_body_is_read() -> None:
    def where(kind: str, size: int, **headers: str) -> str:
        return where_read(RawRequest(b" " * size, {"content-type": kind, **headers}, {}))

    assert where("application/json", 100_000) == where(ARROW, 1000) == where("text/csv", 1000) == "here"
    assert where(ARROW, 3 << 20) == where("application/octet-stream", 3 << 20) == "thread"
    assert where(PARQUET, 10) == where("application/json", 2 << 20) == where("text/csv", 100_000) == "process"
    length = {"inference-header-content-length": "200"}
    assert where("application/octet-stream", 3 << 20, **length) == where("", 3 << 20, **length) == "thread"


def test_a_compressed_body_ends_with_its_first_part(client: httpx.Client) -> None:
    body = gzip.compress(b'{"data": [[1, 1, 1]]}')
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    assert client.put("/api/v1/model/net/predict", content=body, headers=headers).status_code == 200
    reply = client.put("/api/v1/model/net/predict", content=body + body, headers=headers)
    assert (reply.status_code, "data after the end" in reply.json()["message"]) == (400, True)


def test_the_first_row_of_a_large_dataset_is_all_that_is_read(roomy: Served, client: httpx.Client) -> None:
    with Watch(roomy) as watch:
        reply = client.get("/api/v1/dataset/large?limit=1&orient=list")
        assert reply.json()["data"]["n"] == [0]
        found = client.get("/api/v1/dataset/large?limit=3&orient=list&n__gte=30").json()["data"]["n"]
        assert found == [30, 31, 32]
        too_much = client.get("/api/v1/dataset/large?limit=40", headers={"accept": ARROW})
        assert too_much.status_code == 200
    assert watch.growth < 3 * GROWTH
    with serving(roomy.store, "--body-bytes", "1000000") as small, httpx.Client(base_url=small.url) as other:
        reply = other.get("/api/v1/dataset/large?limit=10", timeout=60)
        assert (reply.status_code, "Hint: use a smaller ?limit=" in reply.json()["message"]) == (413, True)


PATTERNS = ["*a" * 15 + "b", "**a" * 15 + "b", "[a-z]*" * 15 + "!", "?*" * 15 + "!", "**/*" * 7 + "!"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_never_tried_twice_at_the_same_place(client: httpx.Client, pattern: str) -> None:
    name = "a" * 100 + "/" + "a" * 99
    client.put(f"/api/v1/dataset/{name}?mode=replace", json={"data": {"n": [1]}}).raise_for_status()
    for what in ("datasets", "models", "scripts"):
        assert client.get(f"/api/v1/{what}", params={"pattern": pattern}).json() == {what: []}


@pytest.mark.parametrize("pattern", ["a*" * 17, "x" * 201, "[b-a]"])
def test_a_pattern_that_cannot_be_is_refused(client: httpx.Client, pattern: str) -> None:
    assert client.get("/api/v1/models", params={"pattern": pattern}).status_code == 400
