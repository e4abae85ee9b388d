"""TFRecord files: what is written is read again, bit for bit; damage and misfits are named."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kindler import tfrecord
from kindler.data.tfrecord.framing import checksum
from kindler.errors import ConfigError, DataError, MissingExtraError

# Records as TensorFlow 2.21 wrote them, one feature each.
INT_RECORD = bytes.fromhex("0a0c0a0a0a016912051a030a0103")
MANY = settings(max_examples=60, deadline=None)

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=True, allow_infinity=True)
TEXT = st.text(max_size=40)
BYTES = st.binary(max_size=40)
LEAVES = [
    (pa.int64(), INT64),
    (pa.float32(), FLOAT32),
    (pa.string(), TEXT),
    (pa.binary(), BYTES),
]


def framed(*records: bytes) -> bytes:
    """Records with their lengths and checksums, written from the format's definition."""

    def masked(data: bytes) -> bytes:
        crc = google_crc32c.value(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    out = b""
    for record in records:
        length = struct.pack("<Q", len(record))
        out += length + masked(length) + record + masked(record)
    return out


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def example(**features: bytes) -> bytes:
    """A record out of the bytes of its features."""
    entries = (field(1, field(1, name.encode()) + field(2, value)) for name, value in features.items())
    return field(1, b"".join(entries))


def bits(column: Any) -> Any:
    """Values that compare equal only if their bits do: NaN is like NaN, and 0.0 unlike -0.0."""

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(item) for item in value]
        return struct.pack("<f", value) if isinstance(value, float) else value

    return [of(value) for value in column.to_pylist()]


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Tables of any of the types, with nulls, empty lists, and columns that are even at times."""
    rows = draw(st.integers(1, 40))
    arrays, fields = [], []
    for number in range(draw(st.integers(1, 4))):
        leaf, values = draw(st.sampled_from(LEAVES))
        form = draw(st.sampled_from(["scalar", "list", "fixed"]))
        if draw(st.booleans()):
            values = st.just(draw(values))  # all records of one layout
        cells, kind = values, leaf
        if form == "list":
            cells, kind = st.lists(values, max_size=5), pa.list_(leaf)
        elif form == "fixed":
            width = draw(st.integers(1, 4))
            cells, kind = st.lists(values, min_size=width, max_size=width), pa.list_(leaf, width)
        if draw(st.booleans()):
            cells = st.none() | cells
        arrays.append(pa.array([draw(cells) for _ in range(rows)], kind))
        fields.append(pa.field(draw(st.sampled_from(["c", "long_name_of_column_", "é"])) + str(number), kind))
    return pa.table(arrays, schema=pa.schema(fields))


@MANY
@given(table=tables(), compression=st.sampled_from([None, "gzip"]))
def test_what_is_written_is_read_bit_for_bit(
    table: pa.Table, compression: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("t") / "rows.tfrecord"

    assert tfrecord.write(table, path, compression=compression) == [str(path)]
    again = tfrecord.read(path, schema=table.schema)

    assert again.schema == table.schema
    again.validate(full=True)
    for name in table.column_names:
        assert bits(again[name]) == bits(table[name])


@MANY
@given(
    columns=st.dictionaries(
        st.text(min_size=1, max_size=12),
        st.sampled_from(LEAVES).flatmap(
            lambda leaf: st.tuples(st.just(leaf[0]), st.lists(leaf[1], min_size=3, max_size=3))
        ),
        min_size=1,
        max_size=5,
    )
)
def test_an_inferred_schema_gives_scalars_back(
    columns: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("t") / "rows.tfrecord"
    table = pa.table({name: pa.array(cells, kind) for name, (kind, cells) in columns.items()})

    tfrecord.write(table, path)
    again = tfrecord.read(path, binary=[n for n, (kind, _) in columns.items() if kind == pa.binary()])

    assert again.column_names == sorted(columns)
    for name, (kind, _) in columns.items():
        assert again[name].type == kind
        assert bits(again[name]) == bits(table[name])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Three records, and where each ends."""
    path = tmp_path_factory.mktemp("small") / "rows.tfrecord"
    tfrecord.write(pa.table({"i": [1, 300, -1], "s": ["a", "b" * 20, ""]}), path)
    data, ends, position = path.read_bytes(), [], 0
    while position < len(data):
        position += struct.unpack_from("<Q", data, position)[0] + 16
        ends.append(position)
    return path, ends


