"""A tag that moves while `kindler serve` answers, with faults at the system calls of loading the new version.

The server, its fork server and the models' processes are one program here. No request fails, and in the end
each answer is of the new version; a server that is stopped leaves nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import pytest

from kindler import Store
from tests.faults import kernel
from tests.faults.kernel import Fault, Point, watched
from tests.faults.points import grouped_faults, told
from tests.serve.served import _environment, constant

pytestmark = pytest.mark.skipif(bool(kernel.missing()), reason=kernel.missing())

# How many points of each kind of fault are tried in the gate.
KINDS = {"error": 6, "kill": 2, "delay": 1, "full": 2}
DEADLINE_S = 90.0
ROWS = {"instances": [[0.0, 0.0, 0.0]]}


def serve(store: Path, port: int, talk: Connection) -> None:
    environment = {**_environment(()), "TMPDIR": str(store.parent / "tmp")}
    command = ["serve", "--store", str(store), "--port", str(port), "--refresh-s", "0.05"]
    talk.send("begins")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.execve(sys.executable, [sys.executable, "-m", "kindler.cli", *command], environment)


class Load:
    """Requests, one after another, for as long as the block takes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.failed: list[str] = []
        self.newest = 0.0
        self.answered = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        over = threading.Event()

        def ask() -> None:
            with httpx.Client(base_url=self.url, timeout=DEADLINE_S) as client:
                while not over.is_set():
                    reply = client.post("/v1/models/net/labels/prod:predict", json=ROWS)
                    if reply.status_code == 200:
                        self.newest = reply.json()["predictions"][0]
                        self.answered += 1
                    else:
                        self.failed.append(reply.text)

        thread = threading.Thread(target=ask, name="load")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(DEADLINE_S)


def eventually(holds: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def answers(url: str) -> bool:
    try:
        return (
            httpx.post(f"{url}/v1/models/net/labels/prod:predict", json=ROWS, timeout=30).status_code == 200
        )
    except httpx.TransportError:
        return False


def group(point: Point) -> str:
    return f"{point.kind}-{point.role}"


@pytest.mark.timeout(3600)
def test_no_request_fails_while_the_new_version_cannot_be_loaded(tmp_path: Path) -> None:
    base, store = tmp_path, tmp_path / "store"
    (base / "tmp").mkdir()
    with Store(store) as om:
        om.models.put(constant(1), "net", tag="prod")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def loads(point: Point) -> bool:
            """Not the server's connections, which are its clients', nor the fork server's, of all models."""
            if point.kind in ("send", "receive"):
                return point.role == "grandchild"
            return point.kind in ("fork", "connect") or point.path.startswith(f"{base}/")

        failures: list[str] = []
        with watched(lambda talk: serve(store, port, talk), loads) as program:
            assert program.hear(DEADLINE_S) == "begins"
            load = Load(f"http://127.0.0.1:{port}")
            assert eventually(lambda: answers(load.url), DEADLINE_S)

            def swap(number: int, fault: Fault | None, like: Point | None = None) -> list[Point]:
                """Put a version that answers its number, and wait until it serves."""
                with load.running():
                    answered = load.answered
                    assert eventually(lambda: load.answered > answered + 2, DEADLINE_S)
                    program.arm(fault, partial(alike, loads, like, program.processes()))
                    om.models.put(constant(number), "net", tag="prod")
                    limit_s = DEADLINE_S if fault is None else 3.0
                    assert eventually(lambda: load.newest == number, limit_s) or fault is not None
                    points = program.points
                    program.disarm()
                    assert eventually(lambda: load.newest == number, DEADLINE_S), (
                        "it stays at the old version"
                    )
                failed, load.failed = load.failed, []
                assert not failed, failed[0]
                return points

            swap(2, None)
            points = swap(3, None)
            number = 3
            for kind, sample in KINDS.items():
                # The old version's processes end with the others; models answer requests with what they send.
                able = [
                    point
                    for point in points
                    if point.kind != "send" and (kind != "kill" or point.role == "grandchild")
                ]
                for name, fault, like in grouped_faults("swap", kind, able, group, sample=sample):
                    if like.kind == "receive" and fault.k > 0:
                        continue
                    number += 1
                    with told(name, like, failures):
                        swap(number, fault, like)
            os.kill(program.pid, signal.SIGTERM)
            assert program.ended(DEADLINE_S), program.left()
        assert not failures, "\n".join(failures)


def alike(counts: Callable[[Point], bool], like: Point | None, before: set[int], point: Point) -> bool:
    """Whether it is a point like that one, and not in a process of the old version."""
    old = point.role == "grandchild" and point.pid in before
    return counts(point) and not old and (like is None or group(point) == group(like))
