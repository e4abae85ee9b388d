"""Arrays in shared memory, and a process that lies about them."""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from kindler.engine.fork_server import Recipe
from kindler.engine.wire import Channel
from kindler.errors import ConfigError, DataError, MissingExtraError, UntrustedError
from kindler.sandbox.child import REPLY, WORD, RemoteError, decoded_error, encoded_error, read_word
from kindler.sandbox.memory import Area, layout, packed_objects, read_arrays, unpacked_objects
from kindler.sandbox.process import BlockingProcess, ProcessLost, Reply, SandboxProcess, Start

KINDS = [
    np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
    np.array(5, dtype=np.int64),
    np.zeros((0, 3), dtype=np.float16),
    np.array([True, False]),
    np.array(["a", "ä€"]),
    np.array(["2026-11-16", "NaT"], dtype="datetime64[ns]"),
    np.array([1 + 2j]),
    np.array(["x", None, 1, 2.5, True], dtype=object),
    np.array([b"\xff\x00", b"", None], dtype=object),
    np.array([[b"a"], [b"bc"]], dtype=object),
]


@pytest.mark.parametrize(
    "sizes", [[-1], [5], [1, 2], [1, -9, 1], [2, 1 << 62, 1 << 62], [3, 2**63 - 1, 2**63 - 1, 3]]
)
def test_sizes_of_texts_that_do_not_fit_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="size"):
        unpacked_objects("bytes", np.array(sizes, "<i8").tobytes() + b"x")


def test_numbers_that_json_has_not_stay_what_they_are_among_objects() -> None:
    items = ["x", None, float("nan"), float("inf"), -float("inf"), 1.5]
    assert repr(unpacked_objects(*packed_objects(items))) == repr(items)


@pytest.fixture
def area() -> Any:
    made = Area.create(1 << 16)
    yield made
    made.close()


@pytest.mark.parametrize("array", KINDS, ids=lambda array: str(array.dtype))
def test_an_array_comes_out_as_it_went_in(area: Area, array: Any) -> None:
    plan = layout({"x": [array], "y": [array]}, at=5)
    plan.write(area.memory)
    entries = orjson.loads(orjson.dumps(plan.entries))
    for trusted in (True, False):
        found = read_arrays(area.memory, entries, trusted=trusted)
        for name in "xy":
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(found[name], array)
        del found


def test_parts_become_one_array_and_dates_come_through(area: Area) -> None:
    plan = layout({"x": [np.ones((2, 2)), np.zeros((1, 2))]})
    plan.write(area.memory)
    found = read_arrays(area.memory, plan.entries, trusted=False)
    assert found["x"].tolist() == [[1, 1], [1, 1], [0, 0]]

    day = datetime.date(2026, 11, 16)
    plan = layout({"x": [np.array([day], dtype=object)]})
    plan.write(area.memory)
    assert read_arrays(area.memory, plan.entries, trusted=True)["x"].tolist() == [day]
    with pytest.raises(ValueError, match="no form of objects"):  # Arrow's bytes of a stranger are not read
        read_arrays(area.memory, plan.entries, trusted=False)
    plain = layout({"x": [np.array([day], dtype=object)]}, arrow=False)
    plain.write(area.memory)
    assert read_arrays(area.memory, plain.entries, trusted=False)["x"].tolist() == ["2026-11-16"]


@pytest.mark.parametrize(
    "entries",
    [
        [["x", "<f8", [8193], 0, 8193 * 8]],
        [["x", "<f8", [1], (1 << 16) - 4, 8]],
        [["x", "<f8", [2], 0, 8]],
        [["x", "<f8", [-1], 0, 8]],
        [["x", "<f8", [1], -8, 8]],
        [["x", "<f8", [1.0], 0, 8]],
        [["x", "O", [1], 0, 8]],
        [["x", "f8,f8", [1], 0, 16]],
        [["x", "S0", [1 << 60], 0, 0]],
        [["x", "<f8", [1] * 120_000, 0, 8]],
        [["x", "<f8", [1 << 60] * 60 + [0], 0, 0]] * 2 + [["y", "<f8", [1 << 70], 0, 8]],
        [[str(i), "<f8", [8192], 0, 8192 * 8] for i in range(2)] + [["y", "<f8", [1], 0, -8192 * 8]],
        [[1, "<f8", [1], 0, 8]],
        [["x", "bytes", [1], 0, 64]],
        [[str(i), "<f8", [8192], 0, 8192 * 8] for i in range(2)],
        {"x": 1},
        [["x"]],
    ],
)
def test_what_cannot_be_is_not_read(area: Area, entries: Any) -> None:
    with pytest.raises(
        (ValueError, TypeError, IndexError), match=r"array|unpack|range|sizes|itemsize|lie on|no form of"
    ):
        read_arrays(area.memory, entries, trusted=False)


