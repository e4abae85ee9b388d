"""Workers connect to each other directly; strangers and silence are dealt with."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

import pytest

from kindler.engine.links import connect_links
from kindler.engine.placement import own_address
from kindler.engine.wire import connect
from kindler.errors import SyncError, SyncTimeoutError
from kindler.frame import ChannelClosed


class Meeting:
    """Where ranks that are threads gather."""

    def __init__(self, size: int) -> None:
        self._told: dict[int, bytes] = {}
        self._barrier = threading.Barrier(size, timeout=60)

    def all_gather(self, rank: int, data: bytes) -> list[bytes]:
        self._told[rank] = data
        self._barrier.wait()
        return [self._told[other] for other in sorted(self._told)]


@dataclass
class Member:
    rank: int
    size: int
    meeting: Meeting
    secret: bytes = b"secret"
    address: str = "127.0.0.1"
    port_range: tuple[int, int] | None = None
    absent: frozenset[int] = frozenset()
    told: list[bytes] = field(default_factory=list)
    met: Callable[[list[bytes]], None] = lambda told: None

    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]:
        self.told = self.meeting.all_gather(self.rank, data)
        self.met(self.told)
        return {rank: self.told[rank] for rank in ranks}


def members(size: int) -> list[Member]:
    meeting = Meeting(size)
    return [Member(rank, size, meeting) for rank in range(size)]


def linked(
    gang: list[Member], peers: list[Collection[int]], timeout_s: float = 10.0
) -> list[dict[int, socket.socket] | BaseException]:
    """What each rank got from `connect_links`, or how it failed."""

    def one(member: Member) -> dict[int, socket.socket] | BaseException:
        try:
            return connect_links(member, peers[member.rank], timeout_s=timeout_s)
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(len(gang)) as pool:
        return list(pool.map(one, gang))


def close(links: list[dict[int, socket.socket] | BaseException]) -> None:
    for sockets in links:
        for sock in sockets.values() if isinstance(sockets, dict) else ():
            sock.close()


def everyone_but(rank: int, size: int) -> list[int]:
    return [other for other in range(size) if other != rank]


def port(told: bytes) -> int:
    return int(json.loads(told)[1])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_pair_that_asks_for_it_is_connected(size: int) -> None:
    links = linked(members(size), [everyone_but(rank, size) for rank in range(size)])

    for rank, mine in enumerate(links):
        assert isinstance(mine, dict), mine
        assert sorted(mine) == everyone_but(rank, size)
        for other, sock in mine.items():
            sock.sendall(bytes([rank, other]))
    for rank, mine in enumerate(links):
        assert isinstance(mine, dict)
        for other, sock in mine.items():
            assert sock.recv(2) == bytes([other, rank])
    close(links)


def test_who_waits_for_a_rank_that_has_died_meanwhile_gives_up_at_once() -> None:
    gang = members(2)

    def die(told: list[bytes]) -> None:
        gang[0].absent = frozenset({1})
        raise ConnectionAbortedError

    gang[1].met = die
    waiting, _ = linked(gang, [[1], [0]], timeout_s=600)

    assert isinstance(waiting, SyncError)
    assert "workers [1] died" in str(waiting)


def test_a_rank_that_needs_nobody_takes_part_in_the_meeting_alone() -> None:
    links = linked(members(3), [[2], [], [0]])

    assert [sorted(mine) for mine in links if isinstance(mine, dict)] == [[2], [], [0]]
    close(links)


def test_nobody_listens_any_more_once_all_are_connected() -> None:
    gang = members(2)
    links = linked(gang, [[1], [0]])

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port(gang[0].told[0])), timeout=60)
    close(links)


def test_a_stranger_without_the_secret_is_refused_and_disturbs_nobody() -> None:
    gang = members(2)
    refusals = []

    def intrude(told: list[bytes]) -> None:
        with pytest.raises(ChannelClosed, match="greeting") as caught:
            connect(("127.0.0.1", port(told[0])), b"guess", timeout_s=60)
        refusals.append(caught.value)
        with closing(socket.create_connection(("127.0.0.1", port(told[0])), timeout=60)) as noise:
            noise.sendall(b"GET / HTTP/1.1\r\n\r\n" + b" " * 64)

    gang[1].met = intrude  # before rank 1 connects itself
    links = linked(gang, [[1], [0]])

    assert len(refusals) == 1
    assert [sorted(mine) for mine in links if isinstance(mine, dict)] == [[1], [0]]
    close(links)


def test_a_member_of_the_run_that_was_not_asked_for_is_refused() -> None:
    gang = members(3)

    def intrude(told: list[bytes]) -> None:
        channel = connect(("127.0.0.1", port(told[0])), b"secret", timeout_s=60)
        channel.send("link", rank=2)
        with pytest.raises(ChannelClosed):
            channel.receive(60)
        channel.close()

    gang[1].met = intrude
    links = linked(gang, [[1], [0], []])

    assert [sorted(mine) for mine in links if isinstance(mine, dict)] == [[1], [0], []]
    close(links)


def test_a_peer_that_never_connects_is_named_in_time() -> None:
    links = linked(members(3), [[1, 2], [0], []], timeout_s=0.3)

    assert isinstance(links[0], SyncTimeoutError)
    assert links[0].missing == (2,)
    close(links)


def test_a_peer_that_cannot_be_reached_is_named() -> None:
    links = linked(members(2), [[], [0]], timeout_s=0.3)  # rank 0 does not listen

    assert isinstance(links[1], SyncError)
    assert "worker 1 cannot connect to worker 0" in str(links[1])
    close(links)


def test_many_silent_strangers_hold_up_nobody() -> None:
    gang = members(2)
    strangers = []

    def crowd(told: list[bytes]) -> None:
        address = ("127.0.0.1", port(told[0]))
        strangers.extend(socket.create_connection(address, timeout=60) for _ in range(15))

    gang[1].met = crowd
    links = linked(gang, [[1], [0]], timeout_s=4.0)

    assert [sorted(mine) for mine in links if isinstance(mine, dict)] == [[1], [0]]
    close(links)
    for stranger in strangers:
        stranger.close()


def test_on_one_host_workers_meet_on_the_loopback() -> None:
    assert own_address(["h", "h"], seen="192.0.2.7") == "127.0.0.1"


def test_of_several_hosts_each_is_reached_where_it_reaches_the_meeting_point() -> None:
    assert own_address(["a", "b"], seen="2001:db8::7") == "2001:db8::7"
