"""HTTP/2 under gRPC: header fields by the RFC's own examples, and what clients send that break the rules."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from kindler import Omega
from kindler.serve.grpc_api.calls import Call
from kindler.serve.grpc_api.connection import Connection
from kindler.serve.grpc_api.header_fields import FieldError, FieldReader, written
from kindler.serve.grpc_api.huffman import HuffmanError, decoded
from kindler.serve.grpc_api.messages import INFERENCE, message
from kindler.serve.grpc_api.tensors import InferMessage
from kindler.serve.http_errors import Problem
from kindler.serve.request_body import Bodies
from kindler.serve.settings import ServeSettings
from tests.serve.served import Served, expected, linear, serving

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PUSH, PING, GO_AWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
QUEUE_BYTES = 4_000_000


def reader() -> FieldReader[list[tuple[str, str]]]:
    return FieldReader(list, 64 << 10)


def test_header_fields_are_read_as_in_the_examples_of_the_rfc() -> None:
    common = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "www.example.com")]
    for blocks in (
        ("828684410f7777772e6578616d706c652e636f6d", "828684be58086e6f2d6361636865"),
        ("828684418cf1e3c2e5f23a6ba0ab90f4ff", "828684be5886a8eb10649cbf"),
    ):
        read = reader()
        assert read.read(bytes.fromhex(blocks[0])) == common
        assert read.read(bytes.fromhex(blocks[1])) == [*common, ("cache-control", "no-cache")]
        third = "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf"
        assert read.read(bytes.fromhex(third)) == [
            (":method", "GET"),
            (":scheme", "https"),
            (":path", "/index.html"),
            (":authority", "www.example.com"),
            ("custom-key", "custom-value"),
        ]


def test_a_full_table_forgets_its_oldest_fields_as_in_the_examples_of_the_rfc() -> None:
    read = reader()
    first = (
        "3fe101"  # the table has 256 bytes
        "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff"
        "6e919d29ad171863c78f0b97c8e9ae82ae43d3"
    )
    date = "Mon, 21 Oct 2013 20:13:21 GMT"
    rest = [("cache-control", "private"), ("date", date), ("location", "https://www.example.com")]
    assert read.read(bytes.fromhex(first)) == [(":status", "302"), *rest]
    assert read.read(bytes.fromhex("4883640effc1c0bf")) == [(":status", "307"), *rest]
    third = (
        "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdfcd5b"
        "3960d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007"
    )
    assert read.read(bytes.fromhex(third)) == [
        (":status", "200"),
        ("cache-control", "private"),
        ("date", "Mon, 21 Oct 2013 20:13:22 GMT"),
        ("location", "https://www.example.com"),
        ("content-encoding", "gzip"),
        ("set-cookie", "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"),
    ]


def test_a_block_means_something_else_once_the_table_has_changed() -> None:
    read = reader()
    read.read(b"\x40\x01a\x011")
    assert read.read(b"\xbe") == [("a", "1")]
    assert read.read(b"\xbe") == [("a", "1")]
    read.read(b"\x40\x01b\x012")
    assert read.read(b"\xbe") == [("b", "2")]


def test_what_is_written_is_read_again() -> None:
    fields = [("grpc-status", "0"), ("x-long", "x" * 1000), ("x-empty", "")]
    assert reader().read(written(fields)) == fields


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (b"\x80", "without a number"),
        (b"\xff\xff\xff\xff\xff\xff", "without an end"),
        (b"\xbe", "cannot be read"),  # of a table that is empty
        (b"\x00\x05ab", "ends too early"),
        (b"\x00\x81\xff\x00", "middle of a word"),  # nothing but padding, and too much of it
        (b"\x82\x3f\xe1\x01", "not agreed upon"),  # the size of the table after a field
        (b"\x3f\xe1\x7f", "not agreed upon"),  # a table that is larger than allowed
        (written([("a", "x" * 70_000)]), "more than 65536 bytes"),
    ],
)
def test_a_block_that_is_none_is_refused(block: bytes, told: str) -> None:
    with pytest.raises(FieldError, match=told):
        reader().read(block)


def test_a_huffman_text_does_not_go_on_after_its_end() -> None:
    with pytest.raises(HuffmanError, match="after its end"):
        decoded(b"\xff\xff\xff\xff\xff")


def test_raw_tensors_are_taken_out_of_a_message_and_the_rest_is_what_it_was() -> None:
    made = message("inference.ModelInferRequest")(model_name="net", id="7")
    made.inputs.add(name="x", datatype="FP32", shape=[1]).parameters["a"].int64_param = 1 << 40
    made.raw_input_contents.extend([b"1234", b"", b"x" * 300])
    sent = InferMessage(made.SerializeToString())
    assert [bytes(one) for one in sent.raw] == list(made.raw_input_contents)
    del made.raw_input_contents[:]
    assert sent.parsed() == made
    assert (sent.without_tensors().id, len(sent.without_tensors().inputs)) == ("7", 0)


@pytest.mark.parametrize(
    "content",
    [
        b"\x3a\x05abc",
        b"\x3a",
        b"\x0b",
        b"\xff" * 20,
        b"\x08" + b"\xff" * 20,
        b"\x2a\x00" * 20_000,
        b"\x0a\x01\xff",
    ],
)
def test_bytes_that_are_no_message_are_a_problem_of_the_sender(content: bytes) -> None:
    with pytest.raises(Problem, match="cannot be read"):
        InferMessage(content).parsed()


def test_a_message_of_many_small_tensors_is_read_and_one_of_empty_fields_is_not() -> None:
    made = message("inference.ModelInferRequest")(model_name="net")
    for i in range(2000):
        made.inputs.add(name=f"{i}", datatype="BOOL", shape=[1])
        made.raw_input_contents.append(b"1")
    assert len(InferMessage(made.SerializeToString()).raw) == 2000
    for field in (b"\x2a\x00", b"\x3a\x00"):
        with pytest.raises(Problem, match="256 fields in its first 512 bytes"):
            InferMessage(field * 300)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("http2") / "store"
    om = Omega(folder)
    om.models.put(linear(), "net")
    om.close()
    limits = ("--queue-bytes", str(QUEUE_BYTES), "--body-bytes", str(2 * QUEUE_BYTES))
    with serving(folder, "--grpc-port", "0", *limits) as made:
        yield made


class Wire:
    """A connection of HTTP/2 that sends what it is told to."""

    def __init__(self, served: Served, begin: bytes = PREFACE) -> None:
        host, _, port = served.grpc.partition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        self._socket.sendall(begin)
        if begin == PREFACE:
            self.send(SETTINGS, 0, 0, b"")

    def send(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        self._socket.sendall(frame(kind, flags, stream, content))

    def ask(self, stream: int, method: str = "ModelInfer", *extra: tuple[str, str]) -> None:
        fields = [(":method", "POST"), (":scheme", "http"), (":path", f"/{INFERENCE}/{method}")]
        self.send(HEADERS, 0x4, stream, written([*fields, ("content-type", "application/grpc"), *extra]))

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """What the server sends, until it hangs up."""
        while head := self.exactly(9):
            high, low, kind, flags, stream = struct.unpack(">BHBBI", head)
            yield kind, flags, stream, self.exactly(high << 16 | low)

    def answer(self, stream: int) -> dict[str, str]:
        """The last header fields of a stream."""
        read = reader()
        for kind, flags, found, content in self.frames():
            if kind == HEADERS and found == stream:
                fields = dict(read.read(content))
                if flags & 1:
                    return fields
        raise AssertionError("the server hung up")

    def close(self) -> None:
        self._socket.close()

    def exactly(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            try:
                some = self._socket.recv(size - len(content))
            except ConnectionResetError:
                return b""
            if not some:
                return b""
            content += some
        return content


def infer_of(rows: int, wire: Wire, stream: int) -> None:
    made = message("inference.ModelInferRequest")(model_name="net")
    made.inputs.add(name="x", datatype="FP64", shape=[rows, 3])
    made.raw_input_contents.append(np.ones((rows, 3)).tobytes())
    content = made.SerializeToString()
    wire.send(DATA, 0x1, stream, struct.pack(">BI", 0, len(content)) + content)


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    head = struct.pack(">BHBBI", len(content) >> 16, len(content) & 0xFFFF, kind, flags, stream)
    return head + content


def asking(stream: int) -> bytes:
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/x"), ("content-type", "application/grpc")]
    return frame(HEADERS, 0x4, stream, written(fields))


BEGIN = PREFACE + frame(SETTINGS, 0, 0, b"")
BREAKS: dict[str, tuple[int, bytes]] = {
    "no settings": (1, PREFACE + frame(PING, 0, 0, bytes(8))),
    "a frame that is too long": (6, BEGIN + frame(DATA, 0, 1, bytes(20_000))),
    "content of no call": (1, BEGIN + frame(DATA, 0, 5, b"x")),
    "a call of the server's": (1, BEGIN + asking(2)),
    "a promise": (1, BEGIN + frame(PUSH, 0x4, 1, bytes(8))),
    "a continuation of nothing": (1, BEGIN + frame(CONTINUATION, 0x4, 1, b"")),
    "a frame between two of one's fields": (
        1,
        BEGIN + frame(HEADERS, 0, 1, b"") + frame(PING, 0, 0, bytes(8)),
    ),
    "more padding than content": (1, BEGIN + asking(1) + frame(DATA, 0x8, 1, b"\x05x")),
    "a short ping": (6, BEGIN + frame(PING, 0, 0, b"x")),
    "half a setting": (6, BEGIN + frame(SETTINGS, 0, 0, b"x")),
    "a window of nothing": (1, BEGIN + frame(WINDOW, 0, 0, bytes(4))),
    "a window without an end": (3, BEGIN + frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff")),
    "a reset of no call": (1, BEGIN + frame(RESET, 0, 1, bytes(4))),
    "fields that are none": (9, BEGIN + frame(HEADERS, 0x5, 1, b"\xbe")),
    "fields without an end": (
        11,
        BEGIN + frame(HEADERS, 0, 1, b"") + 5 * frame(CONTINUATION, 0, 1, bytes(16_000)),
    ),
    "continuations of nothing": (
        11,
        BEGIN + frame(HEADERS, 0, 1, b"") + 9_000 * frame(CONTINUATION, 0, 1, b""),
    ),
    "pings": (11, BEGIN + 9_000 * frame(PING, 0, 0, bytes(8))),
    "settings": (11, BEGIN + 9_000 * frame(SETTINGS, 0, 0, b"")),
    "content of nothing": (11, BEGIN + asking(1) + 9_000 * frame(DATA, 0, 1, b"")),
    "calls that are taken back": (
        11,
        BEGIN + b"".join(asking(n) + frame(RESET, 0, n, bytes(4)) for n in range(1, 18_000, 2)),
    ),
}


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1)

    def write(self, content: bytes) -> None:
        self.written += content

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


class Host:
    """Takes calls, and answers none."""

    def __init__(self) -> None:
        self.bodies = Bodies(ServeSettings())
        self.calls: list[Call] = []

    def begin(self, call: Call) -> None:
        call.bodies = self.bodies
        self.calls.append(call)

    def opened(self, connection: Connection) -> None:
        pass

    def closed(self, connection: Connection) -> None:
        pass


@pytest.mark.parametrize(("code", "sent"), BREAKS.values(), ids=BREAKS)
def test_who_breaks_the_rules_is_told_and_loses_the_connection(code: int, sent: bytes) -> None:
    async def told() -> bytes:
        host, transport = Host(), Transport()
        connection = Connection(host)
        connection.connection_made(transport)  # type: ignore[arg-type]
        for at in range(0, len(sent), 100_000):
            if not transport.closed:
                connection.data_received(sent[at : at + 100_000])
        assert transport.closed
        connection.connection_lost(None)
        assert host.bodies.held_bytes == 0
        return transport.written

    written_by_server = asyncio.run(told())
    at = written_by_server.rindex(struct.pack(">BBI", GO_AWAY, 0, 0))
    assert struct.unpack_from(">II", written_by_server, at + 6)[1] == code


def test_an_answer_waits_for_the_clients_windows() -> None:
    async def told() -> list[int]:
        host, transport = Host(), Transport()
        connection = Connection(host)
        connection.connection_made(transport)  # type: ignore[arg-type]
        small = struct.pack(">HI", 4, 1000)
        connection.data_received(PREFACE + frame(SETTINGS, 0, 0, small) + asking(1))
        host.calls[0].send(bytes(2495))
        host.calls[0].finish(0)
        sizes = []
        for more in (
            b"",
            frame(WINDOW, 0, 1, struct.pack(">I", 500)),
            frame(WINDOW, 0, 1, b"\x00\x01\x00\x00"),
        ):
            connection.data_received(more)
            await asyncio.sleep(0)
            sizes.append(
                sum(len(content) for kind, _, _, content in split(transport.written) if kind == DATA)
            )
            assert (not connection.calls) == (sizes[-1] == 2500)
        return sizes

    assert asyncio.run(told()) == [1000, 1500, 2500]


def split(content: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    at = 0
    while at < len(content):
        high, low, kind, flags, stream = struct.unpack_from(">BHBBI", content, at)
        end = at + 9 + (high << 16 | low)
        yield kind, flags, stream, content[at + 9 : end]
        at = end


def test_who_speaks_http_1_is_told_so(served: Served) -> None:
    wire = Wire(served, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert wire.exactly(12) == b"HTTP/1.1 505"


def test_a_call_that_is_none_gets_an_http_status_and_others_go_on(served: Served) -> None:
    wire = Wire(served)
    fields = [(":method", "GET"), (":scheme", "http"), (":path", "/")]
    wire.send(HEADERS, 0x5, 1, written(fields))
    assert wire.answer(1) == {":status": "405"}
    wire.send(HEADERS, 0x5, 3, written([("x", "1"), *fields]))  # pseudo fields after others
    assert any(kind == RESET and stream == 3 for kind, _, stream, _ in wire.frames())


def test_content_in_pieces_padded_and_beside_other_calls_is_answered(served: Served) -> None:
    wire = Wire(served)
    wire.ask(1)
    made = message("inference.ModelInferRequest")(model_name="net")
    made.inputs.add(name="x", datatype="FP64", shape=[1, 3])
    made.raw_input_contents.append(np.ones((1, 3)).tobytes())
    content = made.SerializeToString()
    framed = struct.pack(">BI", 0, len(content)) + content
    for at in range(len(framed)):
        wire.send(DATA, 0x8, 1, b"\x03" + framed[at : at + 1] + bytes(3))
        if at == 7:
            wire.ask(3)
            infer_of(1, wire, 3)
            assert wire.answer(3)["grpc-status"] == "0"
    wire.send(DATA, 0x1, 1, b"")
    assert wire.answer(1)["grpc-status"] == "0"


def test_what_calls_send_counts_from_the_first_byte_and_is_let_go_with_them(served: Served) -> None:
    wire = Wire(served)
    piece = bytes(16_000)
    for stream in (1, 3, 5, 7, 9, 11):
        wire.ask(stream)
        wire.send(DATA, 0, stream, struct.pack(">BI", 0, 900_000))
    for _ in range(55):
        for stream in (1, 3, 5, 7, 9, 11):
            wire.send(DATA, 0, stream, piece)
    refused = next(content for kind, flags, _, content in wire.frames() if kind == HEADERS and flags & 1)
    assert dict(reader().read(refused))["grpc-status"] == "14"
    wire.close()
    again = Wire(served)
    again.ask(1)
    infer_of(10, again, 1)
    assert again.answer(1)["grpc-status"] == "0"


def test_large_messages_packed_ones_and_large_answers_pass(served: Served) -> None:
    rows = np.random.default_rng(0).normal(size=(100_000, 3))
    made = message("inference.ModelInferRequest")(model_name="net")
    made.inputs.add(name="x", datatype="FP64", shape=rows.shape)
    made.raw_input_contents.append(rows.tobytes())
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
        with grpc.insecure_channel(served.grpc, compression=compression) as channel:
            call = channel.unary_unary(
                f"/{INFERENCE}/ModelInfer",
                request_serializer=lambda m: m.SerializeToString(),
                response_deserializer=message("inference.ModelInferResponse").FromString,
            )
            reply = call(made, timeout=60)
        assert np.allclose(np.frombuffer(reply.raw_output_contents[0]), expected(rows))


def test_messages_that_become_much_larger_are_read_elsewhere_or_refused(served: Served) -> None:
    server = psutil.Process(served.process.pid)
    made = message("inference.ModelInferRequest")(model_name="net")
    tensor = made.inputs.add(name="x", datatype="INT64", shape=[1, 2_000_000])
    tensor.contents.int64_contents.extend([1] * 2_000_000)
    many = made.SerializeToString()
    texts = message("inference.ModelInferRequest")(model_name="net")
    texts.inputs.add(name="x", datatype="BYTES", shape=[1, 400_000])
    texts.raw_input_contents.append(struct.pack("<I", 0) * 400_000)
    with grpc.insecure_channel(served.grpc) as channel:
        call = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
        with pytest.raises(grpc.RpcError, match="needs inputs"):
            call(b"\x0a\x03net", timeout=60)  # the model is loaded
        before = server.memory_info().rss
        for content, told in [
            (b"\x0a\x03net" + b"\x2a\x00" * 1_000_000, "256 fields"),
            (b"\x0a\x03net" + b"\x2a\x05\x0a\x03abc" * 1_000_000, "more than"),
            (b"\x0a\x03net" + b"\x2a\x05\x0a\x03abc" * 9_000, "twice|unknown datatype"),
            (many, "shape"),
            (texts.SerializeToString(), "shape|text"),
        ]:
            with pytest.raises(grpc.RpcError, match=told) as caught:
                call(content, timeout=60)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert server.memory_info().rss - before < 40 << 20
