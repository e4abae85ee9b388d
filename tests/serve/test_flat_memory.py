"""What a server has in memory, and how many files it has open, does not grow with the requests it answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from sklearn.linear_model import LinearRegression

from kindler import Store
from tests.conftest import eventually_none
from tests.serve.served import Served, serving

MEGABYTE = 1 << 20
WIDTH = 3000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("flat") / "store"
    om = Store(folder)
    x = np.arange(20.0)[:, None]
    om.models.put(LinearRegression(fit_intercept=False).fit(x, x * np.arange(WIDTH)), "wide")
    om.models.put(os.path.basename, "code", kind="function", trusted=True)
    om.close()
    with serving(folder, "--processes", "1") as made:
        yield made


def grown(served: Served, ask: Callable[[httpx.Client], None], times: int, most: int) -> tuple[int, int]:
    """The bytes and areas of shared memory that a server has more after so many requests than after one.

    The server gives memory back a few seconds after it is not needed any more: those are waited for.
    """
    server = psutil.Process(served.process.pid)
    with httpx.Client(base_url=served.url, timeout=60) as client:
        ask(client)
        before = server.memory_info().rss, areas(server.pid)
        for _ in range(times):
            ask(client)
    eventually_none(lambda: server.memory_info().rss - before[0] >= most, timeout_s=30)
    return server.memory_info().rss - before[0], areas(server.pid) - before[1]


def areas(pid: int) -> int:
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return sum(link.startswith("/memfd:") for link in links)


@pytest.mark.parametrize(("name", "status"), [("nothing", 404), ("code", 403)])
def test_a_refused_request_leaves_nothing_of_its_body(served: Served, name: str, status: int) -> None:
    body = b'{"instances": [[' + b" " * MEGABYTE + b"1.0]]}"

    def ask(client: httpx.Client) -> None:
        reply = client.post(f"/v1/models/{name}:predict", content=body)
        assert reply.status_code == status, reply.text[:500]

    more, _ = grown(served, ask, times=200, most=50 * MEGABYTE)
    assert more < 50 * MEGABYTE


def test_answers_of_more_than_16_mib_leave_neither_memory_nor_descriptors(served: Served) -> None:
    rows = np.arange(1000.0)
    tensor = {"name": "x", "shape": [1000, 1], "datatype": "FP64", "parameters": {"binary_data_size": 8000}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()

    def ask(client: httpx.Client) -> None:
        reply = client.post(
            "/v2/models/wide/infer",
            content=head + rows.tobytes(),
            headers={"inference-header-content-length": str(len(head))},
        )
        assert reply.status_code == 200, reply.text[:500]
        begin = int(reply.headers["inference-header-content-length"])
        outputs = np.frombuffer(reply.content[begin:]).reshape(1000, WIDTH)
        np.testing.assert_allclose(outputs, rows[:, None] * np.arange(WIDTH), atol=1e-5)

    more, shared = grown(served, ask, times=10, most=60 * MEGABYTE)
    assert shared == 0
    assert more < 60 * MEGABYTE
