"""Workers as programs: what happens when they, or their owners, die; labels; and who trusts whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import runtime_servers as servers
from runtime_servers import Broker, Meeting, X

from kindler import Store
from kindler.errors import BrokerError, ConfigError, MissingExtraError, UntrustedError
from kindler.runtime import value_codec
from kindler.runtime.executor import Executor
from kindler.runtime.messages import Task

WAIT_S = 120


def test_a_worker_that_is_killed_with_its_task_hands_it_to_another(
    store: str, broker: Broker | None, meeting: Meeting
) -> None:
    if broker is None:
        pytest.skip("without a broker the owner is the worker")
    label = ("--label", "doomed", "--trusted", "--workers", "1")
    om = Store(store, broker=broker.url)
    with servers.worker(store, broker.url, *label) as first:
        handle = om.runtime.options(trusted=True, label="doomed").script("hold").run(meeting.port)
        _, held = meeting.arrived()
        with held, servers.worker(store, broker.url, *label):
            os.kill(first.pid, signal.SIGKILL)
            first.wait(10)
            assert held.recv(1) == b""  # its process went with it
            _, connection = meeting.arrived()
            connection.sendall(b"again")
            assert handle.get(WAIT_S) == "again"
            connection.close()
    om.close()


def test_a_label_is_for_workers_that_have_it(store: str, broker: Broker | None, om: Store) -> None:
    if broker is None:
        with pytest.raises(ConfigError, match="'gpu'"):
            om.runtime.require("gpu").model("net").predict(X)
        return
    asking = Store(store, broker=broker.url)
    runtime = asking.runtime.options(trusted=True)
    with pytest.raises(
        BrokerError,
        match="no worker reported on it for 2 s.\nHint: start a worker with `kindler worker --label gpu`",
    ):
        runtime.options(wait_s=1, timeout_s=1).require("gpu").script("echo").run(1).get(WAIT_S)
    with servers.worker(store, broker.url, "--label", "gpu"):
        # The worker with the label trusts nobody; that of the other tests does.
        with pytest.raises(UntrustedError, match="kindler worker --trusted"):
            runtime.script("echo").require("gpu").run(1).get(WAIT_S)
        assert runtime.script("echo").run(1).get(WAIT_S) == [[1], {}]
    asking.close()


def test_a_broker_that_restarts_loses_nothing_and_workers_wait_for_it(
    broker: Broker | None, om: Store, meeting: Meeting, tmp_path: Path
) -> None:
    if broker is None:
        pytest.skip("no broker")
    runtime = om.runtime.options(trusted=True)
    runs = tmp_path / "runs"
    running = runtime.script("count_and_hold").run(str(runs), meeting.port)
    _, connection = meeting.arrived()
    waiting = runtime.require("late").script("echo").run(1)

    broker.stop()
    for call in (lambda: om.runtime.model("net").predict(X), om.runtime.load):
        with pytest.raises(BrokerError, match="cannot reach the broker"):
            call()
    with servers.worker(om.store.url, broker.url, "--label", "late", "--trusted", until="reconnecting in"):
        broker.start()
        connection.sendall(b"still here")
        assert running.get(WAIT_S) == "still here"
        assert waiting.get(WAIT_S) == [[1], {}]
    connection.close()
    assert runs.read_text() == "run\n"
    assert om.runtime.model("net").predict(X).get(WAIT_S).tolist() == [0, 0, 1, 1]


def test_a_client_that_is_closed_leaves_no_queue(store: str, broker: Broker | None, om: Store) -> None:
    if broker is None:
        pytest.skip("no broker")
    import kombu

    asking = Store(store, broker=broker.url)
    asking.runtime.options(trusted=True).script("echo").run(1).get(WAIT_S)
    name = asking.engine().replies.name  # type: ignore[attr-defined]
    asking.close()
    connection = kombu.Connection(broker.url.partition("?")[0])
    with connection, pytest.raises(connection.channel_errors, match="NOT_FOUND"):
        connection.default_channel.queue_declare(name, passive=True)


PROGRAM = """
import sys
from kindler import Store

om = Store(sys.argv[1])
om.runtime.options(trusted=True).script("hold").run(int(sys.argv[2])).get()
"""


def test_workers_die_with_their_owner(store: str, meeting: Meeting) -> None:
    paths = os.pathsep.join([str(servers.SRC), str(servers.HERE)])
    owner = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, store, str(meeting.port)], env={**os.environ, "PYTHONPATH": paths}
    )
    _, connection = meeting.arrived()
    owner.kill()
    owner.wait(10)
    assert connection.recv(1) == b""
    connection.close()


def test_a_model_is_loaded_once_and_the_least_used_one_goes(store: str) -> None:
    def task(name: str) -> Task:
        buffers = value_codec.encode([[[[0.1]]], {}])
        return Task(id="t", shelf="models", bucket="default", name=name, verb="predict", buffers=buffers)

    om = Store(store)
    om.models.put(om.models.get("net"), "other")
    executor = Executor(store, capacity=1)
    for name, loads in (("net@1", 1), ("net@1", 1), ("net", 1), ("other", 2), ("net", 3)):
        assert executor.run(task(name)).tolist() == [0]
        assert executor.loads == loads
    om.close()


def test_what_cannot_be_reached_is_said_at_once(store: str) -> None:
    opened = Store("memory://")
    opened.scripts.put(len, "length", trusted=True)
    with pytest.raises(ConfigError, match="memory"):
        opened.runtime.script("length").run([1])
    with pytest.raises(ConfigError, match="'kafka'"):
        Store(store, broker="kafka://x").runtime.model("net").predict(X)
    with pytest.raises(BrokerError, match="cannot reach the broker"):
        Store(store, broker=f"redis://127.0.0.1:{servers.free_port()}/0").runtime.model("net").predict(X)


def test_without_kombu_the_extra_is_named(store: str) -> None:
    code = (
        "import sys; sys.modules['kombu'] = None\n"
        "from kindler.runtime.engine import open_engine\n"
        "from kindler.errors import MissingExtraError\n"
        "try:\n    open_engine('x', 'redis://h/0')\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(servers.SRC)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert issubclass(MissingExtraError, ImportError)
    assert "kindler[broker]" in done.stdout, done.stderr
