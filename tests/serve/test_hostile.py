"""What must not harm a server: each is answered with its status and a sentence, and the server lives on."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.serve.served import Served

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


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:10]))
@pytest.mark.parametrize("pattern", PATHS)
def test_names_that_cannot_be(server: Served, name: str, pattern: str) -> None:
    path = pattern.format(quote(name, safe="/"))
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
    head = b"POST /v2/models/net/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1073741824\r\n\r\n"
    assert b" 413 " in raw(server, head).partition(b"\r\n")[0]


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
        for depth in (100, 900, 50_000):
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
    "beyond the datatype": {"inputs": [TENSOR | {"datatype": "INT8", "data": [1, 2, 300]}]},
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
    assert (reply.status_code, "1000 are allowed" in sentence(reply)) == (413, True)


def test_other_methods_and_paths(client: httpx.Client) -> None:
    assert client.get("/v2/models/net/infer").status_code == 405
    assert client.post("/v1/models/net:explode", json=GOOD).status_code == 404
    assert client.get("/nothing").status_code == 404
    assert client.request("TRACE", "/v1/models").status_code == 405


def test_a_page_of_another_site_does_not_get_in_by_a_name_of_its_own(client: httpx.Client) -> None:
    reply = client.get("/api/v1/models", headers={"host": "evil.example:80"})
    assert reply.status_code == 403
