"""A model that does not answer: requests end in time, and those that nobody waits for are not computed."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kindler import Store
from tests.serve.served import Served, serving


class Blocking:
    """Writes down what it is asked, and answers once a file is there."""

    def __init__(self, folder: Path) -> None:
        self.asked, self.go = folder / "asked", folder / "go"

    def predict(self, x: Any) -> Any:
        with self.asked.open("a") as file:
            file.write(f"{x.ravel().tolist()}\n")
        while not self.go.exists():
            time.sleep(0.005)
        return x


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocking")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    om = Store(folder / "store")
    om.models.put(Blocking(folder), "net", kind="pickle", trusted=True)
    om.close()
    with serving(folder / "store", "--trusted") as served:
        yield served


def until(fact: Callable[[], bool]) -> None:
    while not fact():  # the test's own time limit ends it
        time.sleep(0.005)


@pytest.mark.timeout(60)
def test_requests_end_in_time_and_leave_the_queue_with_their_client(server: Served, folder: Path) -> None:
    asked = folder / "asked"
    with httpx.Client(base_url=server.url, timeout=30) as client:
        tensor = {"name": "x", "shape": [1], "datatype": "FP64"}
        body: dict[str, Any] = {"inputs": [{**tensor, "data": [1]}], "parameters": {"timeout": 100_000}}
        reply = client.post("/v2/models/net/infer", json=body)
        assert (reply.status_code, "did not answer in time" in reply.json()["error"]) == (504, True)
        assert asked.read_text() == "[1.0]\n"  # and still computes

        with socket.create_connection(("127.0.0.1", server.port)) as gone:
            content = b'{"instances": [2.0]}'
            line = b"POST /v1/models/net:predict HTTP/1.1\r\n"
            gone.sendall(line + b"host: localhost\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
            until(lambda: client.get("/api/v1/stats").json()["rows_waiting"] == 1)
        until(lambda: client.get("/api/v1/stats").json()["rows_waiting"] == 0)

        (folder / "go").touch()
        reply = client.post("/v1/models/net:predict", json={"instances": [3.0]})
        assert reply.json() == {"predictions": [3.0]}
    assert asked.read_text() == "[1.0]\n[3.0]\n"
