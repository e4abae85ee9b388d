"""What clients send over gRPC to keep the server from others: frames of HTTP/2, by hand. Keys are on."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from sklearn.linear_model import LinearRegression

from kindler import Store
from kindler.serve.grpc_api.limits import Shares, Upload, Uploads
from kindler.serve.grpc_api.messages import INFERENCE, message
from kindler.serve.http_errors import Problem
from kindler.store.keys import Keys
from tests.serve.served import Served, X, linear, serving

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, WINDOW = 0, 1, 3, 4, 8
QUEUE_BYTES = 4_000_000
WIDE = 20_000  # numbers in a row of the answer of a model


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("attacked") / "store"
    om = Store(folder)
    om.models.put(linear(), "net")
    om.models.put(LinearRegression().fit(X, np.repeat(X[:, :1], WIDE, axis=1)), "wide")
    om.close()
    return str(folder)


@pytest.fixture(scope="module")
def tokens(store: str) -> list[str]:
    keys = Keys(store)
    made = [keys.add(["predict"])[1] for _ in range(2)]
    keys.close()
    return made


@pytest.fixture(scope="module")
def served(store: str, tokens: list[str]) -> Iterator[Served]:
    with serving(store, "--grpc-port", "0", "--queue-bytes", str(QUEUE_BYTES)) as made:
        yield made


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return struct.pack(">BHBBI", len(content) >> 16, len(content) & 0xFFFF, kind, flags, stream) + content


def head(stream: int, method: str, key: str = "", *, last: bool = False) -> bytes:
    fields = {":method": "POST", ":scheme": "http", ":path": f"/{INFERENCE}/{method}", ":authority": "x"}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    fields |= {"authorization": f"Bearer {key}"} if key else {}
    block = b"".join(
        b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in fields.items()
    )
    return frame(HEADERS, 0x5 if last else 0x4, stream, block)


class Wire:
    """A connection that sends what it is told to."""

    def __init__(self, served: Served, *, window: int = 65_535) -> None:
        host, _, port = served.grpc.partition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._left = b""
        # Without a table of headers (1) every status is spelt out.
        self.send(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HIHI", 1, 0, 4, window)))

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, content: bytes) -> None:
        self._socket.sendall(content)

    def statuses(self, count: int) -> dict[int, bytes]:
        """The status of so many calls, by their stream."""
        found: dict[int, bytes] = {}
        while len(found) < count:
            while len(self._left) < 9 or len(self._left) < 9 + int.from_bytes(self._left[:3], "big"):
                some = self._socket.recv(1 << 16)
                assert some, "the server hung up"
                self._left += some
            end = 9 + int.from_bytes(self._left[:3], "big")
            kind, flags, stream = struct.unpack_from(">BBI", self._left, 3)
            content, self._left = self._left[9:end], self._left[end:]
            if kind == HEADERS and flags & 1:
                at = content.index(b"grpc-status") + len(b"grpc-status")
                found[stream] = content[at + 1 : at + 1 + content[at]]
        return found


def infer(model: str, rows: int) -> bytes:
    made = message("inference.ModelInferRequest")(model_name=model)
    made.inputs.add(name="x", datatype="FP64", shape=[rows, 3])
    made.raw_input_contents.append(np.ones((rows, 3)).tobytes())
    content: bytes = made.SerializeToString()
    return content


def called(served: Served, key: str, model: str = "net") -> Any:
    with grpc.insecure_channel(served.grpc) as channel:
        call = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
        return call(infer(model, 5), metadata=[("authorization", f"Bearer {key}")], timeout=60)


def test_a_large_message_is_neither_read_without_a_key_nor_for_a_method_that_needs_none(
    served: Served, tokens: list[str]
) -> None:
    begun = frame(DATA, 0, 1, struct.pack(">BI", 0, 65_000_000) + bytes(16_000))
    for method, key, status in [
        ("ModelInfer", "", b"16"),
        ("ServerLive", "", b"0"),
        ("ServerMetadata", "", b"0"),
        ("RepositoryIndex", tokens[0], b"7"),
    ]:
        with Wire(served) as wire:
            wire.send(head(1, method, key) + begun)
            assert wire.statuses(1) == {1: status}  # though most of the message was never sent


def test_a_message_that_is_too_large_is_refused_by_its_first_bytes(served: Served, tokens: list[str]) -> None:
    with Wire(served) as wire:
        begun = frame(DATA, 0, 1, struct.pack(">BI", 0, 256 << 20) + bytes(16_000))
        wire.send(head(1, "ModelInfer", tokens[0]) + begun)
        assert wire.statuses(1) == {1: b"8"}


def test_calls_that_never_end_take_no_room_of_others(served: Served, tokens: list[str]) -> None:
    wires = [Wire(served, window=0) for _ in range(11)]
    for wire in wires:  # 1,100 calls whose answers, of a few bytes, may not be sent
        wire.send(b"".join(head(n, "ServerLive") for n in range(1, 200, 2)))
    assert called(served, tokens[0])
    with Wire(served) as wire:
        wire.send(head(1, "ServerLive", last=True))
        assert wire.statuses(1) == {1: b"0"}
    for wire in wires:
        wire._socket.close()


def test_who_reads_no_answers_gets_no_more_of_them_and_others_do(served: Served, tokens: list[str]) -> None:
    called(served, tokens[0], "wide")  # it is loaded
    content = infer("wide", 5)
    framed = struct.pack(">BI", 0, len(content)) + content
    with Wire(served, window=0) as wire:
        for stream in (1, 3, 5, 7, 9):  # 800,000 bytes each; half of 4,000,000 may wait
            wire.send(head(stream, "ModelInfer", tokens[0]) + frame(DATA, 1, stream, framed))
        assert set(wire.statuses(3).values()) == {b"14"}
        assert called(served, tokens[1], "wide")


def test_calls_that_are_taken_back_leave_nothing_behind(served: Served, tokens: list[str]) -> None:
    called(served, tokens[0])
    server = psutil.Process(served.process.pid)
    before = server.num_fds()
    for _ in range(3):
        with Wire(served) as wire:
            for n in range(1, 2000, 2):
                try:
                    wire.send(head(n, "ModelInfer", tokens[0]) + frame(RESET, 0, n, struct.pack(">I", 8)))
                except OSError:
                    break  # the server may have had enough
    assert called(served, tokens[0])
    until = time.monotonic() + 30
    while server.num_fds() > before + 2 and time.monotonic() < until:
        called(served, tokens[0])
    assert server.num_fds() <= before + 2


def test_a_client_gets_its_share_and_the_first_thing_always() -> None:
    shares = Shares(10, 5, "things")
    back = shares.take("a", 5)
    with pytest.raises(Problem, match="busy with 5 things, 5 from this client"):
        shares.take("a")
    shares.take("b", 20)  # its first
    with pytest.raises(Problem, match="busy with 25 things"):
        shares.take("b")
    back()
    shares.take("a")


def test_the_client_with_most_messages_on_their_way_loses_them_when_they_take_too_much() -> None:
    async def play() -> list[tuple[str, int]]:
        sizes = iter([100, 150, 300, 300])
        ended: list[tuple[str, int]] = []
        uploads = Uploads(100, lambda: 0, lambda: next(sizes, 100))

        def upload(client: str, until: float | None) -> Upload:
            return Upload(client, lambda problem: ended.append((client, problem.status)), until)

        late = time.monotonic() + 3600
        for one in (upload("a", late), upload("b", late), upload("b", late), upload("c", 0.0)):
            uploads.add(one)
        for _ in range(4):
            uploads.add(upload("stream", None))  # it may wait for its next message, and is not asked first
        while len(ended) < 3:
            await asyncio.sleep(0.01)
        return ended

    assert asyncio.run(play()) == [("c", 408), ("b", 503), ("b", 503)]
