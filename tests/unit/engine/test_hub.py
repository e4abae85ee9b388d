"""The meeting point: gathers from all, passes on what is said, stops all when one fails."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kindler.config import RunSettings
from kindler.engine.hub import Event, Hub
from kindler.engine.job import Job, equal_ranks
from kindler.engine.links import Carrier
from kindler.engine.meeting import decode_parts, encode_parts, read_numbers, write_numbers
from kindler.engine.server import listen
from kindler.engine.wire import Channel, connect
from kindler.errors import ConfigError
from kindler.frame import ChannelClosed, Frame, from_bytes

SECRET = b"s" * 32


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(
        Job(
            ranks=equal_ranks("", 2),
            secret=SECRET,
            settings=RunSettings(heartbeat_s=0.05, heartbeat_timeout_s=0.3),
        )
    ) as opened:
        yield opened


def join(hub: Hub, rank: int, host: str = "h") -> Channel:
    channel = connect(hub.address, SECRET, timeout_s=60)
    channel.send("hello", rank=rank, host=host)
    return channel


def heard(hub: Hub) -> list[Event]:
    return list(hub.events(60.0))


def test_all_are_welcomed_with_everybodys_host_once_all_are_there(hub: Hub) -> None:
    one = join(hub, 1, "b")
    with pytest.raises(TimeoutError):
        one.receive(0.05)
    assert hub.missing() == [0]

    zero = join(hub, 0, "a")

    told = [json.loads(channel.receive(60).buffers[0]) for channel in (one, zero)]
    assert [welcome["hosts"] for welcome in told] == [["a", "b"]] * 2
    assert hub.missing() == []


def test_what_all_bring_comes_back_to_all_in_the_order_of_ranks(hub: Hub) -> None:
    channels = [join(hub, rank) for rank in (0, 1)]
    for channel in channels:
        channel.receive(60)
    channels[1].send("gather", b"one", turn=0, wants="all")
    channels[0].send("gather", b"zero", turn=0, wants="all")

    assert [gathered(channel) for channel in channels] == [[b"zero", b"one"]] * 2


def test_who_asks_for_some_ranks_gets_theirs_alone(hub: Hub) -> None:
    channels = [join(hub, rank) for rank in (0, 1)]
    for channel in channels:
        channel.receive(60)
    channels[0].send("gather", b"zero", turn=0, wants=[0, 1])
    channels[1].send("gather", b"one", turn=0, wants=[])

    assert [gathered(channel) for channel in channels] == [[b"zero", b"one"], []]


def test_whole_numbers_are_added_up_at_the_hub(hub: Hub) -> None:
    channels = [join(hub, rank) for rank in (0, 1)]
    for rank, channel in enumerate(channels):
        channel.receive(60)
        channel.send("gather", write_numbers([rank + 1, -(2**40)]), turn=0, wants="sum")

    for channel in channels:
        assert [read_numbers(part) for part in gathered(channel)] == [[3, -(2**41)]]


def test_equal_bytes_of_many_ranks_come_back_once() -> None:
    parts = [b"layout" * 1000] * 500 + [b"", b"other"]
    packed = encode_parts(parts)

    assert decode_parts(from_bytes(b"".join(packed))) == parts
    assert sum(map(len, packed)) < 6005 + 8 * (502 + 3) + 100  # and a header


def test_a_result_of_many_parts_is_kept_for_the_driver(hub: Hub) -> None:
    channels = [join(hub, rank) for rank in (0, 1)]
    for channel in channels:
        channel.receive(60)
    state = bytes(range(256)) * 40_000
    channels[0].send("result", b"figures", state)

    assert channels[0].receive(60).kind == "kept"
    assert hub.results == {0: (b"figures", state)}
    assert not hub.finished


def test_a_second_one_of_a_rank_is_refused_and_the_first_stays(hub: Hub) -> None:
    first, second = join(hub, 0), join(hub, 0)
    with pytest.raises(ChannelClosed, match="closed|reset"):
        second.receive(60)
    join(hub, 1)

    assert first.receive(60).kind == "welcome"


@pytest.mark.parametrize("rank", [-1, 2, "x"])
def test_a_rank_that_the_run_does_not_have_is_refused(hub: Hub, rank: object) -> None:
    channel = connect(hub.address, SECRET, timeout_s=60)
    channel.send("hello", rank=rank, host="h")
    with pytest.raises(ChannelClosed, match="closed|reset"):
        channel.receive(60)

    assert hub.joined == 0


def test_two_hundred_silent_strangers_cost_no_thread_and_hold_up_nobody(
    hub: Hub,
) -> None:
    threads = threading.active_count()
    strangers = [socket.create_connection(hub.address, timeout=60) for _ in range(200)]
    for stranger in strangers[:100]:
        stranger.sendall(b"x" * 63)  # one byte short of a greeting
    channels = [join(hub, rank) for rank in (0, 1)]

    assert [channel.receive(60).kind for channel in channels] == ["welcome"] * 2
    assert threading.active_count() == threads
    for stranger in strangers:
        stranger.close()


def test_a_stranger_who_says_nothing_is_closed_on_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kindler.limits.GREETING_S", 0.1)
    with Hub(Job(ranks=equal_ranks("", 1), secret=SECRET, settings=RunSettings())) as hub:
        stranger = socket.create_connection(hub.address, timeout=60)
        known = connect(hub.address, SECRET, timeout_s=60)  # proves itself, and does not say who it is
        assert len(stranger.recv(64)) == 32
        assert stranger.recv(64) == b""
        with pytest.raises(ChannelClosed, match="closed"):
            known.receive(60)
        stranger.close()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n" + b" " * 64, b"\xff" * 200_000])
def test_noise_instead_of_a_greeting_is_closed_on(hub: Hub, noise: bytes) -> None:
    with socket.create_connection(hub.address, timeout=60) as stranger:
        stranger.sendall(noise)
        try:
            while stranger.recv(4096):
                pass
        except ConnectionResetError:
            pass  # it was closed on before all was read
    assert hub.joined == 0


def test_the_jobs_buffers_reach_every_worker_and_leave_the_driver_once() -> None:
    size, buffers = 7, (b"spec", bytes(range(256)) * 50_000, b"")
    with Hub(Job(ranks=equal_ranks("", size), secret=SECRET, settings=RunSettings()), cargo=buffers) as hub:
        carriers = [Carrier(rank, size, SECRET, host="127.0.0.1") for rank in range(size)]
        fetched = []

        def supervise(rank: int) -> Frame:
            channel = connect(hub.address, SECRET, timeout_s=60)
            channel.send("hello", rank=rank, host="h", cargo=carriers[rank].address)
            told = channel.receive(20).fields.get("cargo")
            fetched.append(rank if told else None)
            mine, worker = (Channel(sock) for sock in socket.socketpair())
            with ThreadPoolExecutor(1) as pool:
                got = pool.submit(worker.receive, 20)
                source = (told[0], told[1]) if told else hub.address
                carriers[rank].deliver(source, mine, check=lambda: None, timeout_s=20)
                channel.close()
                return got.result(20)

        with ThreadPoolExecutor(size) as pool:
            got = list(pool.map(supervise, range(size)))
        for carrier in carriers:
            carrier.close()

    assert got == [Frame("cargo", {}, buffers)] * size
    assert fetched.count(None) == 1


def test_an_address_that_is_not_this_machines_is_an_error_that_names_the_settings() -> None:
    settings = RunSettings()
    with pytest.raises(ConfigError, match="cannot listen on 192.0.2.1.*\n.*spark.driver.bindAddress"):
        Hub(Job(ranks=equal_ranks("", 1), secret=SECRET, settings=settings), host="192.0.2.1").__enter__()


def test_the_address_to_listen_on_may_be_another_than_the_one_that_is_told() -> None:
    with Hub(
        Job(ranks=equal_ranks("", 1), secret=SECRET, settings=RunSettings()),
        host="127.0.0.1",
        advertised="driver.example",
    ) as hub:
        host, port = hub.address
        assert host == "driver.example"
        connect(("127.0.0.1", port), SECRET, timeout_s=60).close()


def test_only_ports_of_the_range_are_taken_and_a_full_range_is_an_error() -> None:
    with listen("127.0.0.1", backlog=1) as probe:
        free = probe.getsockname()[1]
    settings = RunSettings(port_range=(free, free))
    with Hub(Job(ranks=equal_ranks("", 1), secret=SECRET, settings=settings)) as hub:
        assert hub.address[1] == free
        with pytest.raises(ConfigError, match=f"no port from {free} to {free} can be used"):
            Hub(Job(ranks=equal_ranks("", 1), secret=SECRET, settings=settings)).__enter__()


def test_a_hub_listens_on_ipv6_where_its_address_is_one() -> None:
    try:
        listen("::1", backlog=1).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with Hub(Job(ranks=equal_ranks("", 1), secret=SECRET, settings=RunSettings()), host="::1") as hub:
        channel = connect(hub.address, SECRET, timeout_s=60)
        channel.send("hello", rank=0, host="h")
        assert channel.receive(60).kind == "welcome"
        assert channel.local_host == "::1"
        channel.close()


def gathered(channel: Channel) -> list[bytes]:
    return decode_parts(channel.receive(60))


def test_an_error_is_passed_on_and_stops_the_others(hub: Hub) -> None:
    channels = [join(hub, rank) for rank in (0, 1)]
    for channel in channels:
        channel.receive(60)
    channels[1].send("error", message="boom")

    assert heard(hub) == [Event(1, "error", {"message": "boom"})]
    assert channels[0].receive(60).kind == "abort"


def test_a_member_that_goes_without_a_word_is_lost(hub: Hub) -> None:
    channels = [join(hub, rank) for rank in (0, 1)]
    for channel in channels:
        channel.receive(60)
    channels[0].close()

    event = heard(hub)[0]
    assert (event.rank, event.kind) == (0, "lost")
    assert channels[1].receive(60).kind == "abort"


def prepared(hub: Hub, *hosts: str) -> list[Channel]:
    """Ranks on these hosts that have begun, and of which one can be replaced from now on."""
    channels = [join(hub, rank, host) for rank, host in enumerate(hosts)]
    for channel in channels:
        channel.receive(60)
        channel.send("pulse", ticks=0, waiting=False)
        channel.send("open", turn=0)
        assert channel.receive(60).kind == "gathered"
    return channels


@pytest.mark.parametrize(("together", "hosts"), [(True, "aa"), (False, "ab")])
def test_nobody_waits_for_a_supervisor_of_a_stage_or_one_whose_machine_has_no_other_rank(
    together: bool, hosts: str
) -> None:
    with Hub(Job(ranks=equal_ranks("", 2), secret=SECRET, regroups=2, together=together)) as hub:
        channels = prepared(hub, *hosts)
        channels[0].close()

        [event] = heard(hub)
        assert (event.rank, event.kind) == (0, "lost")
        assert channels[1].receive(60).kind == "abort"


def test_a_supervisor_that_goes_without_a_word_is_replaced_if_a_rank_of_its_machine_is_left() -> None:
    with Hub(Job(ranks=equal_ranks("", 2), secret=SECRET, regroups=2, together=False)) as hub:
        channels = prepared(hub, "a", "a")
        channels[0].close()

        assert channels[1].receive(60).kind == "gone"
        [late] = [join(hub, 0, "a")]
        assert json.loads(late.receive(60).buffers[0])["late"]
        late.close()


def test_a_loss_is_told_of_once_a_rank_says_that_they_go_on() -> None:
    with Hub(Job(ranks=equal_ranks("", 2), secret=SECRET, regroups=2, together=False)) as hub:
        lost, other = prepared(hub, "a", "a")
        lost.close()
        assert other.receive(60).kind == "gone"
        late = join(hub, 0, "a")
        late.receive(60)
        late.send("pulse", ticks=0, waiting=False)
        late.send("open", turn=0)
        other.send("regroup")
        assert [channel.receive(60).kind for channel in (late, other)] == ["regrouped", "regrouped"]

        other.send("report", name="before")
        other.send("resumed")
        told: list[dict[str, Any]] = []
        while not told or told[-1]["name"] != "regrouped":
            told += [event.fields for event in hub.events(60)]

        assert [fields["name"] for fields in told] == ["before", "regrouped"]
        assert told[-1]["worker"] == 0
        assert told[-1]["seconds"] >= 0
        late.close()


def test_a_member_that_is_silent_too_long_is_known(hub: Hub) -> None:
    quiet = join(hub, 0, "quiet")
    for _ in range(100):
        if hub.silent():
            break
        list(hub.events(0.05))

    assert hub.silent() == [(0, "quiet")]
    quiet.close()


def test_nobody_is_silent_while_the_driver_itself_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("kindler.engine.hub.time", SimpleNamespace(monotonic=lambda: now[0]))
    settings = RunSettings(heartbeat_s=2, heartbeat_timeout_s=10)
    with Hub(Job(ranks=equal_ranks("", 1), secret=SECRET, settings=settings)) as hub:
        quiet = join(hub, 0, "quiet")
        assert quiet.receive(60).kind == "welcome"
        assert hub.silent() == []
        now[0] += 60  # nobody looks meanwhile: this process was stopped
        assert hub.silent() == []
        for _ in range(11):
            now[0] += 1
            seen = hub.silent()
        assert seen == [(0, "quiet")]
        quiet.close()


def test_a_stranger_is_not_let_in(hub: Hub) -> None:
    with pytest.raises(ChannelClosed, match="greeting"):
        connect(hub.address, b"another secret", timeout_s=60)

    assert hub.joined == 0


def test_a_gang_that_stands_still_is_asked_what_it_does() -> None:
    settings = RunSettings(stall_timeout_s=0.2, heartbeat_s=0.05, heartbeat_timeout_s=60)
    with Hub(Job(ranks=equal_ranks("", 2), secret=SECRET, settings=settings)) as hub:
        channels = [join(hub, rank, host) for rank, host in enumerate("ab")]
        for rank, channel in enumerate(channels):
            channel.receive(60)
            channel.send("pulse", ticks=3, waiting=rank == 0)
            channel.send("stacks", text="said too early")
        deadline = time.monotonic() + 60
        while not hub.stalled() and time.monotonic() < deadline:
            channels[0].send("pulse", ticks=3, waiting=True)
            list(hub.events(0.02))
        asked = [threading.Thread(target=answer, args=(c, f"stack {r}")) for r, c in enumerate(channels)]
        for thread in asked:
            thread.start()

        assert hub.stall(60.0) == ([1], {0: "a", 1: "b"}, {0: "stack 0", 1: "stack 1"})

        for thread in asked:
            thread.join()


def answer(channel: Channel, text: str) -> None:
    assert channel.receive(60).kind == "stacks"
    channel.send("stacks", text=text)


def test_the_last_words_of_a_rank_are_heard_though_it_reads_no_more() -> None:
    with Hub(Job(ranks=equal_ranks("", 1), secret=SECRET, settings=RunSettings())) as hub:
        rank = join(hub, 0)
        rank.receive(60)
        assert hub._server is not None
        with hub._server.lock:  # it has something to send, and cannot yet
            hub._members[0].peer.send("bulk", bytes(1 << 20))
            rank.send("lost", reason="its process was ended by SIGKILL")
            rank.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            rank.close()

        assert [event.fields["reason"] for event in heard(hub)] == ["its process was ended by SIGKILL"]


def reports(hub: Hub) -> list[dict[str, Any]]:
    return [event.fields for event in heard(hub) if event.kind == "report"]


def test_a_notice_makes_all_ranks_vote_once_and_end_where_others_go_on(hub: Hub) -> None:
    channels = [join(hub, rank) for rank in (0, 1)]
    for channel in channels:
        channel.receive(60)
        channel.send("pulse", ticks=0, waiting=False)
    for channel in reversed(channels):
        channel.send("gather", b"", turn=0, wants=[])
    for channel in channels:  # the hub has heard both
        assert channel.receive(60).kind == "gathered"
    channels[1].send("notice", reason="SIGTERM")
    assert [channel.receive(60).kind for channel in channels] == ["halt", "halt"]
    (notice,) = reports(hub)
    assert (notice["name"], notice["worker"], notice["host"]) == ("notice", 1, "h")
    assert (notice["reason"], notice["key"], notice["address"]) == ("SIGTERM", "", "127.0.0.1")

    hub.notice("h", "again", key="h again")
    for begun, channel in enumerate(channels, start=6):
        channel.send("halting", begun=begun)

    answers = [channel.receive(60) for channel in channels]
    assert [answer.kind for answer in answers] == ["halt_at"] * 2
    assert [answer.fields for answer in answers] == [{"last": 7, "moves": True}] * 2
    assert [notice["key"] for notice in reports(hub)] == ["h again"]
    assert not hub.ended_unbegun


def test_a_notice_before_all_have_joined_ends_those_that_have(hub: Hub) -> None:
    channel = join(hub, 0)
    channel.send("notice", reason="SIGTERM")

    assert channel.receive(60).kind == "abort"
    assert hub.ended_unbegun


def test_a_notice_before_the_first_step_ends_all(hub: Hub) -> None:
    channels = [join(hub, rank) for rank in (0, 1)]
    for channel in channels:
        channel.receive(60)
        channel.send("pulse", ticks=0, waiting=False)
    channels[0].send("notice", reason="SIGTERM")
    assert [channel.receive(60).kind for channel in channels] == ["halt", "halt"]
    for channel in channels:
        channel.send("halting", begun=0)

    assert [channel.receive(60).kind for channel in channels] == ["abort", "abort"]
    assert hub.ended_unbegun


def test_a_notice_before_all_have_their_job_is_put_to_the_vote_once_they_have(hub: Hub) -> None:
    channels = [join(hub, rank) for rank in (0, 1)]
    for channel in channels:
        channel.receive(60)
    channels[0].send("pulse", ticks=0, waiting=False)
    channels[0].send("notice", reason="SIGTERM")
    assert [notice["name"] for notice in reports(hub)] == ["notice"]
    channels[1].send("pulse", ticks=0, waiting=False)

    assert [channel.receive(60).kind for channel in channels] == ["halt", "halt"]
    assert not hub.ended_unbegun


def test_a_notice_while_a_rank_is_being_replaced_is_put_to_the_vote_once_another_is_there() -> None:
    job = Job(ranks=equal_ranks("", 2), secret=SECRET, settings=RunSettings(), movable=True, regroups=1)
    with Hub(job) as hub:
        channels = [join(hub, rank) for rank in (0, 1)]
        for channel in channels:
            assert channel.receive(60).kind == "welcome"
            channel.send("pulse", ticks=0, waiting=False)
            channel.send("open", turn=0)
            assert channel.receive(60).kind == "gathered"
        channels[1].send("lost", reason="its process was ended by SIGKILL")
        assert channels[0].receive(60).kind == "gone"
        hub.notice("h", "decommissioned")
        channels[1] = join(hub, 1)
        assert channels[1].receive(60).kind == "welcome"
        channels[1].send("pulse", ticks=0, waiting=False)

        assert [channel.receive(60).kind for channel in channels] == ["halt", "halt"]
        assert not hub.ended_unbegun


def test_a_rank_in_a_gather_with_one_that_waits_to_meet_again_need_not_wait() -> None:
    """The one that died had brought its part, so the gather does not miss it."""
    job = Job(ranks=equal_ranks("", 3), secret=SECRET, settings=RunSettings(), regroups=1)
    with Hub(job) as hub:
        channels = [join(hub, rank) for rank in range(3)]
        for channel in channels:
            assert channel.receive(60).kind == "welcome"
            channel.send("pulse", ticks=0, waiting=False)
            channel.send("open", turn=0)
            assert channel.receive(60).kind == "gathered"
        for channel in channels[1:]:
            channel.send("gather", b"", turn=0, wants=[])
        channels[2].send("lost", reason="its process was ended by SIGKILL")
        assert [channel.receive(60).kind for channel in channels[:2]] == ["gone", "gone"]
        channels[0].send("regroup")

        assert channels[1].receive(60).kind == "void"


def test_who_lost_its_process_hears_at_once_that_no_other_one_is_wanted() -> None:
    job = Job(ranks=equal_ranks("", 2), secret=SECRET, settings=RunSettings(), regroups=1)
    with Hub(job) as hub:
        channels = [join(hub, rank) for rank in (0, 1)]
        for channel in channels:
            assert channel.receive(60).kind == "welcome"
        channels[1].send("lost", reason="its process was ended by SIGKILL")  # before any rank is prepared

        assert [channel.receive(60).kind for channel in channels] == ["abort", "abort"]
