"""The parts of TensorFlowOnSpark that programs call themselves: managers, reservations, a node's start."""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kindler.compat.tensorflowonspark import (
    TFManager,
    TFNode,
    TFSparkNode,
    gpu_info,
    marker,
    reservation,
    util,
)
from kindler.errors import ConfigError, StartTimeoutError, TrainingError


@pytest.fixture
def manager() -> Iterator[Any]:
    started = TFManager.start(b"abc", ["input", "output"], "local")
    yield started
    started.shutdown()


def test_a_feed_reads_a_managers_queue_until_none(manager: Any) -> None:
    for row in (*range(10), None):
        manager.get_queue("input").put(row)
    feed = TFNode.DataFeed(manager)

    assert not feed.should_stop()
    assert [feed.next_batch(2), feed.next_batch(4), feed.next_batch(10)] == [
        [0, 1],
        [2, 3, 4, 5],
        [6, 7, 8, 9],
    ]
    assert feed.should_stop()
    assert feed.done_feeding
    manager.get_queue("input").join()  # all of it was acknowledged


def test_a_feed_that_answers_ends_a_batch_with_the_partition(manager: Any) -> None:
    other = TFManager.connect(manager.address, b"abc")
    queue = other.get_queue("input")
    for row in ((1, "a"), marker.EndPartition(), (2, "b"), (3, "c"), None):
        queue.put(row)
    feed = TFNode.DataFeed(manager, False, input_mapping={"y": "labels", "x": "images"})

    assert feed.next_batch(5) == {"images": [1], "labels": ["a"]}
    feed.batch_results([10])
    assert feed.next_batch(5) == {"images": [2, 3], "labels": ["b", "c"]}
    assert other.get_queue("output").get() == 10
    assert manager.get_queue("unknown") is None


def test_terminate_empties_the_queue_and_says_so(manager: Any) -> None:
    for row in range(5):
        manager.get_queue("input").put(row)
    feed = TFNode.DataFeed(manager)
    feed.next_batch(1)
    feed.terminate()

    assert feed.should_stop()
    assert manager.get("state") == "terminating"
    assert manager.get("nothing") is None
    assert manager.get_queue("input").empty()
    with pytest.raises(ConfigError, match="no queue 'other'"):
        TFNode.DataFeed(manager, qname_in="other")


def test_reservations_are_counted_and_one_with_the_same_key_is_replaced() -> None:
    nodes = reservation.Reservations(required=2, primary_keys=["node"])
    nodes.add({"node": 1})
    assert not nodes.done()
    assert nodes.remaining() == 1
    nodes.add({"node": 2})
    nodes.upsert({"node": 1, "data": "foo"})

    assert nodes.done()
    assert nodes.remaining() == 0
    assert sorted(nodes.get(), key=lambda node: int(node["node"])) == [
        {"node": 1, "data": "foo"},
        {"node": 2},
    ]


