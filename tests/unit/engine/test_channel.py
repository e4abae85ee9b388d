"""Frames arrive whole and unchanged, and strangers are kept out."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kindler.engine.channel import Channel, ChannelClosed, accept, connect


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
    frame = other.receive(5)
    one.close()
    other.close()

    assert (frame.kind, frame.fields, list(frame.buffers)) == (kind, {"value": value}, buffers)


def test_a_large_buffer_arrives_whole(pair: tuple[Channel, Channel]) -> None:
    data = bytes(range(256)) * 40_000
    sender = threading.Thread(target=lambda: pair[0].send("big", data))
    sender.start()

    assert pair[1].receive(10).buffers == (data,)
    sender.join()


def test_silence_is_a_timeout_and_not_a_hang(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(TimeoutError, match="no frame in 0.01 s"):
        pair[0].receive(0.01)


def test_the_other_ends_death_is_noticed(pair: tuple[Channel, Channel]) -> None:
    pair[1].close()

    with pytest.raises(ChannelClosed, match="closed"):
        pair[0].receive(5)


def test_what_is_no_frame_is_refused(pair: tuple[Channel, Channel]) -> None:
    left, right = socket.socketpair()
    left.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ChannelClosed, match="not a frame"):
        Channel(right).receive(5)
    left.close()
    right.close()


def greeted(server_secret: bytes, client_secret: bytes) -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        client = pool.submit(connect, listener.getsockname()[:2], client_secret, timeout_s=5)
        try:
            server = accept(listener.accept()[0], server_secret, timeout_s=5)
        finally:
            error = client.exception(timeout=5)
        assert error is None
        return server, client.result()


def test_both_ends_that_know_the_secret_talk() -> None:
    server, client = greeted(b"secret", b"secret")
    client.send("hello")
    assert server.receive(5).kind == "hello"
    server.close()
    client.close()


def test_an_end_that_does_not_know_the_secret_is_refused() -> None:
    with pytest.raises(ChannelClosed, match="secret"):
        greeted(b"secret", b"guess")
