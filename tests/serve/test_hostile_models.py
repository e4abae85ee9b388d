"""Models that have taken over their process and say to the server whatever they like."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest

from kindler import Store
from tests.serve.served import expected, linear, serving

ROWS = [[1.0, 2.0, 3.0]]


def hostile(x):  # type: ignore[no-untyped-def]
    """Says what the row's number stands for; harmless for the rows that a server begins with."""
    import gc
    import threading

    import orjson

    from kindler.sandbox.child import REPLY, WORD, Calls

    calls = next(thing for thing in gc.get_objects() if type(thing) is Calls)
    large = 2 << 20

    def header(content):  # type: ignore[no-untyped-def]
        text = orjson.dumps(content)
        calls.areas[0].memory[: len(text)] = text
        return WORD.pack(REPLY, 0, 0, len(text))

    number = int(x.ravel()[0])
    if number == 1:  # a gigabyte that it has not written
        calls._sock.sendall(header({"arrays": [["y", "|u1", [1 << 30], 0, (1 << 30) + 1]]}) * 500)
    if number == 2:
        calls._sock.sendall(header({"arrays": [["y", "<f8", [1] * 120_000, 0, 8]]}))
    if number == 3:
        calls._sock.sendall(header({"arrays": [[[]] * 600_000]}))
    if number == 4:
        calls._sock.sendall(header({"arrays": [["y", "<f8", [1], 1 << 40, 8]]}))
    if number == 5:
        calls._sock.sendall(b"\xff" * 100_000)
    if number == 6:  # a copy of two megabytes for each
        text = orjson.dumps({"arrays": [["y", "|u1", [large], 0, large]]})
        calls.areas[0].memory[large : large + len(text)] = text
        calls._sock.sendall(WORD.pack(REPLY, 0, large, len(text)) * 2000)
    if number:
        threading.Event().wait()  # so that nothing else is said
    return x


def test_the_server_answers_others_and_holds_no_more_than_before(tmp_path: Path) -> None:
    om = Store(tmp_path / "store")
    om.models.put(linear(), "fine")
    om.models.put(hostile, "hostile", kind="function", trusted=True)
    om.close()
    with (
        serving(tmp_path / "store", "--trusted") as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        server = psutil.Process(served.process.pid)

        def ask(name: str, data: list[list[float]]) -> httpx.Response:
            return client.put(f"/api/v1/model/{name}/predict", json={"data": data})

        assert ask("hostile", [[0.0]]).status_code == 200
        assert ask("fine", ROWS).status_code == 200
        before, descriptors = server.memory_info().rss, server.num_fds()
        for attack in range(1, 7):
            reply = ask("hostile", [[float(attack)]])
            assert reply.status_code in (500, 503), (attack, reply.text)
            assert ask("fine", ROWS).json()["result"] == pytest.approx(expected(ROWS))
        assert ask("hostile", [[0.0]]).status_code == 200, "a new process has taken the place of the old"
        assert server.num_fds() <= descriptors + 4
        assert server.memory_info().rss < before + (100 << 20)