@MANY
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_a_data_error_that_names_file_and_record(
    small: tuple[Path, list[int]], data: st.DataObject
) -> None:
    path, ends = small
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    damaged = path.with_name("damaged.tfrecord")
    damaged.write_bytes(content)
    number = next(i for i, end in enumerate(ends) if at < end)

    with pytest.raises(DataError) as caught:
        tfrecord.read(damaged, schema={"i": "int64", "s": "string"})

    start = ends[number - 1] if number else 0
    assert f"record {number} of {damaged} (at byte {start})" in str(caught.value)
    assert caught.value.row == number


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_file_that_is_cut_anywhere_is_a_data_error_unless_between_records(
    small: tuple[Path, list[int]], compression: Any
) -> None:
    path, ends = small
    content = path.read_bytes()
    cut = path.with_name("cut.tfrecord")
    for size in range(1, len(content)):
        cut.write_bytes(content[:size] if compression is None else gzip.compress(content[:size]))
        if size in ends:
            assert tfrecord.read(cut, schema={"i": "int64"}).num_rows == ends.index(size) + 1
            continue
        with pytest.raises(DataError, match=f"record {sum(end < size for end in ends)} of {cut}.*truncated"):
            tfrecord.read(cut, schema={"i": "int64"})


def test_gzip_that_is_cut_or_damaged_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.gz"
    tfrecord.write({"x": np.arange(5000)}, path, compression="gzip")
    content = path.read_bytes()
    for broken in (content[:-20], content[:500], content[:200] + b"\xff\xff" + content[202:]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=f"record \\d+ of {path}"):
            tfrecord.read(path, schema={"x": "int64"})