def test_an_area_can_neither_be_cut_short_nor_made_longer(area: Area) -> None:
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError, match="not permitted"):
            os.ftruncate(area.fd, size)


def test_errors_cross_as_what_they_are_and_only_a_few_classes_do() -> None:
    for error in (
        ConfigError("no"),
        DataError("bad"),
        MemoryError("full"),
        UntrustedError(what="it", reason="code"),
        MissingExtraError(what="a model", package="p", extra="e"),
    ):
        again = decoded_error(orjson.loads(orjson.dumps(encoded_error(error))))
        assert (type(again), str(again)) == (type(error), str(error))
    other = decoded_error(encoded_error(KeyboardInterrupt("stop")))
    assert isinstance(other, RemoteError)
    assert (other.name, str(other)) == ("KeyboardInterrupt", "stop")
    for nonsense in (None, {}, {"type": "UntrustedError", "fields": {"what": 1}}, {"type": "SystemExit"}):
        assert isinstance(decoded_error(nonsense), RemoteError)


class _Child:
    """What `SandboxProcess` has of a child, with the other end in the test's hands."""

    pid = 0

    def __init__(self) -> None:
        mine, self.theirs = socket.socketpair()
        self.channel = Channel(mine)
        reading, writing = os.pipe()
        os.close(writing)
        self.output = os.fdopen(reading, "rb")

    def kill(self) -> None:
        self.theirs.close()

    def wait(self, timeout_s: float) -> tuple[int, bool]:
        return -9, False

    def close(self) -> None:
        self.channel.close()
        self.output.close()


def _called(answer: Callable[[socket.socket, Any], None]) -> Reply:
    """What the server makes of a process that answers a call so."""

    async def play() -> Reply:
        child, moves = _Child(), ThreadPoolExecutor(1)
        start = Start(
            recipe=Recipe(),
            target="",
            options={},
            sandboxed=False,
            load_s=9,
            call_s=9,
            memory_bytes=1,
            output_bytes=1 << 26,
        )
        process = SandboxProcess(child, start, executor=moves, lost=lambda process, why: None)  # type: ignore[arg-type]
        done: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        process.call({}, {"x": [np.ones((2, 2))]}, done.set_result)
        read_word(child.theirs)
        answer(child.theirs, process._areas[0].memory)
        found = await asyncio.wait_for(done, 20)
        process.end()
        moves.shutdown()
        return found

    return asyncio.run(play())


def _reply(header: Any, kind: bytes = REPLY) -> Callable[[socket.socket, Any], None]:
    def answer(sock: socket.socket, memory: Any) -> None:
        text = orjson.dumps(header)
        memory[: len(text)] = text
        sock.sendall(WORD.pack(kind, 0, 0, len(text)))

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        _reply({"arrays": [["y", "<f8", [1], 1 << 40, 8]]}),
        _reply({"arrays": "all"}),
        _reply([]),
        _reply({"model": {"methods": []}}),
        _reply({"arrays": []}, b"R"),
        _reply({}, b"?"),
        lambda sock, memory: sock.sendall(WORD.pack(REPLY, 0, 1 << 60, 1 << 60)),
        lambda sock, memory: sock.sendall(b"\xff" * 100),
    ],
)
def test_a_process_that_answers_nonsense_is_ended_and_its_call_fails(
    answer: Callable[[socket.socket, Any], None],
) -> None:
    found = _called(answer)
    assert isinstance(found.error, ProcessLost)
    assert "sent a malformed reply" in str(found.error)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (_reply({"arrays": [["y", "<f8", [1] * 120_000, 0, 8]]}), "dimensions"),
        (_reply({"arrays": [[[]] * 600_000]}), "more than 524288 values"),
        (_reply({"arrays": [["y", "json", [1], 1 << 27, 1 << 20]]}), "no array"),
        (_reply({"arrays": [["y", "|u1", [1 << 26], 0, 1 << 26], ["z", "|u1", [1], 0, 1]]}), "are allowed"),
    ],
    ids=["dimensions", "values", "outside", "bytes"],
)
def test_a_process_gets_no_more_than_a_model_needs(
    answer: Callable[[socket.socket, Any], None], told: str
) -> None:
    found = _called(answer)
    assert isinstance(found.error, ProcessLost)
    assert told in str(found.error)


def test_a_process_that_answers_while_its_answer_is_read_is_ended() -> None:
    large = 2 << 20

    def answer(sock: socket.socket, memory: Any) -> None:
        text = orjson.dumps({"arrays": [["y", "|u1", [large], 0, large]]})
        memory[large : large + len(text)] = text
        sock.sendall(WORD.pack(REPLY, 0, large, len(text)) * 200)  # a copy of all of it for each

    found = _called(answer)
    assert isinstance(found.error, ProcessLost)
    assert "it was not asked" in str(found.error)


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def _start(**settings: Any) -> Start:
    defaults: dict[str, Any] = {
        "recipe": Recipe(idle_s=5),
        "target": "sandbox_targets:load",
        "options": {"says": "hello"},
        "sandboxed": None,
        "load_s": 60,
        "call_s": 60,
        "memory_bytes": 1 << 32,
        "output_bytes": 1 << 27,
    }
    return Start(**{**defaults, **settings})


