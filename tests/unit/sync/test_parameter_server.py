"""The parameter server over real sockets: strangers, garbage, what is applied, and how stale it may be."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kindler.collective import Array
from kindler.engine.job import GangMember
from kindler.engine.links import answer_calls, call
from kindler.errors import SyncError
from kindler.frameworks.base import BaseReplica
from kindler.frameworks.contract import Variables
from kindler.sync.asynchronous import ServerLink
from kindler.sync.host_group import FlatLayout, GatherCollective
from kindler.sync.parameter_server import Op, Outstanding, ParameterServer, send
from kindler.sync.shared_memory import Waiting
from kindler.testing.thread_workers import ThreadWorker, together

SECRET = b"the secret of this run"


class Counted(BaseReplica):
    """Weights from which gradients are subtracted."""

    def __init__(self) -> None:
        super().__init__(None)
        self._arrays = [np.zeros(3, np.float32), np.zeros((2, 2))]
        self.ended: list[tuple[int, dict[str, float]]] = []

    def variables(self, *groups: str) -> Variables:
        return {"parameters": {name: a.copy() for name, a in zip("ab", self._arrays, strict=True)}}

    def assign(self, variables: Mapping[str, Mapping[str, Array]]) -> None:
        self._arrays = [array.copy() for array in variables["parameters"].values()]

    def apply(self, gradients: Sequence[Array]) -> None:
        if np.isnan(gradients[0]).any():
            raise ArithmeticError("not a number")
        self._arrays = [a - g for a, g in zip(self._arrays, gradients, strict=True)]
        self.step += 1

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        self.ended.append((self.epoch, dict(logs or {})))

    def rates(self) -> list[float]:
        return [1.0 / (1 + len(self.ended))]


class Ended(Exception):
    """The test is over."""


class Served:
    """A server on a port of this machine, in threads."""

    def __init__(self, **options: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.member = GangMember(9, "ps", 0, "here", "127.0.0.1", (self.port,))
        self.server = ParameterServer(Counted(), **{"lock": True, "max_staleness": None, **options})
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with pytest.raises(Ended, match="the test is over"):
            answer_calls(self.port, "127.0.0.1", SECRET, self.server.serve, self._check, expected=4)

    def _check(self) -> None:
        if self._over.is_set():
            raise Ended("the test is over")

    def link(
        self, rank: int = 0, *, memory: bool = False, start: bool = False, ends_at: int | None = None
    ) -> ServerLink:
        worker = SimpleNamespace(
            rank=rank,
            size=2,
            host="here",
            run_id="test",
            members={9: self.member},
            call=lambda server, timeout_s: call(self.member, rank, SECRET, timeout_s=timeout_s),
        )
        link = ServerLink(
            worker,
            9,
            Counted().read(),
            waiting=Waiting(),
            timeout_s=30.0,
            memory=memory,
            ends_at=ends_at,
            owned=None,
        )
        if start:
            link.start_from(Counted().state())
        return link

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def served() -> Iterator[Served]:
    running = Served()
    yield running
    running.close()


def push(link: ServerLink, value: float) -> bool:
    for view in link.gradients:
        view[...] = value
    link.push()
    return link.receive()


def hung_up(sock: socket.socket) -> bool:
    """Whether the other end closes, whatever it said before."""
    sock.settimeout(30)
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("memory", [False, True], ids=["sockets", "shared-memory"])
def test_pushes_are_applied_once_each_and_answered_with_the_weights(served: Served, memory: bool) -> None:
    one, other = served.link(memory=memory, start=True), served.link(1, memory=memory)
    one.pull()
    other.pull()
    assert push(one, 1.0)
    assert push(other, 2.0)
    one.look()

    for link in (one, other):
        assert [array.tolist() for array in link.weights] == [[-3.0] * 3, [[-3.0] * 2] * 2]
        assert link.version == 2
    figures = one.ask(Op.EPOCH, {"epoch": 1})
    assert (figures["updates"], figures["staleness_median"], figures["staleness_max"]) == (2, 0.5, 1)
    assert figures["sync_bytes"] == 7 * FlatLayout(one.weights).nbytes
    assert other.ask(Op.EPOCH, {"epoch": 1}) == figures
    nothing = {"updates": 0, "staleness_median": 0.0, "staleness_max": 0, "sync_bytes": 0}
    assert {**one.ask(Op.EPOCH, {"epoch": 2}), **nothing} == one.ask(Op.EPOCH, {"epoch": 2})
    one.close()
    other.close()


def test_strangers_and_garbage_change_nothing_and_the_server_goes_on(served: Served) -> None:
    link = served.link(start=True)
    link.pull()
    with socket.create_connection(("127.0.0.1", served.port)) as stranger:
        stranger.sendall(b"GET /parameters HTTP/1.1\r\n\r\n" + bytes(500))
        assert hung_up(stranger)
    with pytest.raises(SyncError, match=r"cannot reach worker 9 \(ps\).*"):
        call(served.member, 5, b"another secret", timeout_s=30.0)
    for garbage in (
        b"\xff" * 64,
        struct.pack("<4sHHqQ", b"KPS1", 99, 0, 0, 0),
        struct.pack("<4sHHqQ", b"KPS1", Op.PUSH, 0, 0, 1 << 60),
        struct.pack("<4sHHqQ", b"KPS1", Op.PUSH, 1, 0, 80),
        struct.pack("<4sHHqQ", b"KPS1", Op.HELLO, 0, 0, 1 << 60),
        struct.pack("<4sHHqQ", b"KPS1", Op.STATE, 0, 0, 1 << 63),
        struct.pack("<4sHHqQ", b"KPS1", Op.HELLO, 0, 0, 4) + b"\x00\x01\x02\x03",
    ):
        member = call(served.member, 3, SECRET, timeout_s=30.0)
        member.sendall(garbage)
        assert hung_up(member)
        member.close()

    assert push(link, 1.0)
    assert link.weights[0].tolist() == [-1.0] * 3
    served.server.check()
    link.close()


@pytest.mark.parametrize("version", [1, -1])
def test_gradients_of_a_version_that_never_was_are_refused(served: Served, version: int) -> None:
    link = served.link(start=True)
    link.pull()
    link.version = version

    with pytest.raises(SyncError, match="lost the parameter server while pushing gradients"):
        push(link, 1.0)
    other = served.link(1)
    other.pull()
    assert other.version == 0
    other.close()


def test_an_update_that_fails_is_the_servers_own_error(served: Served) -> None:
    link = served.link(start=True)
    link.pull()

    with pytest.raises(SyncError, match="lost the parameter server"):
        push(link, float("nan"))
    with pytest.raises(ArithmeticError, match="not a number"):
        served.server.check()


def test_who_has_taken_weights_and_gone_holds_up_nobody() -> None:
    served = Served(max_staleness=0)
    gone, link = served.link(start=True), served.link(1)
    gone.pull()
    gone.close()
    link.pull()

    assert push(link, 1.0)
    link.close()
    served.close()


def test_gradients_that_come_after_the_last_step_are_not_applied(served: Served) -> None:
    one, late = served.link(start=True, ends_at=2), served.link(1, ends_at=2)
    late.pull()
    one.pull()

    assert [push(one, 1.0), push(one, 1.0), push(late, 8.0)] == [True, True, False]
    assert late.weights[0].tolist() == [-2.0] * 3
    assert one.ask(Op.EPOCH, {"epoch": 1})["updates"] == 2
    one.close()
    late.close()


def test_without_staleness_a_worker_gets_weights_when_nobody_computes_with_them() -> None:
    served = Served(max_staleness=0)
    one, other = served.link(start=True), served.link(1)
    one.pull()
    pulling = threading.Thread(target=other.pull)
    pulling.start()
    deadline = time.monotonic() + 30
    while not served.server._pulls and time.monotonic() < deadline:
        pulling.join(0.01)
    waited = pulling.is_alive()
    one.push()
    pulling.join()
    other.push()

    assert waited
    assert one.receive()
    assert (other.version, one.version) == (1, 2)
    assert one.ask(Op.EPOCH, {"epoch": 1})["staleness_max"] == 0
    for link in (one, other):
        link.close()
    served.close()


def test_the_first_worker_to_end_an_epoch_moves_the_schedule_for_all(served: Served) -> None:
    one, other = served.link(start=True), served.link(1)
    ends = [
        link.ask(Op.ENDED_EPOCH, {"epoch": epoch, "logs": {"loss": epoch / 2}})["rates"]
        for epoch in (1, 2)
        for link in (one, other)
    ]

    assert ends == [[1 / 2], [1 / 2], [1 / 3], [1 / 3]]
    assert served.server._replica.ended == [(1, {"loss": 0.5}), (2, {"loss": 1.0})]  # type: ignore[attr-defined]
    one.close()
    other.close()


def test_header_sends_what_it_announces() -> None:
    here, there = socket.socketpair()
    big = np.arange(1 << 18, dtype=np.uint8)
    sent = threading.Thread(target=lambda: send(here, Op.PUSH, big[:7], big, version=3))
    sent.start()
    came = bytearray()
    while len(came) < 24 + 7 + len(big):
        came += there.recv(1 << 16)
    sent.join()
    here.close()
    there.close()

    assert came[24:] == big[:7].tobytes() + big.tobytes()


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_no_order_of_events_breaks_the_bound_or_leaves_everybody_waiting(bound: int) -> None:
    random = np.random.default_rng(bound)
    out, version, held = Outstanding(bound), 0, dict[int, int]()
    done = list[int]()
    for _ in range(3000):
        takers = [who for who in range(4) if who not in held] if out.may_take() else []
        appliers = [who for who in held if out.may_apply(who, version)]
        assert takers or appliers
        who = int(random.choice(takers + appliers))
        if who in held:
            done.append(version - held.pop(who))
            out.drop(who)
            version += 1
        else:
            held[who] = version
            out.take(who, version)

    assert max(done) <= bound
    assert len(done) > 500


def test_one_more_may_take_weights_than_updates_may_come_between() -> None:
    out, unbounded = Outstanding(2), Outstanding(None)
    for who in "abc":
        assert out.may_take()
        out.take(who, 0)
        unbounded.take(who, 0)

    assert not out.may_take()
    out.drop("b")
    assert out.may_take()
    assert unbounded.may_take()
    assert unbounded.may_apply("c", 100)


def test_gradients_wait_for_older_ones_that_would_become_too_stale() -> None:
    out = Outstanding(1)
    out.take("old", 0)
    out.take("new", 0)

    assert [out.may_apply(who, 0) for who in ("old", "new")] == [True, True]
    assert [out.may_apply(who, 1) for who in ("old", "new")] == [True, False]
    out.drop("old")
    assert out.may_apply("new", 1)
    assert [out.may_apply("a stranger", version) for version in (0, 1)] == [True, False]


def test_who_takes_weights_again_comes_after_those_who_took_them_before() -> None:
    out = Outstanding(1)
    out.take("one", 0)
    out.take("other", 0)
    out.take("one", 1)

    assert [out.may_apply(who, 1) for who in ("other", "one")] == [True, False]


def test_the_collective_over_the_meeting_point_adds_and_means(tmp_path: Any) -> None:
    def exchange(worker: ThreadWorker) -> list[Any]:
        group = GatherCollective(worker)
        mine = [np.full(2, worker.rank, np.float32), np.array([worker.rank + 1])]
        means = group.mean([np.full(2, np.nan if worker.rank == 0 else 4.0)], float(worker.rank))
        return [group.sum(mine), means, group.broadcast(mine, src=1), group.mean([np.ones(1)], 0.0)]

    for total, mean, second, nothing in together(3, exchange, tmp_path):
        assert [array.tolist() for array in total] == [[3.0, 3.0], [6]]
        assert mean[0].tolist() == [4.0, 4.0]
        assert [array.tolist() for array in second] == [[1.0, 1.0], [2]]
        assert nothing[0].tolist() == [0.0]