def test_checksums_of_the_data_are_not_looked_at_without_verify(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    tfrecord.write({"x": np.ones(3, np.float32)}, path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    assert tfrecord.read(path, verify=False)["x"].to_pylist() == [1.0, 1.0, 1.0]
    with pytest.raises(DataError, match="record 2 of .*does not match its checksum"):
        tfrecord.read(path, schema={"x": "float32"})


def test_records_that_are_no_example_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(framed(INT_RECORD, b"\x0a\xff not an example"))

    with pytest.raises(DataError, match=f"record 1 of {path} \\(at byte 30\\): is not a tf.train.Example"):
        tfrecord.read(path)


@MANY
@given(data=st.data())
def test_any_bytes_in_a_record_are_read_or_named(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    usual = example(
        i=field(3, field(1, b"\x05\xac\x02")),
        long_name_of_it=field(2, field(1, bytes(8))),
        s=field(1, field(1, b"abc")),
    )
    odd = bytearray(usual)
    for _ in range(data.draw(st.integers(1, 3))):
        odd[data.draw(st.integers(0, len(odd) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("t") / "rows.tfrecord"
    path.write_bytes(framed(*[usual] * data.draw(st.integers(0, 20)), bytes(odd), usual))

    kinds = {"i": pa.list_(pa.int64()), "long_name_of_it": pa.list_(pa.float32()), "s": pa.list_(pa.binary())}
    try:
        table = tfrecord.read(path, schema=kinds)
    except DataError as error:
        complaint = str(error)
    else:
        complaint = ""
        table.validate(full=True)
        assert table.slice(table.num_rows - 1).to_pylist() == [
            {"i": [5, 300], "long_name_of_it": [0.0, 0.0], "s": [b"abc"]}
        ]
    assert not complaint or f"of {path} (at byte" in complaint


def test_a_parquet_file_is_no_tfrecord_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(DataError, match="not a TFRecord file"):
        tfrecord.read(path)


def test_a_record_that_tensorflow_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(framed(INT_RECORD))
    assert tfrecord.read(path).to_pylist() == [{"i": 3}]


def test_what_protobuf_allows_besides_the_usual_form_is_read(tmp_path: Path) -> None:
    usual = example(i=field(3, field(1, b"\x05\x06")), f=field(2, field(1, struct.pack("<2f", 1, 2))))
    unpacked = example(
        i=field(3, b"\x08\x05\x08\x06"),
        f=field(2, b"\x0d" + struct.pack("<f", 1) + b"\x0d" + struct.pack("<f", 2)),
    )
    in_pieces = example(i=field(3, field(1, b"\x05")) + field(3, field(1, b"\x06"))) + example(
        f=field(2, field(1, struct.pack("<f", 1)) + field(1, struct.pack("<f", 2)))
    )
    unknown = usual + field(9, b"whatever") + b"\x50\x01"
    twice = field(1, example(i=field(3, field(1, b"\x09")))[2:] + usual[2:])
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(framed(usual, unpacked, in_pieces, unknown, twice))

    table = tfrecord.read(path, schema={"i": pa.list_(pa.int64()), "f": pa.list_(pa.float32())})

    assert table.to_pylist() == [{"i": [5, 6], "f": [1.0, 2.0]}] * 5
    assert tfrecord.read(path)["i"].to_pylist() == [[5, 6]] * 5


def test_a_list_whose_last_number_has_no_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(framed(example(i=field(3, field(1, b"\x05"))), example(i=field(3, field(1, b"\x85")))))
    with pytest.raises(DataError, match="record 1 of .* is not a tf.train.Example: a number has no end"):
        tfrecord.read(path, schema={"i": "int64"})


def test_a_missing_feature_is_null_and_an_empty_list_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(
        framed(
            example(x=field(3, b"")), example(x=b""), example(), b"", example(x=field(3, field(1, b"\x07")))
        )
    )

    as_list = tfrecord.read(path, schema={"x": pa.list_(pa.int64())})
    as_scalar = tfrecord.read(path)

    assert as_list["x"].to_pylist() == [[], None, None, None, [7]]
    assert as_scalar["x"].to_pylist() == [None, None, None, None, 7]


def test_columns_in_any_order_are_told_apart(tmp_path: Path) -> None:
    one, two = field(3, field(1, b"\x01")), field(3, field(1, b"\x02"))
    names = ["aaaaaaaab", "aaaaaaaac", "aaaaaaaa", "a", "b"]
    records = [
        example(**{name: one if name == "b" else two for name in names[i:] + names[:i]}) for i in range(5)
    ]
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(framed(*records))

    table = tfrecord.read(path)

    assert table.column_names == sorted(names)
    assert all(table[name].to_pylist() == [1 if name == "b" else 2] * 5 for name in names)


def test_types_are_widened_to_what_an_example_holds(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    kinds = [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
    ]
    data = {kind: np.array([0, 1, 1], kind) for kind in kinds}

    tfrecord.write(data, path)
    inferred = tfrecord.infer_schema(path)
    again = tfrecord.read(path, schema={kind: kind for kind in kinds})

    assert {inferred.field(kind).type for kind in kinds[:9]} == {pa.int64()}
    assert {inferred.field(kind).type for kind in kinds[9:]} == {pa.float32()}
    for kind in kinds:
        assert again[kind].to_numpy().tolist() == data[kind].tolist()
        assert again[kind].type == pa.from_numpy_dtype(kind)


def test_rows_of_arrays_come_back_in_their_shape(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    images = np.random.default_rng(0).random((50, 4, 5), np.float32)
    nested = pa.array([[[1, 2], [3]], [[], [4]]] * 25)

    tfrecord.write(
        pa.table({"nested": nested, "image": pa.FixedShapeTensorArray.from_numpy_ndarray(images)}), path
    )
    table = tfrecord.read(path, schema={"image": ("float32", (4, 5)), "nested": pa.list_(pa.int64())})

    assert np.array_equal(table["image"].combine_chunks().to_numpy_ndarray(), images)
    assert table["nested"].to_pylist() == [[1, 2, 3], [4]] * 25
    tfrecord.write({"image": images}, path, overwrite=True)
    assert np.array_equal(tfrecord.read(path)["image"].to_numpy().tolist(), images.reshape(50, 20))


def test_pandas_frames_keep_nan_and_turn_none_to_null(tmp_path: Path) -> None:
    import pandas as pd

    path = tmp_path / "rows.tfrecord"
    frame = pd.DataFrame(
        {
            "x": [1.0, np.nan],
            "s": ["a", None],
            "v": [np.ones(2), np.zeros(2)],
            "n": pd.array([1, None], "Int64"),
        }
    )

    tfrecord.write(frame, path)
    table = tfrecord.read(path)

    assert table["s"].to_pylist() == ["a", None]
    assert table["n"].to_pylist() == [1, None]
    assert table["v"].to_pylist() == [[1.0, 1.0], [0.0, 0.0]]
    assert np.isnan(table["x"].to_pylist()[1])


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        (pa.timestamp("us"), "cast it to an integer"),
        (pa.date32(), "cast it to an integer"),
        (pa.decimal128(5, 2), "cast it to a float or to a string"),
        (pa.struct([("a", pa.int64())]), "columns of their own"),
        (pa.list_(pa.timestamp("us")), "cast it"),
    ],
)
def test_types_without_a_place_in_an_example_are_refused_by_name(
    kind: Any, hint: str, tmp_path: Path
) -> None:
    table = pa.table({"fine": [1], "odd": pa.array([None], kind)})
    with pytest.raises(DataError, match=f"column 'odd': (.|\n)*Hint: .*{hint}"):
        tfrecord.write(table, tmp_path / "rows.tfrecord")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "row"),
    [
        (pa.array([1, 2**63 - 1, 2**63], pa.uint64()), 2),
        (pa.array([1e38, None, 1e39]), 2),
        (pa.array([[1], None, [2, None]]), 2),
        (pa.array([[[1], [2, 3]], [[4, None]]]), 1),
    ],
)
def test_values_without_a_place_are_named_by_column_and_row_and_leave_no_file(
    values: pa.Array, row: int, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        tfrecord.write(pa.table({"x": values}), tmp_path / "rows.tfrecord")
    assert (caught.value.column, caught.value.row) == ("x", row)
    assert list(tmp_path.iterdir()) == []


def test_infinite_doubles_stay_infinite(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    tfrecord.write({"x": np.array([np.inf, -np.inf, 0.1])}, path)
    assert tfrecord.read(path)["x"].to_pylist() == [np.inf, -np.inf, float(np.float32(0.1))]


def test_inference_follows_the_sample(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    table = pa.table(
        {
            "fixed": [[1, 2], [3, 4], [5, 6]],
            "list": [[1.0], [2.0, 3.0], []],
            "raw": pa.array([b"\xff", b"a", b"b"]),
            "some": [1, None, 3],
            "text": ["a", "é", ""],
            "forced": ["a", "b", "c"],
        }
    )
    tfrecord.write(table, path)

    schema = tfrecord.infer_schema(path, binary=["forced"])

    assert {f.name: (f.type, f.nullable) for f in schema} == {
        "fixed": (pa.list_(pa.int64()), False),
        "forced": (pa.binary(), False),
        "list": (pa.list_(pa.float32()), True),
        "raw": (pa.binary(), False),
        "some": (pa.int64(), True),
        "text": (pa.string(), False),
    }
    assert schema.field("fixed").metadata == {b"kindler.length": b"2"}
    assert tfrecord.infer_schema(path, sample_rows=1).field("some").nullable is False


@pytest.mark.parametrize(
    ("later", "problem"),
    [
        ({"x": field(3, field(1, b"\x01\x02"))}, "column 'x': record 20 of .*: has 2 values"),
        ({"x": field(2, field(1, bytes(4)))}, "column 'x': record 20 of .*: its values are a float_list"),
        ({"x": field(3, field(1, b"\x01")), "new": b""}, "record 20 of .*: has a feature 'new'"),
    ],
)
def test_a_record_that_the_sample_did_not_foretell_is_named(
    later: dict[str, bytes], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(framed(*[example(x=field(3, field(1, b"\x01")))] * 20, example(**later)))
    with pytest.raises(DataError, match=f"{problem}(.|\n)*Hint: .*sample_rows=None"):
        tfrecord.read(path, sample_rows=20)


def test_bytes_that_are_no_text_after_all_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    tfrecord.write(pa.table({"s": pa.array([b"a"] * 70 + [b"\xff"] + [b"b"] * 10)}), path)
    with pytest.raises(DataError, match="column 's': record 70 of .*UTF-8(.|\n)*binary="):
        tfrecord.read(path, sample_rows=50)


def test_a_value_too_large_for_the_schema_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    tfrecord.write(pa.table({"x": [[1, 2], [], [3, 300]]}), path)
    with pytest.raises(DataError, match="column 'x': record 2 of"):
        tfrecord.read(path, schema={"x": pa.list_(pa.int8())})


def test_a_column_that_must_not_be_null_and_is_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    tfrecord.write(pa.table({"x": [1, None], "y": [1, 2]}), path)
    with pytest.raises(DataError, match="column 'x': record 1 of .*missing"):
        tfrecord.read(path, schema=pa.schema([pa.field("x", pa.int64(), nullable=False)]))


def test_files_folders_globs_and_lists_are_read_in_order(tmp_path: Path) -> None:
    wrote = tfrecord.write({"x": np.arange(10)}, tmp_path / "many", rows_per_file=4)
    (tmp_path / "many" / "_SUCCESS").touch()

    assert [Path(file).name for file in wrote] == [f"part-0000{i}.tfrecord" for i in range(3)]
    for path in (tmp_path / "many", str(tmp_path / "many" / "part-*"), wrote):
        assert tfrecord.read(path)["x"].to_pylist() == list(range(10))
    assert tfrecord.read(wrote[::-1])["x"].to_pylist() == [8, 9, 4, 5, 6, 7, 0, 1, 2, 3]
    assert tfrecord.read(f"file://{tmp_path}/many")["x"].to_pylist() == list(range(10))


def test_columns_choose_and_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    data = {"a": np.arange(100), "b": np.arange(100) * 2.0, "c": np.arange(100) * 3}
    tfrecord.write(data, path, columns=["c", "a"])

    assert tfrecord.read(path, columns=["c"]).to_pydict() == {"c": list(range(0, 300, 3))}
    assert tfrecord.read(path, columns=["c", "a"]).column_names == ["c", "a"]
    with pytest.raises(ConfigError, match="'b'.* not among"):
        tfrecord.read(path, columns=["b"])
    with pytest.raises(ConfigError, match="'z'.* not among"):
        tfrecord.write(data, path, columns=["z"], overwrite=True)


def test_batches_come_one_by_one_and_hold_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    table = pa.table({"x": np.arange(200_000), "y": np.arange(200_000, dtype=np.float32)})
    tfrecord.write(iter_reader(table), path)

    batches = list(tfrecord.iter_batches(path))

    assert len(batches) > 3
    assert pa.Table.from_batches(batches).equals(table)


def iter_reader(table: pa.Table) -> pa.RecordBatchReader:
    return table.to_reader(max_chunksize=7_001)


def test_a_record_longer_than_a_block_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    long = [bytes([i]) * 5_000_000 for i in range(3)]
    tfrecord.write(pa.table({"b": pa.array(["", *long, b"x"], pa.binary())}), path)
    assert tfrecord.read(path, binary=["b"])["b"].to_pylist() == [b"", *long, b"x"]


def test_a_plain_record_that_begins_like_gzip_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    size = int.from_bytes(b"\x1f\x8b\x08", "little")
    spare = size - len(example(b=field(1, field(1, bytes(size - 40)))))
    tfrecord.write(pa.table({"b": pa.array([bytes(size - 40 + spare)])}), path)

    assert path.read_bytes().startswith(b"\x1f\x8b\x08")
    assert len(tfrecord.read(path, binary=["b"])["b"][0].as_py()) == size - 40 + spare


def test_what_is_there_is_replaced_only_when_asked_and_only_when_all_went_well(tmp_path: Path) -> None:
    for path, options in ((tmp_path / "file.tfrecord", {}), (tmp_path / "folder", {"rows_per_file": 2})):
        tfrecord.write({"x": np.arange(3)}, path, **options)
        with pytest.raises(ConfigError, match="already exists(.|\n)*overwrite=True"):
            tfrecord.write({"x": np.arange(9)}, path, **options)
        with pytest.raises(DataError, match="column 'x'"):
            tfrecord.write(pa.table({"x": [[1], [None]]}), path, overwrite=True, **options)
        assert tfrecord.read(path)["x"].to_pylist() == [0, 1, 2]
        tfrecord.write({"x": np.arange(5)}, path, overwrite=True, **options)
        assert tfrecord.read(path)["x"].to_pylist() == [0, 1, 2, 3, 4]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file.tfrecord", "folder"]


def test_an_empty_table_is_an_empty_file_that_needs_a_schema(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    tfrecord.write(pa.table({"x": pa.array([], pa.int64())}), path)

    assert path.stat().st_size == 0
    assert tfrecord.read(path, schema={"x": "int64"}).num_rows == 0
    with pytest.raises(DataError, match="Hint: pass schema"):
        tfrecord.read(path)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda path: tfrecord.read(path / "none"), "none"),
        (tfrecord.read, "test_arguments"),
        (lambda path: tfrecord.write(object(), path / "x"), "object"),
        (lambda path: tfrecord.write({"x": np.arange(3)}, path / "x", rows_per_file=0), "rows_per_file"),
        (lambda path: tfrecord.write({"x": np.arange(3)}, path / "x", compression="zip"), "zip"),
        (lambda path: tfrecord.write({"x": np.arange(3), "y": np.arange(2)}, path / "x"), "y"),
        (lambda path: tfrecord.read(__file__, schema={"x": "no type"}), "no type"),
        (lambda path: tfrecord.read(__file__, schema={"x": pa.timestamp("s")}), "timestamp"),
        (lambda path: tfrecord.read(__file__, schema=[1]), "schema"),
        (lambda path: tfrecord.read(__file__, sample_rows=0), "sample_rows"),
        (lambda path: tfrecord.iter_batches(__file__, schema={"x": "int64"}, compression="zip"), "zip"),
        (lambda path: tfrecord.read(__file__, columns="x"), "columns"),
    ],
)
def test_arguments_that_cannot_work_are_refused(call: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_columns_still_have_rows_and_categories_are_their_values(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    tfrecord.write(pa.table({"c": pa.array(["a", None, "b", "a"]).dictionary_encode()}), path)

    assert tfrecord.read(path)["c"].to_pylist() == ["a", None, "b", "a"]
    assert sum(batch.num_rows for batch in tfrecord.iter_batches(path, columns=[])) == 4


def test_the_extra_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    checksum.cache_clear()
    with pytest.raises(MissingExtraError, match=r"pip install 'kindler\[tfrecord\]'"):
        tfrecord.write({"x": np.arange(3)}, tmp_path / "rows.tfrecord")
    assert list(tmp_path.iterdir()) == []
