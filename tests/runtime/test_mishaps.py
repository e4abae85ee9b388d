"""Workers that are stopped, items that are no messages, and replies that cannot be sent."""

from __future__ import annotations

import base64
import functools
import json
import os
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import runtime_servers as servers
from runtime_servers import Broker, Meeting

from kindler import Store
from kindler.errors import BrokerError, WorkerError, WorkerLostError
from kindler.runtime import broker as brokers
from kindler.runtime.local import LocalEngine
from kindler.runtime.messages import TaskSettings
from kindler.runtime.runtime import Runtime
from kindler.store import VersionStore
from tests.conftest import eventually_none

WAIT_S = 120.0
TRUSTED = TaskSettings(trusted=True)


@pytest.fixture
def redis(broker: Broker | None) -> Iterator[Any]:
    """A client of the Redis server that is the broker."""
    if broker is None or not broker.url.startswith("redis"):
        pytest.skip("about Redis")
    from redis import Redis

    with Redis.from_url(broker.url.partition("?")[0]) as client:
        yield client


def message(**changed: Any) -> bytes:
    """What kombu puts into a queue, with other values."""
    body = changed.pop("body", base64.b64encode(b"{}").decode())
    plain = {
        "body": body,
        "content-encoding": "binary",
        "content-type": "application/x-kindler-frame",
        "headers": {"retries": 0},
        "properties": {
            "delivery_tag": "tag",
            "delivery_info": {"exchange": "", "routing_key": "kindler.default"},
            "body_encoding": "base64",
            "correlation_id": "x",
            "reply_to": "kindler.default",
        },
    }
    return json.dumps({**plain, **changed}).encode()


BAD = [
    b"\x80\x05garbage",
    b"",
    b"1",
    b"[]",
    b'"text"',
    b"{}",
    b"[" * 100_000,
    b'{"__type__": "decimal", "__value__": "x"}',
    message(properties={}),
    message(properties=None),
    message(properties={"delivery_tag": ["a"], "delivery_info": {"exchange": "", "routing_key": "x"}}),
    message(properties={"delivery_tag": None, "delivery_info": {"exchange": "", "routing_key": "x"}}),
    message(properties={"delivery_tag": "a", "delivery_info": None}),
    message(body="not base64!"),
    message(body=None),
    message(body={"a": 1}),
    message(body="A" * (8 << 20)),
    message(headers=None),
    message(headers=[1]),
    message(headers={}),
    message(headers={"retries": "many"}),
    message(headers={"retries": {}, "redelivered": []}),
    message(),
    message(**{"content-type": "application/x-python-serialize"}),
    message(**{"content-type": None}),
    message(
        body=base64.b64encode(zlib.compress(bytes(64 << 20))).decode(),
        headers={"retries": 0, "compression": "application/x-gzip"},
    ),
]


def test_items_that_are_no_messages_are_dropped_and_the_worker_goes_on(om: Store, redis: Any) -> None:
    script = om.runtime.options(trusted=True).script("echo")
    redis.lpush("kindler.default", *BAD)
    redis.hset("unacked", "damaged", "garbage")
    redis.zadd("unacked_index", {"damaged": 1.0})
    for text in (b"garbage", b'{"a": 1}', b"[]", message(body="{}", headers={})):
        redis.publish("/0.kindler.pidbox", text)
    for n in range(2):
        assert script.run(n).get(WAIT_S) == [[n], {}]
    deadline = time.monotonic() + WAIT_S
    while redis.hexists("unacked", "damaged"):  # what a lost worker had is given back after its lease
        assert script.run().get(WAIT_S) == [[], {}]
        assert time.monotonic() < deadline
    assert redis.llen("kindler.default") == 0
    assert om.runtime.load().workers == 2


