"""Which ports a run may take is checked before anything listens."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kindler import RunSettings
from kindler.engine.hub import Hub
from kindler.engine.job import Job, equal_ranks
from kindler.engine.server import listen
from kindler.engine.supervisor import Supervisor
from kindler.errors import ConfigError


@pytest.mark.parametrize("given", [(2, 1), (0, 10), (1, 70_000), (1,), (1.0, 2.0), (True, 2), [1, 2], "1-2"])
def test_what_is_not_a_range_of_ports_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be \(first, last\)"):
        RunSettings(port_range=given)


def test_every_listener_takes_another_port_of_the_range() -> None:
    with listen("127.0.0.1", backlog=1) as probe:
        first = probe.getsockname()[1]
    ports = (max(first - 5, 1024), min(first + 5, 65535))
    with (
        listen("127.0.0.1", backlog=1, ports=ports) as one,
        listen("127.0.0.1", backlog=1, ports=ports) as two,
    ):
        taken = {listener.getsockname()[1] for listener in (one, two)}

    assert len(taken) == 2
    assert all(ports[0] <= port <= ports[1] for port in taken)


def test_a_worker_that_finds_no_port_tells_the_driver_why() -> None:
    secret = b"s" * 32
    with (
        listen("127.0.0.1", backlog=1) as taken,
        Hub(Job(ranks=equal_ranks("", 2), secret=secret, settings=RunSettings())) as hub,
    ):
        port = taken.getsockname()[1]
        job = Job(
            ranks=equal_ranks("", 2),
            secret=secret,
            settings=RunSettings(port_range=(port, port)),
        )
        supervisor = Supervisor(job, 0, hub=hub.address, owner=os.getpid(), cargo=True)
        with pytest.raises(ConfigError, match="worker 0 cannot listen on 127.0.0.1.*\nHint:.*port_range"):
            supervisor.__enter__()
        (event,) = hub.events(10)

    assert (event.rank, event.kind) == (0, "error")
    assert f"no port from {port} to {port}" in event.fields["message"]
