"""Where the driver listens for workers, and where it tells them that it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kindler import RunSettings
from kindler.spark import executors
from kindler.spark import session as spark_session

pytestmark = pytest.mark.spark


def session(**settings: str) -> Any:
    named = {f"spark.driver.{name}": value for name, value in settings.items()}
    return SimpleNamespace(conf=SimpleNamespace(get=named.get))


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in (executors, spark_session):
        monkeypatch.setattr(module, "is_connect", lambda spark: True)
    return lambda host: SimpleNamespace(client=SimpleNamespace(host=host))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"host": "10.0.0.7"}, ("10.0.0.7", "10.0.0.7")),
        ({"host": "nat.example", "bindAddress": "172.17.0.2"}, ("172.17.0.2", "nat.example")),
        ({"host": "[2001:db8::7]"}, ("2001:db8::7", "2001:db8::7")),
    ],
)
def test_the_driver_listens_where_spark_does_and_is_told_as_spark_is(
    settings: dict[str, str], expected: tuple[str, str]
) -> None:
    assert executors.driver_hosts(session(**settings)) == expected


def test_a_connect_client_listens_on_the_interface_towards_its_server(connected: Any) -> None:
    assert executors.driver_hosts(connected("localhost")) == ("127.0.0.1", "127.0.0.1")
    assert executors.driver_hosts(connected("127.0.0.53")) == ("127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize(("host", "at_driver"), [("::1", True), ("server.example", False)])
def test_workers_of_a_remote_connect_server_meet_among_themselves(
    connected: Any, host: str, at_driver: bool
) -> None:
    assert executors.meets_at_driver(connected(host), RunSettings()) is at_driver
    assert executors.meets_at_driver(connected(host), RunSettings(rendezvous="driver"))
