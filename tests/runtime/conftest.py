"""The same store and the same tests on each engine: processes of this machine, Redis, RabbitMQ."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import runtime_jobs
import runtime_servers as servers
from runtime_servers import Broker, Meeting, X, Y
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from kindler import Store
from kindler.engine import fork_server


def filled(folder: str) -> str:
    """A store with models, datasets and scripts."""
    om = Store(folder)
    om.models.put(LogisticRegression().fit(X, Y), "net")
    om.models.put(StandardScaler().fit(X), "scaler")
    om.models.put(runtime_jobs.twice, "twice")
    om.datasets.put(X, "x")
    om.datasets.put(Y, "y")
    om.datasets.put(runtime_jobs.rows, "made")
    dying = ("die", "die_once", "kill_worker")
    for name in ("echo", "fail", "talk", *dying, "hold", "count_and_hold", "remember"):
        om.scripts.put(getattr(runtime_jobs, name), name)
    om.close()
    return folder


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a store whose tests start workers of their own."""
    return filled(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="session", params=["local", "redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker | None]:
    """The broker, or None."""
    if request.param == "local":
        yield None
        return
    with getattr(servers, request.param)() as made:
        made.start()
        yield made


@pytest.fixture(scope="session")
def om(tmp_path_factory: pytest.TempPathFactory, broker: Broker | None) -> Iterator[Store]:
    """A store for each engine, with workers."""
    store = filled(str(tmp_path_factory.mktemp("store")))
    opened = Store(store, broker=broker.url if broker else "local://?workers=2")
    with servers.worker(store, broker.url, "--workers", "2", "--trusted") if broker else nullcontext():
        yield opened
        opened.close()
    fork_server.close()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        yield Meeting(listener)
