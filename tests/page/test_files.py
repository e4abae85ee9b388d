"""How the files of the page are handed out; no browser."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

import httpx
import pytest

from tests.serve.served import Served

FILES = {entry.name: entry.read_bytes() for entry in (files("kindler.serve.page") / "files").iterdir()}


@pytest.fixture(scope="module")
def client(keyed: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=keyed.url) as made:
        yield made


def test_the_page_needs_no_key_and_takes_scripts_of_its_own_server_only(client: httpx.Client) -> None:
    page = client.get("/")

    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "http" not in page.text.replace("http-equiv", "")


def test_the_files_are_few_kilobytes_and_sent_once(client: httpx.Client) -> None:
    whole = packed = 0
    for name, content in FILES.items():
        reply = client.get(f"/static/{name}")
        again = client.get(f"/static/{name}", headers={"if-none-match": reply.headers["etag"]})
        plain = client.get(f"/static/{name}", headers={"accept-encoding": "identity"})
        assert (reply.status_code, again.status_code, again.content) == (200, 304, b"")
        assert plain.content == reply.content == content
        whole += len(plain.content)
        packed += int(reply.headers["content-length"])
    assert whole < 72_000
    assert packed < 28_000


@pytest.mark.parametrize("path", ["", "nope.js", "../__init__.py", "%2e%2e/__init__.py", "/etc/passwd"])
def test_nothing_but_the_files_is_handed_out(client: httpx.Client, path: str) -> None:
    assert client.get(f"/static/{path}").status_code in (401, 404)


def test_the_page_answers_head_and_nothing_else(client: httpx.Client) -> None:
    assert client.head("/").status_code == 200
    assert client.post("/").status_code == 401


def test_a_history_of_columns_becomes_one_of_epochs(client: httpx.Client, keys: dict[str, str]) -> None:
    reply = client.get("/api/v1/model/net", headers={"x-api-key": keys["read"]})

    epochs = [{"epoch": 1, "loss": 0.5, "val_loss": 0.75}, {"epoch": 2, "loss": 0.25}]
    assert reply.json()["result"]["history"] == epochs
