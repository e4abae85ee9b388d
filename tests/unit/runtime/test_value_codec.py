"""What arguments and results look like on the wire, and that nothing else is read from it."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kindler.errors import ConfigError, DataError, FrameError, NotFoundError
from kindler.frame import Frame
from kindler.runtime import value_codec
from kindler.runtime.messages import Report, Task, TaskSettings, described, pack, unpack

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
TREES = st.recursive(
    PLAIN,
    lambda inside: (
        st.lists(inside)
        | st.tuples(inside, inside)
        | st.dictionaries(st.text() | st.integers() | st.just("$"), inside)
    ),
    max_leaves=20,
)
DTYPES = arrays.scalar_dtypes().filter(lambda dtype: dtype.kind in "biufcmMSU")


def travelled(value: Any) -> Any:
    return value_codec.decode(unpack(pack(Frame("value", {}, value_codec.encode(value)))).buffers)


def decoded(tree: Any, *buffers: bytes) -> Any:
    return value_codec.decode([json.dumps(tree).encode(), *buffers])


@given(TREES)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    again = travelled(value)
    assert again == value
    assert type(again) is type(value)


@given(arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0)))
def test_arrays_arrive_with_their_dtype_and_shape_and_can_be_written_to(array: Any) -> None:
    again = travelled(array)
    assert again.dtype == array.dtype
    assert again.shape == array.shape
    assert again.tobytes() == array.tobytes()
    assert again.flags.writeable


def test_tables_numbers_of_numpy_and_arrays_of_text_arrive_as_they_were() -> None:
    table = pa.table({"a": [1, None], "b": [[1.5], []]})
    assert travelled(table).equals(table)
    number = travelled(np.float32(2.5))
    assert (type(number), number) == (np.float32, 2.5)
    text = np.array([["a", None], ["b", "c"]], object)
    assert travelled(text).tolist() == text.tolist()


def test_what_has_no_form_is_refused_by_the_sender() -> None:
    nested: list[Any] = []
    for _ in range(100):
        nested = [nested]
    for value in (object(), {"f": print}, np.array([object()]), nested):
        with pytest.raises(DataError, match="object|builtin|nested|deep"):
            value_codec.encode(value)


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "array", "dtype": "|O", "shape": [1], "buffer": 1},
        {"$": "array", "dtype": "<f8", "shape": [2], "buffer": 1},
        {"$": "array", "dtype": "<f8", "shape": [1], "buffer": 7},
        {"$": "array", "dtype": "<f8", "shape": [1], "buffer": True},
        {"$": "table", "buffer": 1},
        {"$": "pickle", "buffer": 1},
        {"$": ["unhashable"], "buffer": 1},
        {"$": {"$": "array", "dtype": "<f8", "shape": [1], "buffer": 1}},
        {"$": "dict", "items": [[[1], 2]]},
        {"$": "tuple"},
        {"$": "tuple", "items": {"$": "array", "dtype": "<i1", "shape": [8], "buffer": 1}},
    ],
    ids=str,
)
def test_a_broken_value_is_refused(tree: Any) -> None:
    with pytest.raises(FrameError):
        decoded(tree, b"12345678")


@pytest.mark.parametrize(
    "content", [b"", b"[", b"[" * 100_000, b"\xff"], ids=["none", "half", "deep", "bytes"]
)
def test_what_is_not_json_is_refused(content: bytes) -> None:
    with pytest.raises(FrameError, match="malformed value"):
        value_codec.decode([content])
    with pytest.raises(FrameError, match="buffer 0 of 0"):
        value_codec.decode([])


TASK = Task(
    id="t",
    shelf="models",
    bucket="default",
    name="net@1",
    verb="predict",
    buffers=(b"[[], {}]", b"ab"),
)


def test_a_task_and_a_report_survive_the_wire() -> None:
    assert Task.read(unpack(pack(TASK.frame()))) == TASK
    error = NotFoundError(what="model", name="x", available=["y"])
    name, report = Report.read(unpack(pack(Report("failed", error=described(error)).frame("t"))))
    again = report.exception()
    assert (name, type(again), str(again)) == ("t", NotFoundError, str(error))


def test_an_error_of_other_code_keeps_its_type_and_its_words() -> None:
    try:
        {}["missing"]
    except KeyError as exc:
        report = Report("failed", error=described(exc))
    with pytest.raises(KeyError, match="missing"):
        raise report.exception()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        None,
        pickle.dumps(print),
        pack(TASK.frame())[:-1],
        pack(TASK.frame()) + b"x",
        b"KDL2\xff\xff\xff\xff",
        b"KDL2\0\0\0\x02{}",
        b"KDL2\0\x01\x86\xa0" + b"[" * 100_000,
    ],
    ids=range(8),
)
def test_what_is_no_frame_is_refused(content: Any) -> None:
    with pytest.raises(FrameError):
        unpack(content)


@pytest.mark.parametrize(
    "change",
    [
        {"verb": "__class__"},
        {"shelf": "scripts"},
        {"shelf": "datasets"},
        {"name": "../x"},
        {"bucket": "a/b"},
        {"trusted": 1},
        {"timeout_s": None},
        {"wait_s": "long"},
        {"callback": ".."},
        {"label": 3},
        {"result_bytes": 0},
        {"more": 1},
    ],
    ids=str,
)
def test_a_task_that_cannot_be_one_is_refused(change: dict[str, Any]) -> None:
    frame = TASK.frame()
    with pytest.raises(FrameError):
        Task.read(Frame("task", json.loads(json.dumps(frame.fields | change)), frame.buffers))


@pytest.mark.parametrize(
    "wrong",
    [
        {"label": "a b"},
        {"timeout_s": float("inf")},
        {"wait_s": 0},
        {"max_retries": -1},
        {"result_bytes": 0.5},
        {"callback": 3},
    ],
    ids=str,
)
def test_settings_are_checked_when_they_are_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TaskSettings(**wrong)


def test_lists_that_are_larger_than_a_frames_header_travel_in_a_buffer() -> None:
    value = [[float(i), "text", None, {"a": (1, 2)}] for i in range(60_000)]
    (content,) = value_codec.encode(value)
    assert len(content) > 1 << 20
    assert travelled(value) == value


def _lying(table: pa.Table, old: bytes, new: bytes) -> tuple[Any, bytes]:
    """A value as a process that lies about its table would send it."""
    tree, content = value_codec.encode(table)
    assert content.count(old) == 1
    return json.loads(tree), content.replace(old, new)


OFFSETS = np.array([0, 3, 6, 9], "<i4").tobytes()


@pytest.mark.parametrize("form", ["table", "frame", "series", "objects"])
@pytest.mark.parametrize(
    "offsets",
    [[0, 3, 6, 1 << 30], [0, -(1 << 30), 6, 9], [0, 1 << 30, 6, 9]],
    ids=["last", "below", "amid"],
)
def test_offsets_of_a_table_that_lead_out_of_it_are_not_followed(form: str, offsets: list[int]) -> None:
    table = pa.table({"values": ["abc", "def", "ghi"]})
    tree, content = _lying(table, OFFSETS, np.array(offsets, "<i4").tobytes())
    with pytest.raises(FrameError, match="malformed value"):
        decoded({**tree, "$": form, "shape": [3]}, content)


def test_codes_of_a_category_that_is_not_there_are_not_followed() -> None:
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, 1], pa.int64()), pa.array(["a", "b"]))
    old, new = (np.array(values, "<i8").tobytes() for values in ([0, 1, 0, 1], [0, 1, 1 << 40, 1]))
    with pytest.raises(FrameError, match="malformed value"):
        decoded(*_lying(pa.table({"values": codes}), old, new))


def test_compressed_tables_and_those_whose_columns_are_views_are_not_unpacked() -> None:
    sink = pa.BufferOutputStream()
    table = pa.table({"values": np.zeros(1 << 20)})
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    with pytest.raises(FrameError, match="compressed"):
        decoded({"$": "table", "buffer": 1}, sink.getvalue().to_pybytes())
    views = pa.table({"values": pa.array(["a" * 20]).cast(pa.string_view())})
    assert travelled(views).column("values").to_pylist() == ["a" * 20]  # its sender has none of its own


@pytest.mark.parametrize(
    ("tree", "content", "complaint"),
    [
        ({"$": "array", "dtype": "<f8", "shape": [1] * 120_000, "buffer": 1}, bytes(8), "dimensions"),
        ({"$": "array", "dtype": "<f8", "shape": [-1], "buffer": 1}, bytes(8), "not the shape"),
        ({"$": "array", "dtype": "S0", "shape": [1 << 60], "buffer": 1}, b"", "in 0 bytes"),
        ({"$": "array", "dtype": "i4," * 100_000, "shape": [1], "buffer": 1}, bytes(8), "not allowed"),
        ([{"$": "bytes", "buffer": 1}] * 2, bytes(8), "buffer 1 twice"),
        ({"$": "bytes", "buffer": 0}, bytes(8), "buffer 0 twice"),
        ([{"$": "version", "name": "x", "number": 1}] * 1001, b"", "more than 1000 versions"),
    ],
    ids=["dimensions", "sizes", "nothing", "dtypes", "copies", "itself", "versions"],
)
def test_a_value_is_no_larger_than_its_bytes(tree: Any, content: bytes, complaint: str) -> None:
    with pytest.raises(FrameError, match=complaint):
        decoded(tree, content)


def test_a_value_has_no_more_parts_than_memory_for_them() -> None:
    with pytest.raises(FrameError, match="more than 4194304 values"):
        value_codec.decode([b"[" + b"{}," * 20_000_000 + b"0]"])


def test_text_with_many_commas_is_one_value() -> None:
    text = ['a, b: [c] {d} \\" ' * 1_000_000]
    assert travelled(text) == text


def test_an_error_that_a_process_makes_up_is_still_an_error() -> None:
    nonsense = {"types": 1, "own": [], "message": [], "fields": {"a": "(" * 9999}}
    frame = Report("failed", error=nonsense).frame("")
    assert "[]" in str(Report.read(frame)[1].exception())
    with pytest.raises(FrameError, match="the error of a task is malformed"):
        Report.read(Report("failed", error=["x"]).frame(""))  # type: ignore[arg-type]
