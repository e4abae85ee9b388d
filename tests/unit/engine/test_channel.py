"""Frames arrive whole and unchanged, and strangers are kept out."""

from __future__ import annotations

import json
import mmap
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kindler.engine.server import Listener, listen
from kindler.engine.wire import Channel, connect
from kindler.frame import PART_BYTES, ChannelClosed, Frame, Joiner, encode, reading


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    left, right = socket.socketpair()
    ends = Channel(left), Channel(right)
    yield ends
    for end in ends:
        end.close()


@given(
    st.text(min_size=1),
    st.dictionaries(st.text(), st.integers()),
    st.lists(st.binary(max_size=2000), max_size=4),
)
def test_a_frame_arrives_as_it_was_sent(kind: str, value: dict[str, int], buffers: list[bytes]) -> None:
    left, right = socket.socketpair()
    one, other = Channel(left), Channel(right)
    one.send(kind, *buffers, value=value)
    frame = other.receive(60)
    one.close()
    other.close()

    assert (frame.kind, frame.fields, list(frame.buffers)) == (kind, {"value": value}, buffers)


def test_a_large_buffer_arrives_whole(pair: tuple[Channel, Channel]) -> None:
    data = bytes(range(256)) * 40_000
    sender = threading.Thread(target=lambda: pair[0].send("big", data))
    sender.start()

    assert pair[1].receive(60).buffers == (data,)
    sender.join()


def test_silence_is_a_timeout_and_not_a_hang(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(TimeoutError, match="no frame in 0.01 s"):
        pair[0].receive(0.01)


def test_the_other_ends_death_is_noticed(pair: tuple[Channel, Channel]) -> None:
    pair[1].close()

    with pytest.raises(ChannelClosed, match="closed"):
        pair[0].receive(60)


def test_what_is_no_frame_is_refused(pair: tuple[Channel, Channel]) -> None:
    left, right = socket.socketpair()
    left.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ChannelClosed, match="not a frame"):
        Channel(right).receive(60)
    left.close()
    right.close()


def test_a_large_message_lets_small_ones_pass_between_its_parts(pair: tuple[Channel, Channel]) -> None:
    data = bytes(3 * PART_BYTES + 7)
    frames = list(encode("big", [b"first", data], {"n": 1}))
    small = next(encode("beat", [], {}))
    for place in range(len(frames), 0, -1):
        frames.insert(place, small)
    kinds, whole = [], None
    sender = threading.Thread(target=lambda: [pair[0]._put(frame, "") for frame in frames])
    sender.start()
    while whole is None:
        frame = pair[1].receive(60)
        kinds.append(frame.kind)
        whole = frame if frame.kind == "big" else None
    sender.join()

    assert kinds == ["beat"] * (len(kinds) - 1) + ["big"]
    assert len(kinds) > 3
    assert whole == Frame("big", {"n": 1}, (b"first", data))


