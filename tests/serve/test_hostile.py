"""What must not harm a server: each is answered with its status and a sentence, and the server lives on."""

from __future__ import annotations

import gzip
import json
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.serve.served import Served, serving

GOOD = {"instances": [[1.0, 1.0, 1.0]]}


@pytest.fixture(autouse=True)
def _alive(client: httpx.Client) -> Iterator[None]:
    yield
    assert client.post("/v1/models/net:predict", json=GOOD).status_code == 200


def sentence(reply: httpx.Response) -> str:
    told: dict[str, Any] = reply.json()
    text = told.get("error") or told.get("message")
    assert isinstance(text, str)
    assert text
    return text


def raw(server: Served, request: bytes) -> bytes:
    """Send bytes as they are: clients would tidy up the path."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


NAMES = [
    "../x",
    "a/../../b",
    "a\0b",
    "x" * 10_000,
    "a*",
    "@",
    "net@",
    "net@@2",
    "^",
    "net@-1",
    "%",
    "a//b",
    " ",
]
PATHS = ["/v2/models/{}/infer", "/v1/models/{}:predict", "/api/v1/model/{}/predict"]


QUOTED = [
    *(quote(name, safe="/") for name in NAMES),
    "%2e%2e%2fx",
    "a%2f..%2f..%2fb",
    "%252e%252e%252fx",
    "%ff",
]


@pytest.mark.parametrize("name", QUOTED, ids=lambda name: name[:10])
@pytest.mark.parametrize("pattern", PATHS)
def test_names_that_cannot_be(server: Served, name: str, pattern: str) -> None:
    path = pattern.format(name)
    method = "PUT" if path.startswith("/api") else "POST"
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{{}}"
    )
    status, _, rest = raw(server, head.encode()).partition(b"\r\n")
    assert status.split()[1] in (b"400", b"404"), status
    assert json.loads(rest.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize(
    "path",
    ["/v2/models/nothing/infer", "/v1/models/net/versions/99:predict", "/v1/models/net/labels/no:predict"],
)
def test_models_that_are_not_there(client: httpx.Client, path: str) -> None:
    reply = client.post(path, json=GOOD)
    assert reply.status_code == 404
    assert "there is no" in sentence(reply)


def test_a_body_of_a_gigabyte_is_refused_before_it_is_sent(server: Served) -> None:
    head = b"POST /v2/models/net/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1073741824\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head + b"expect: 100-continue\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("framing", ["content-length: 1073741824", "transfer-encoding: chunked"])
def test_a_gigabyte_that_is_sent_all_the_same_is_never_held(server: Served, framing: str) -> None:
    before = peak_of(server)
    part = b"x" * (1 << 20)
    if "chunked" in framing:
        part = b"100000\r\n" + part + b"\r\n"
    head = f"POST /v2/models/net/infer HTTP/1.1\r\nhost: localhost\r\n{framing}\r\n\r\n"
    told = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode())
        try:
            for _ in range(1024):
                connection.sendall(part)
                if select.select([connection], [], [], 0)[0]:
                    told += connection.recv(65536)
        except OSError:
            pass  # it need not wait until all was sent
    assert told.startswith(b"HTTP/1.1 413 ")
    assert b"1000000" in told
    assert peak_of(server) - before < 50_000  # kB


def peak_of(server: Served) -> int:
    """The most memory that a server ever had, in kB."""
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    pytest.skip("this system does not tell")


def test_a_body_that_grows_too_large_is_refused(client: httpx.Client) -> None:
    chunks = (b"x" * 100_000 for _ in range(20))
    assert client.post("/v2/models/net/infer", content=chunks).status_code == 413
    bomb = gzip.compress(b" " * 50_000_000)
    reply = client.post("/v2/models/net/infer", content=bomb, headers={"content-encoding": "gzip"})
    assert reply.status_code == 413


@pytest.mark.parametrize("opening", ["[", '{"instances":', '{"a":['])
def test_json_that_is_nested_deeply(client: httpx.Client, opening: str) -> None:
    for path in ("/v1/models/net:predict", "/v2/models/net/infer", "/models/net/invocations"):
        headers = {"content-type": "application/json"}
        for depth in (100, 900, 100_000 if opening == "[" else 50_000):
            closing = "".join({"[": "]", "{": "}"}[c] for c in reversed(opening) if c in "[{")
            body = opening * depth + "1" + closing * depth
            reply = client.post(path, content=body, headers=headers)
            assert reply.status_code == 400
            assert sentence(reply)
        assert (
            client.post(
                path, content='{"instances": ' + "[" * 80 + "]" * 80 + "}", headers=headers
            ).status_code
            == 400
        )


TENSOR = {"name": "x", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}
V2_BODIES = {
    "nothing": {},
    "no list": {"inputs": 3},
    "no tensors": {"inputs": []},
    "wrong length": {"inputs": [TENSOR | {"shape": [2, 3]}]},
    "huge shape": {"inputs": [TENSOR | {"shape": [1 << 39, 1 << 39]}]},
    "negative shape": {"inputs": [TENSOR | {"shape": [-1, 3]}]},
    "other width": {"inputs": [TENSOR | {"shape": [3, 1]}]},
    "no rows": {"inputs": [TENSOR | {"shape": [0, 3], "data": []}]},
    "unknown datatype": {"inputs": [TENSOR | {"datatype": "FP7"}]},
    "text for numbers": {"inputs": [TENSOR | {"data": ["a", "b", "c"]}]},
    "text as bytes": {"inputs": [TENSOR | {"datatype": "BYTES", "data": ["a", "b", "c"]}]},
    "floats for integers": {"inputs": [TENSOR | {"datatype": "INT8", "data": [1.5, 2, 3]}]},
    "out of range for the datatype": {"inputs": [TENSOR | {"datatype": "INT8", "data": [1, 2, 300]}]},
    "null": {"inputs": [TENSOR | {"data": [1, None, 3]}]},
    "two of one name": {"inputs": [TENSOR, TENSOR]},
    "other names": {"inputs": [TENSOR, TENSOR | {"name": "y"}]},
    "unknown output": {"inputs": [TENSOR], "outputs": [{"name": "nothing"}]},
    "binary without bytes": {"inputs": [{**TENSOR, "data": [], "parameters": {"binary_data_size": 24}}]},
    "no number": {"inputs": [TENSOR], "parameters": {"timeout": "soon"}},
}


@pytest.mark.parametrize("body", V2_BODIES.values(), ids=V2_BODIES)
def test_v2_requests_that_cannot_be(client: httpx.Client, body: dict[str, Any]) -> None:
    reply = client.post("/v2/models/net/infer", json=body)
    assert reply.status_code == 400
    assert sentence(reply).endswith(".")


TFS_BODIES = {
    "no json": b"{",
    "no object": b"[1]",
    "no text": b"\xff\xfe",
    "both": b'{"instances": [[1,2,3]], "inputs": [[1,2,3]]}',
    "ragged": b'{"instances": [[1,2,3],[1]]}',
    "mixed": b'{"instances": [[1,2,"a"]]}',
    "objects and lists": b'{"instances": [{"x": [1,2,3]}, [1,2,3]]}',
    "one number": b'{"instances": 3}',
    "empty": b'{"instances": []}',
    "bad base64": b'{"instances": [{"b64": "?"}]}',
    "nothing but bytes": b'{"b64": ""}',
}


@pytest.mark.parametrize("body", TFS_BODIES.values(), ids=TFS_BODIES)
def test_tensorflow_serving_requests_that_cannot_be(client: httpx.Client, body: bytes) -> None:
    reply = client.post("/v1/models/net:predict", content=body)
    assert reply.status_code == 400
    assert sentence(reply).endswith(".")


def test_nan_is_a_value_that_the_model_may_refuse(client: httpx.Client) -> None:
    reply = client.post("/v1/models/net:predict", content=b'{"instances": [[NaN, 1, 2]]}')
    assert reply.status_code == 400
    assert "ValueError" in sentence(reply)
    assert client.post(
        "/v1/models/net@1:predict", content=b'{"instances": [[NaN, 1, Infinity]]}'
    ).status_code in (200, 400)


def test_too_many_rows(client: httpx.Client) -> None:
    reply = client.post("/v1/models/net:predict", json={"instances": [[1, 2, 3]] * 1001})
    assert (reply.status_code, "at most 1000 are allowed" in sentence(reply)) == (413, True)


def test_other_methods_and_paths(client: httpx.Client) -> None:
    assert client.get("/v2/models/net/infer").status_code == 405
    assert client.post("/v1/models/net:explode", json=GOOD).status_code == 404
    assert client.get("/nothing").status_code == 404
    assert client.request("TRACE", "/v1/models").status_code == 405


def test_a_page_of_another_site_does_not_get_in_by_a_name_of_its_own(client: httpx.Client) -> None:
    reply = client.get("/api/v1/models", headers={"host": "evil.example:80"})
    assert reply.status_code == 403
    reply = client.get("/api/v1/models", headers={"origin": "https://evil.example"})
    assert reply.status_code == 403
    assert client.get("/api/v1/models", headers={"origin": "http://localhost:3000"}).status_code == 200


@pytest.fixture(scope="module")
def hasty(store: Path) -> Iterator[Served]:
    with serving(store, "--timeout-s", "0.5") as served:
        yield served


@pytest.mark.parametrize(
    "begun",
    [
        b"POST /v2/models/net/infer HTTP/1.1\r\nhost: localhost\r\ncontent-le",
        b"POST /v2/models/net/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
        b"PUT /api/v1/dataset/x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
    ids=["head", "body", "chunks"],
)
def test_who_never_ends_its_request_is_told_so_and_cut_off(hasty: Served, begun: bytes) -> None:
    answer = raw(hasty, begun)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.5 s" in answer


def test_who_sends_nothing_is_cut_off(hasty: Served) -> None:
    assert raw(hasty, b"") == b""


@pytest.mark.parametrize("line", [b"x-a: b\r\n" * 100_000, b"x-a: " + b"b" * 1_000_000], ids=["many", "long"])
def test_a_flood_of_headers_is_refused(server: Served, line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        try:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n" + line)
            answer = connection.recv(65536)
        except ConnectionError:
            return  # cut off in the middle of it
    assert answer.startswith(b"HTTP/1.1 431 ")


def binary(tensor: dict[str, Any], content: bytes, length: str | None = None) -> tuple[bytes, dict[str, str]]:
    head = json.dumps({"inputs": [tensor]}).encode()
    return head + content, {"inference-header-content-length": str(len(head)) if length is None else length}


SIZES = {
    "more than there is": 25,
    "less than there is": 16,
    "negative": -1,
    "enormous": 1 << 62,
    "no number": "24",
}
LENGTHS = ["-1", "99999", "1e3", "", "9" * 30, "\u0664", "3"]


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_tensor_that_lies_about_its_bytes(client: httpx.Client, size: Any) -> None:
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP64", "parameters": {"binary_data_size": size}}
    body, headers = binary(tensor, np.ones(3).tobytes())
    reply = client.post("/v2/models/net/infer", content=body, headers=headers)
    assert (reply.status_code, sentence(reply)[-1]) == (400, ".")


@pytest.mark.parametrize("length", LENGTHS)
def test_a_head_that_lies_about_its_length(client: httpx.Client, length: str) -> None:
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP64", "parameters": {"binary_data_size": 24}}
    body, _ = binary(tensor, np.ones(3).tobytes())
    headers = {b"inference-header-content-length": length.encode()}
    reply = client.post("/v2/models/net/infer", content=body, headers=headers)
    assert (reply.status_code, sentence(reply)[-1]) == (400, ".")


def test_a_text_that_lies_about_its_length(client: httpx.Client) -> None:
    tensor = {"name": "x", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 8}}
    for content in (b"\xff\xff\xff\xff....", b"\x00\x00\x00\x00\x00\x00\x00\x00"):
        body, headers = binary(tensor, content)
        reply = client.post("/v2/models/net/infer", content=body, headers=headers)
        assert (reply.status_code, sentence(reply)[-1]) == (400, ".")


def arrow_of(column: pa.Array, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"x": column})
    with pa.ipc.new_stream(
        sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
    ) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def a_constant_in_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table({"x": pa.DictionaryArray.from_arrays(pa.nulls(50_000_000, pa.int8()).fill_null(0), [1])}),
        sink,
    )
    content: bytes = sink.getvalue().to_pybytes()
    return content


ARROWS = {
    "a column of nothing": lambda: arrow_of(pa.nulls(1 << 28)),
    "lists of nothing": lambda: arrow_of(pa.FixedSizeListArray.from_arrays(pa.nulls(1 << 28), 1 << 28)),
    "one value, repeated": lambda: arrow_of(
        pa.RunEndEncodedArray.from_arrays(pa.array([1 << 30], pa.int32()), pa.array([1.0]))
    ),
    "compressed zeros": lambda: arrow_of(pa.array(np.zeros(1_000_000)), "zstd"),
    "a text for many rows": lambda: arrow_of(
        pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int8)), pa.array(["x" * 500_000]))
    ),
}


@pytest.mark.parametrize("make", ARROWS.values(), ids=ARROWS)
def test_a_table_that_stands_for_more_than_its_bytes(server: Served, client: httpx.Client, make: Any) -> None:
    before = peak_of(server)
    headers = {"content-type": "application/vnd.apache.arrow.stream"}
    reply = client.put("/api/v1/model/net/predict", content=make(), headers=headers)
    assert reply.status_code in (400, 413)  # it claims too much, or has more rows than a request may
    assert sentence(reply)
    assert peak_of(server) - before < 100_000  # kB


def test_a_parquet_file_that_stands_for_more_than_its_bytes(server: Served, client: httpx.Client) -> None:
    before = peak_of(server)
    headers = {"content-type": "application/vnd.apache.parquet"}
    reply = client.post("/invocations", content=a_constant_in_parquet(), headers=headers)
    assert (reply.status_code, "at most" in sentence(reply)) == (413, True)
    assert peak_of(server) - before < 100_000  # kB