def test_clients_register_at_a_server_wait_for_each_other_and_stop_it() -> None:
    server = reservation.Server(count=4, primary_keys=["node"])
    address = server.start()

    def register(number: int) -> None:
        client = reservation.Client(address)
        assert client.register({"node": number}) == "OK"
        assert len(client.await_reservations()) == 4
        client.close()

    threads = [threading.Thread(target=register, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {node["node"] for node in server.await_reservations(timeout=10)} == set(range(4))
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"cos\nsystem\n(S'true'\ntR.\n")
        assert stranger.recv(10) == b""
    client = reservation.Client(address)
    client.request_stop()
    client.close()

    assert server.done


def test_a_server_that_waits_in_vain_says_why() -> None:
    server = reservation.Server(2)
    with pytest.raises(StartTimeoutError, match="2 nodes have not registered"):
        server.await_reservations(timeout=0)
    with pytest.raises(TrainingError, match="out of luck"):
        server.await_reservations(status={"error": "out of luck"})


def test_the_server_takes_the_host_and_ports_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reservation.Server(1).get_server_ip() == util.get_ip_address()
    assert reservation.Server(1).get_server_ports() == [0]
    monkeypatch.setenv("TFOS_SERVER_HOST", "my_host_ip")
    assert reservation.Server(1).get_server_ip() == "my_host_ip"
    monkeypatch.setenv("TFOS_SERVER_PORT", "9997-9999")
    assert reservation.Server(1).get_server_ports() == [9997, 9998, 9999]
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("TFOS_SERVER_PORT", str(port))
    first, second = reservation.Server(1), reservation.Server(1)
    assert first.start_listening_socket().getsockname()[1] == port
    with pytest.raises(ConfigError, match=str(port)):
        second.start_listening_socket()
    first.stop()


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TF_CONFIG", "")
    server = reservation.Server(1)
    yield {"cluster_template": {"chief": [0], "worker": [1, 2, 3]}, "server_addr": server.start()}
    server.stop()


def started(meta: dict[str, Any], number: int = 0, **args: Any) -> list[Any]:
    seen: list[Any] = []

    def program(args: Any, ctx: Any) -> None:
        seen.extend([ctx.job_name, ctx.task_index, os.environ["CUDA_VISIBLE_DEVICES"]])

    TFSparkNode.run(program, argparse.Namespace(**args), meta)([number])
    return seen


def test_a_node_has_the_role_of_its_number_and_knows_the_others(meta: dict[str, Any]) -> None:
    assert started(meta) == ["chief", 0, ""]
    config = json.loads(os.environ["TF_CONFIG"])
    assert config["task"] == {"type": "chief", "index": 0}
    assert [len(config["cluster"]["chief"])] == [1]
    with pytest.raises(ConfigError, match="node 7 has no role"):
        started(meta, 7)
    with pytest.raises(ConfigError, match="TFCluster.run"):
        TFSparkNode.run(print, {}, meta, background=True)


def test_gpus_are_those_of_the_task_else_free_ones_by_the_place_on_the_machine(
    meta: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="num_gpus=1, but 0"):
        started(meta, num_gpus=1)
    asked: list[Any] = []

    def get_gpus(*arguments: Any, **options: Any) -> list[str]:
        asked.append((*arguments, options))
        return ["5"]

    monkeypatch.setattr(gpu_info, "is_gpu_available", lambda: True)
    monkeypatch.setattr(gpu_info, "get_gpus", get_gpus)
    assert started(meta)[2] == "5"
    assert started(meta, num_gpus=0)[2] == ""
    spec = {"chief": ["1.1.1.1:2222"], "worker": ["1.1.1.1:2223", "1.1.1.1:2224", "2.2.2.2:2222"]}
    monkeypatch.setattr(TFSparkNode, "_get_cluster_spec", lambda _: spec)
    assert started(meta, 2, num_gpus=1) == ["worker", 1, "5"]
    assert asked == [(1, 0, {"format": gpu_info.AS_LIST}), (1, 2, {"format": gpu_info.AS_LIST})]
    monkeypatch.setenv("SPARK_EXECUTOR_POD_IP", "1.2.3.4")
    assert started(meta)[2] == ""
    with pytest.raises(ConfigError, match="num_gpus=1, but 0"):
        started(meta, num_gpus=1)
    monkeypatch.setattr(TFSparkNode, "_gpus_of_task", lambda: ["3", "4"])
    assert started(meta)[2] == "3,4"
    assert started(meta, num_gpus=1)[2] == "3"


def test_helpers_find_files_and_keep_the_executors_number(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool").touch()
    util.write_executor_id(7)

    assert util.read_executor_id() == 7
    assert util.find_in_path(f"/nowhere:{tmp_path}", "tool") == str(tmp_path / "tool")
    assert util.find_in_path("/nowhere", "tool") is False


class SlowFeed:
    """A feed whose rows come when the test says so."""

    def __init__(self) -> None:
        self.rows: queue.Queue[Any] = queue.Queue()

    def next_batch(self, size: int) -> list[Any]:
        row = self.rows.get()
        if isinstance(row, Exception):
            raise row
        return [] if row is None else [row]


def test_a_queue_of_a_node_waits_no_longer_than_it_is_told_and_loses_no_row() -> None:
    feed = SlowFeed()
    manager = TFNode.NodeManager(lambda name: feed)  # type: ignore[arg-type,return-value]
    for wait in ({"timeout": 0.01}, {"block": False}):
        with pytest.raises(queue.Empty, match=r"^$"):
            manager.get_queue("input").get(**wait)
    for row in ("a", "b", "c", ValueError("broken"), None):
        feed.rows.put(row)
    reader = manager.get_queue("input")
    assert [reader.get(timeout=60), reader.get(), reader.get(timeout=60)] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="broken"):
        reader.get(timeout=60)
    assert reader.get() is None