def test_arrays_bytes_and_fields_go_there_and_back_whatever_their_size(targets: None) -> None:
    said: list[bytes] = []
    process = BlockingProcess(_start(printed=said.append))
    try:
        large = np.arange(4 << 20, dtype=np.float64)  # more than the area of a process holds
        content = b"\0x" * (2 << 20)
        reply = process.call({"prints": "many words\n"}, {"a": [large[:5], large[5:]], "b": [content]})
        np.testing.assert_array_equal(reply.outputs["a"], large * 2)
        assert reply.outputs["b"] == content
        assert reply.fields["parts"] == ["a", "b"]
        assert b"".join(said) == b"many words\n"  # before the answer
        assert process.call({}, {"c": [np.array(3)]}).outputs["c"] == 6

        with pytest.raises(RemoteError, match="no such thing") as raised:
            process.call({"raises": "no such thing"}, {})
        assert raised.value.name == "ValueError"
        with pytest.raises(TypeError, match="not JSON serializable"):
            process.call({}, {"a": [np.array([object()], dtype=object)]})
        assert process.call({}, {}).fields["pid"] == reply.fields["pid"]

        os.kill(reply.fields["pid"], 9)
        for _ in range(2):  # in the call, and ever after
            with pytest.raises(ProcessLost, match="SIGKILL") as lost:
                process.call({}, {})
            assert lost.value.exit_code == -9
    finally:
        process.close()


def test_a_call_may_take_so_much_memory_and_so_long(targets: None) -> None:
    async def play() -> None:
        process, said = await SandboxProcess.started(_start(), loads=None, moves=None)
        assert said == {"says": "hello"}
        with pytest.raises(MemoryError) as caught:
            await process.ask({"takes": 512 << 20}, {}, growth_bytes=64 << 20)
        assert str(caught.value) == ""  # Python's own
        assert (await process.ask({"takes": 512 << 20}, {}, growth_bytes=1 << 30)).error is None
        with pytest.raises(MemoryError, match="allocate"):  # numpy's own class of it
            await process.ask({}, {"a": [np.zeros(8 << 20)]}, growth_bytes=1 << 20)
        with pytest.raises(MemoryError, match=f"the server accepts at most {1 << 27}"):
            await process.ask({}, {"a": [bytes(1 << 27)]}, growth_bytes=1 << 30)
        process.end()
        process, _ = await SandboxProcess.started(_start(call_s=0.1), loads=None, moves=None)
        with pytest.raises(ProcessLost, match=r"did not answer within 0.1 s") as lost:
            await process.ask({"hangs": True}, {})
        assert lost.value.hung
        with pytest.raises(RemoteError, match="no model"):
            await SandboxProcess.started(_start(options={"refused": "no model"}), loads=None, moves=None)

    asyncio.run(play())


def test_a_process_begins_a_second_call_while_the_first_is_computed_elsewhere(targets: None) -> None:
    async def play() -> None:
        start = _start(target="sandbox_targets:load_later", calls=2)
        process, _ = await SandboxProcess.started(start, loads=None, moves=ThreadPoolExecutor(1))
        large = np.arange(4 << 20, dtype=np.float64)  # comes in an area of its own
        # The first is computed once the second has begun, which a thread writes before it is sent.
        first = asyncio.ensure_future(process.ask({"needs": 2}, {"x": [np.array([1, 2])]}))
        second = asyncio.ensure_future(process.ask({"needs": 2}, {"x": [large]}))
        await asyncio.sleep(0)  # both have begun
        with pytest.raises(RuntimeError, match="in as many calls as it may be"):
            await process.ask({"needs": 0}, {})
        assert (await asyncio.wait_for(first, 20)).outputs["x"].tolist() == [2, 4]
        np.testing.assert_array_equal((await asyncio.wait_for(second, 20)).outputs["x"], large * 2)
        with pytest.raises(RemoteError, match="afterwards"):
            await process.ask({"needs": 0, "raises": "afterwards"}, {})
        assert (await process.ask({"needs": 0}, {"x": [np.array([3])]})).outputs["x"].tolist() == [6]
        lost = [asyncio.ensure_future(process.ask({"needs": 99}, {})) for _ in range(2)]
        await asyncio.sleep(0)
        os.kill(process.pid, 9)
        for call in lost:
            with pytest.raises(ProcessLost, match="SIGKILL"):
                await asyncio.wait_for(call, 20)

    asyncio.run(play())