def test_what_is_compressed_is_not_unpacked(
    om: Store, broker: Broker | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broker is None:
        pytest.skip("no broker, no messages of others")
    script = om.runtime.options(trusted=True).script("echo")
    with monkeypatch.context() as patch:
        patch.setattr(brokers, "publish", functools.partial(brokers.publish, compression="zlib"))
        compressed = script.run(1)
    with pytest.raises(BrokerError, match="cannot read the task: not a frame"):
        compressed.get(WAIT_S)
    assert script.run(2).get(WAIT_S) == [[2], {}]


def test_a_result_that_cannot_be_sent_is_an_error_and_the_task_is_not_run_again(
    om: Store, redis: Any, meeting: Meeting, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runtime = om.runtime.options(trusted=True)
    handle = runtime.script("count_and_hold").run(str(runs), meeting.port)
    _, connection = meeting.arrived()
    queue = om.engine().replies.name  # type: ignore[attr-defined]
    redis.delete(queue)
    redis.set(queue, "not a list")  # the broker refuses what is sent there
    with connection:
        connection.sendall(b"done")
        assert connection.recv(1) == b""
    refused = threading.Timer(3.0, redis.delete, [queue])
    refused.start()
    with pytest.raises(BrokerError, match="its result could not be sent: WRONGTYPE"):
        handle.get(WAIT_S)
    refused.join()
    assert runs.read_text() == "run\n"
    assert runtime.script("echo").run(1).get(WAIT_S) == [[1], {}]


def test_replies_that_nobody_reads_expire(broker: Broker, redis: Any) -> None:
    with brokers.Broker(broker.url).connection() as connection:
        connection.Producer().publish(b"{}", exchange="", routing_key="kindler.reply.gone", serializer=None)
    assert 0 < redis.ttl("kindler.reply.gone") <= 3600


def test_a_task_that_runs_keeps_its_lease(om: Store, redis: Any, meeting: Meeting) -> None:
    handle = om.runtime.options(trusted=True).script("hold").run(meeting.port)
    _, connection = meeting.arrived()
    ((tag, taken_at),) = redis.zrange("unacked_index", 0, -1, withscores=True)
    is_old = eventually_none(lambda: redis.zscore("unacked_index", tag) <= taken_at + 3.0)  # a lease
    assert not is_old
    with connection:
        connection.sendall(b"mine")
    assert handle.get(WAIT_S) == "mine"


def test_a_task_that_kills_each_worker_is_given_to_no_more_than_its_retries_allow(
    store: str, broker: Broker | None
) -> None:
    if broker is None:
        pytest.skip("without a broker the owner is the worker")
    label = ("--label", "poisoned", "--trusted", "--workers", "1")
    om = Store(store, broker=broker.url)
    runtime = om.runtime.options(trusted=True, label="poisoned")
    start = functools.partial(servers.worker, store, broker.url, *label)
    with start() as first, start() as second:
        handle = runtime.script("kill_worker").run()
        assert (first.wait(60), second.wait(60)) == (-signal.SIGKILL, -signal.SIGKILL)
        with start():
            with pytest.raises(WorkerLostError, match="was lost before it had a result"):
                handle.get(WAIT_S)
            assert runtime.script("echo").run(1).get(WAIT_S) == [[1], {}]
    om.close()


def test_a_reply_queue_that_is_gone_is_made_again_and_the_task_runs_once(
    om: Store, broker: Broker | None, meeting: Meeting, tmp_path: Path
) -> None:
    if broker is None:
        pytest.skip("no broker, no queues")
    runs = tmp_path / "runs"
    handle = om.runtime.options(trusted=True).script("count_and_hold").run(str(runs), meeting.port)
    _, held = meeting.arrived()
    with brokers.Broker(broker.url).connection() as connection:
        om.engine().replies(connection.default_channel).delete()  # type: ignore[attr-defined]
    with held:
        held.sendall(b"done")
    assert handle.get(WAIT_S) == "done"
    assert runs.read_text() == "run\n"


def test_a_large_task_that_is_cancelled_leaves_the_store(store: str, broker: Broker | None) -> None:
    if broker is None:
        pytest.skip("without a broker nothing goes through the store")
    om = Store(store, broker=broker.url)
    handle = om.runtime.options(trusted=True, label="nobody").script("echo").run(np.zeros(1 << 18))
    assert om.datasets.list(".runtime/*", hidden=True) == [f".runtime/{handle.id}"]
    assert handle.cancel()
    assert om.datasets.list(".runtime/*", hidden=True) == []
    om.close()


def test_a_task_that_a_stopped_worker_took_goes_to_another(store: str, broker: Broker, redis: Any) -> None:
    label = ("--label", "stopped", "--trusted", "--workers", "1")
    om = Store(store, broker=broker.url)
    others = {client["id"] for client in redis.client_list()}

    def is_busy() -> bool:
        waits = [client["id"] for client in redis.client_list() if client["cmd"] == "brpop"]
        return set(waits) <= others

    with servers.worker(store, broker.url, *label) as first:
        echo = om.runtime.options(trusted=True, label="stopped").script("echo")
        assert not eventually_none(is_busy)  # it waits for a task
        os.kill(first.pid, signal.SIGSTOP)
        try:
            handle = echo.run(1)
            with servers.worker(store, broker.url, *label):
                assert handle.get(WAIT_S) == [[1], {}]
        finally:
            os.kill(first.pid, signal.SIGCONT)
    om.close()


@pytest.fixture
def runtime(store: str) -> Iterator[Runtime]:
    """The runtime of one process, which soon notices one that does not answer."""
    engine, opened = LocalEngine(store, workers=1, answer_s=1.5), VersionStore.open(store)
    yield Runtime(opened, "default", lambda: engine, TRUSTED)
    engine.close()
    opened.close()


def test_a_process_that_is_stopped_while_idle_is_replaced(runtime: Runtime) -> None:
    stopped = runtime.script("talk").run("here").get(WAIT_S)
    os.kill(stopped, signal.SIGSTOP)
    assert runtime.script("talk").run("there").get(WAIT_S) != stopped
    assert not psutil.pid_exists(stopped)


def test_a_process_that_is_stopped_while_it_works_is_replaced_and_its_task_begun_again(
    runtime: Runtime, meeting: Meeting
) -> None:
    handle = runtime.script("hold").run(meeting.port)
    first, lost = meeting.arrived()
    os.kill(first, signal.SIGSTOP)
    second, connection = meeting.arrived()
    with lost, connection:
        assert second != first
        connection.sendall(b"again")
        assert handle.get(WAIT_S) == "again"


def test_an_error_with_a_long_text_arrives(runtime: Runtime) -> None:
    with pytest.raises(WorkerError, match=r"xx \.\.\. \(20000000 characters\) \.\.\. xx"):
        runtime.script("fail").run("x" * 20_000_000).get(WAIT_S)
