"""The meeting point: gathers from all, passes on what is said, stops all when one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kindler.config import RunSettings
from kindler.engine.channel import Channel, ChannelClosed, connect
from kindler.engine.hub import Event, Hub

SECRET = b"s" * 32


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(
        size=2, secret=SECRET, settings=RunSettings(heartbeat_s=0.05, heartbeat_timeout_s=0.3)
    ) as opened:
        yield opened


def join(hub: Hub, rank: int, host: str = "h") -> Channel:
    channel = connect(hub.address, SECRET, timeout_s=5)
    channel.send("hello", rank=rank, host=host)
    return channel


def heard(hub: Hub) -> list[Event]:
    return list(hub.events(5.0))


def test_all_are_welcomed_with_everybodys_host_once_all_are_there(hub: Hub) -> None:
    one = join(hub, 1, "b")
    with pytest.raises(TimeoutError):
        one.receive(0.05)
    assert hub.missing() == [0]

    zero = join(hub, 0, "a")

    assert one.receive(5).fields == zero.receive(5).fields == {"hosts": ["a", "b"]}
    assert hub.missing() == []


def test_what_all_bring_comes_back_to_all_in_the_order_of_ranks(hub: Hub) -> None:
    channels = [join(hub, rank) for rank in (0, 1)]
    for channel in channels:
        channel.receive(5)
    channels[1].send("gather", b"one", turn=0)
    channels[0].send("gather", b"zero", turn=0)

    assert [channel.receive(5).buffers for channel in channels] == [(b"zero", b"one")] * 2


def test_an_error_is_passed_on_and_stops_the_others(hub: Hub) -> None:
    channels = [join(hub, rank) for rank in (0, 1)]
    for channel in channels:
        channel.receive(5)
    channels[1].send("error", message="boom")

    assert heard(hub) == [Event(1, "error", {"message": "boom"})]
    assert channels[0].receive(5).kind == "abort"


def test_a_member_that_goes_without_a_word_is_lost(hub: Hub) -> None:
    channels = [join(hub, rank) for rank in (0, 1)]
    for channel in channels:
        channel.receive(5)
    channels[0].close()

    event = heard(hub)[0]
    assert (event.rank, event.kind) == (0, "lost")
    assert channels[1].receive(5).kind == "abort"


def test_a_member_that_is_silent_too_long_is_known(hub: Hub) -> None:
    quiet = join(hub, 0, "quiet")
    for _ in range(100):
        if hub.silent():
            break
        list(hub.events(0.05))

    assert hub.silent() == [(0, "quiet")]
    quiet.close()


def test_a_stranger_is_not_let_in(hub: Hub) -> None:
    with pytest.raises(ChannelClosed, match="greeting"):
        connect(hub.address, b"another secret", timeout_s=5)

    assert hub.joined == 0


def test_a_gang_that_stands_still_is_asked_what_it_does() -> None:
    settings = RunSettings(stall_timeout_s=0.2, heartbeat_s=0.05, heartbeat_timeout_s=60)
    with Hub(size=2, secret=SECRET, settings=settings) as hub:
        channels = [join(hub, rank, host) for rank, host in enumerate("ab")]
        for rank, channel in enumerate(channels):
            channel.receive(5)
            channel.send("pulse", ticks=3, waiting=rank == 0)
            channel.send("stacks", text="said too early")
        deadline = time.monotonic() + 10
        while not hub.stalled() and time.monotonic() < deadline:
            channels[0].send("pulse", ticks=3, waiting=True)
            list(hub.events(0.02))
        asked = [threading.Thread(target=answer, args=(c, f"stack {r}")) for r, c in enumerate(channels)]
        for thread in asked:
            thread.start()

        assert hub.stall(5.0) == ([1], {0: "a", 1: "b"}, {0: "stack 0", 1: "stack 1"})

        for thread in asked:
            thread.join()


def answer(channel: Channel, text: str) -> None:
    assert channel.receive(5).kind == "stacks"
    channel.send("stacks", text=text)