def test_parts_are_passed_on_without_being_put_together(pair: tuple[Channel, Channel]) -> None:
    onward, end = (Channel(sock) for sock in socket.socketpair())
    data = bytes(range(256)) * (PART_BYTES // 128)
    sender = threading.Thread(target=lambda: pair[0].send("big", data, b"", turn=3))
    sender.start()

    def relay() -> None:
        while (frame := pair[1].receive(10, whole=False)).kind != "big":
            onward.pass_on(frame)
        onward.pass_on(frame)

    relaying = threading.Thread(target=relay)
    relaying.start()
    assert end.receive(60) == Frame("big", {"turn": 3}, (data, b""))
    sender.join()
    relaying.join()
    onward.close()
    end.close()


def test_a_buffer_of_more_than_four_gigabytes_is_announced_and_sent_in_full() -> None:
    size = 2**32 + 5
    with mmap.mmap(-1, size) as memory:  # never touched, so it takes no memory
        frames = list(encode("big", [memory], {}))
        announced = json.loads(bytes(frames[0][0])[8:])
        sent = [memoryview(piece).nbytes for frame in frames[1:-1] for piece in frame[1:]]
        del frames

    assert announced["fields"]["sizes"] == [size]
    assert sum(sent) == size
    assert max(sent) == PART_BYTES


def parsed(wire: bytes) -> Frame:
    parser = reading()
    wanted, place = next(parser), 0
    try:
        while True:
            place += wanted
            wanted = parser.send(wire[place - wanted : place])
    except StopIteration as done:
        frame: Frame = done.value
        return frame


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({"kind": "x", "fields": {}, "sizes": [2**62]}, "impossible sizes"),
        ({"kind": "x", "fields": {}, "sizes": [-1]}, "impossible sizes"),
        ({"kind": "x", "fields": [], "sizes": []}, "impossible sizes"),
        ({"kind": "x"}, "header cannot be read"),
        ([], "header cannot be read"),
    ],
)
def test_a_frame_that_claims_what_cannot_be_is_refused_before_memory_is_taken(
    header: object, complaint: str
) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(ChannelClosed, match=complaint):
        parsed(b"KDL2" + len(text).to_bytes(4, "big") + text)


@pytest.mark.parametrize("sent", [[b"ab"], [b"abc", b"d"]])
def test_parts_that_do_not_make_up_what_was_announced_are_refused(sent: list[bytes]) -> None:
    joiner = Joiner()
    parts = [Frame("part", {}, (part,), "b") for part in sent]
    with pytest.raises(ChannelClosed, match="do not fit together"):
        list(map(joiner.take, [Frame("bulk", {"sizes": [3]}, (), "b"), *parts, Frame("big", {}, (), "b")]))


def greeted(server_secret: bytes, client_secret: bytes) -> tuple[Channel, Channel]:
    let_in: list[socket.socket] = []
    listener = listen("127.0.0.1", backlog=5)
    address = listener.getsockname()[:2]
    with ThreadPoolExecutor(1) as pool:
        door = Listener(listener, server_secret, let_in.append, expected=1, timeout_s=60)
        client = pool.submit(connect, address, client_secret, timeout_s=60)
        deadline = time.monotonic() + 60
        while not let_in and not client.done() and time.monotonic() < deadline:
            door.poll(0.1)
        door.close()
        return Channel(let_in[0]) if let_in else None, client.result(timeout=60)  # type: ignore[return-value]


def test_both_ends_that_know_the_secret_talk() -> None:
    server, client = greeted(b"secret", b"secret")
    client.send("hello")
    assert server.receive(60).kind == "hello"
    server.close()
    client.close()


def test_an_end_that_does_not_know_the_secret_is_refused() -> None:
    with pytest.raises(ChannelClosed, match="greeting"):
        greeted(b"secret", b"guess")


def test_a_thread_about_to_wait_is_woken_by_close_although_the_descriptor_is_used_again(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, about_to_wait = pair[0], threading.Event()
    number, shut = closing.fileno(), threading.Event()

    class SlowPoll:
        """The thread is interrupted between looking the descriptor up and waiting for it."""

        def __init__(self) -> None:
            self._poll = poll()

        def register(self, sock: socket.socket, events: int) -> None:
            self._poll.register(sock, events)

        def poll(self, timeout: float | None) -> list[tuple[int, int]]:
            about_to_wait.set()
            shut.wait(0.5)
            return self._poll.poll(timeout)

    poll = select.poll
    monkeypatch.setattr("kindler.engine.wire.select.poll", SlowPoll)
    with ThreadPoolExecutor(1) as threads:
        heard = threads.submit(closing.receive)
        about_to_wait.wait(60)
        closing.close()
        others = [end for _ in range(4) for end in socket.socketpair()]
        shut.set()
        try:
            with pytest.raises(ChannelClosed):
                heard.result(10)
            assert number in {end.fileno() for end in others}, "no file got the same number"
        finally:
            for end in others:
                end.close()
