"""What is encoded is read again, bit for bit; damage and misfits are named."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kindler_tfrecord
from kindler_tfrecord import SchemaLike, TFRecordError

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


def write(table: pa.Table, path: Path, *, compression: str | None = None) -> None:
    content = b"".join(kindler_tfrecord.encode(batch).tobytes() for batch in table.to_batches())
    path.write_bytes(gzip.compress(content) if compression else content)


def infer(path: Path, *, binary: Collection[str] = (), sample_rows: int = 1000) -> pa.Schema:
    sample = kindler_tfrecord.Sample(binary)
    with path.open("rb") as file:
        for block in kindler_tfrecord.blocks(kindler_tfrecord.decompressed(file), str(path)):
            sample.add(block.head(sample_rows - sample.records))
            if sample.records >= sample_rows:
                break
    return sample.schema()


def read(path: Path, schema: SchemaLike | None = None, **sampling: Any) -> pa.Table:
    known = None
    if schema is None:
        inferred = infer(path, **sampling)
        known, schema = inferred.names, pa.schema([field.with_nullable(True) for field in inferred])
    schema = kindler_tfrecord.as_schema(schema)
    with path.open("rb") as file:
        content = kindler_tfrecord.decompressed(file)
        batches = list(kindler_tfrecord.read_batches(content, schema, name=str(path), known=known))
    return pa.Table.from_batches(batches, schema)


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

    write(table, path, compression=compression)
    again = read(path, schema=table.schema)

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

    write(table, path)
    again = read(path, binary=[n for n, (kind, _) in columns.items() if kind == pa.binary()])

    assert again.column_names == sorted(columns)
    for name, (kind, _) in columns.items():
        assert again[name].type == kind
        assert bits(again[name]) == bits(table[name])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Three records, and where each ends."""
    path = tmp_path_factory.mktemp("small") / "rows.tfrecord"
    write(pa.table({"i": [1, 300, -1], "s": ["a", "b" * 20, ""]}), path)
    data, ends, position = path.read_bytes(), [], 0
    while position < len(data):
        position += struct.unpack_from("<Q", data, position)[0] + 16
        ends.append(position)
    return path, ends


@MANY
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_an_error_that_names_file_and_record(
    small: tuple[Path, list[int]], data: st.DataObject
) -> None:
    path, ends = small
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    damaged = path.with_name("damaged.tfrecord")
    damaged.write_bytes(content)
    number = next(i for i, end in enumerate(ends) if at < end)

    with pytest.raises(TFRecordError) as caught:
        read(damaged, schema={"i": "int64", "s": "string"})

    start = ends[number - 1] if number else 0
    assert f"record {number} of {damaged} (at byte {start})" in str(caught.value)
    assert caught.value.row == number


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_file_that_is_cut_anywhere_is_an_error_unless_between_records(
    small: tuple[Path, list[int]], compression: Any
) -> None:
    path, ends = small
    content = path.read_bytes()
    cut = path.with_name("cut.tfrecord")
    for size in range(1, len(content)):
        cut.write_bytes(content[:size] if compression is None else gzip.compress(content[:size]))
        if size in ends:
            assert read(cut, schema={"i": "int64"}).num_rows == ends.index(size) + 1
            continue
        with pytest.raises(
            TFRecordError, match=f"record {sum(end < size for end in ends)} of {cut}.*truncated"
        ):
            read(cut, schema={"i": "int64"})


def test_records_that_are_no_example_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(framed(INT_RECORD, b"\x0a\xff not an example"))

    with pytest.raises(
        TFRecordError, match=f"record 1 of {path} \\(at byte 30\\): is not a tf.train.Example"
    ):
        read(path)


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
        table = read(path, schema=kinds)
    except TFRecordError as error:
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
    with pytest.raises(TFRecordError, match="not a TFRecord file"):
        read(path)


def test_a_record_that_tensorflow_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(framed(INT_RECORD))
    assert read(path).to_pylist() == [{"i": 3}]


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

    table = read(path, schema={"i": pa.list_(pa.int64()), "f": pa.list_(pa.float32())})

    assert table.to_pylist() == [{"i": [5, 6], "f": [1.0, 2.0]}] * 5
    assert read(path)["i"].to_pylist() == [[5, 6]] * 5


def test_a_list_whose_last_number_has_no_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(framed(example(i=field(3, field(1, b"\x05"))), example(i=field(3, field(1, b"\x85")))))
    with pytest.raises(TFRecordError, match="record 1 of .* is not a tf.train.Example: a number has no end"):
        read(path, schema={"i": "int64"})


def test_a_missing_feature_is_null_and_an_empty_list_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(
        framed(
            example(x=field(3, b"")), example(x=b""), example(), b"", example(x=field(3, field(1, b"\x07")))
        )
    )

    as_list = read(path, schema={"x": pa.list_(pa.int64())})
    as_scalar = read(path)

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

    table = read(path)

    assert table.column_names == sorted(names)
    assert all(table[name].to_pylist() == [1 if name == "b" else 2] * 5 for name in names)


def test_rows_of_arrays_come_back_in_their_shape(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    images = np.random.default_rng(0).random((50, 4, 5), np.float32)
    nested = pa.array([[[1, 2], [3]], [[], [4]]] * 25)

    write(pa.table({"nested": nested, "image": pa.FixedShapeTensorArray.from_numpy_ndarray(images)}), path)
    table = read(path, schema={"image": ("float32", (4, 5)), "nested": pa.list_(pa.int64())})

    assert np.array_equal(table["image"].combine_chunks().to_numpy_ndarray(), images)
    assert table["nested"].to_pylist() == [[1, 2, 3], [4]] * 25


def test_infinite_doubles_stay_infinite(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    write(pa.table({"x": [np.inf, -np.inf, 0.1]}), path)
    assert read(path)["x"].to_pylist() == [np.inf, -np.inf, float(np.float32(0.1))]


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
    write(table, path)

    schema = infer(path, binary=["forced"])

    assert {f.name: (f.type, f.nullable) for f in schema} == {
        "fixed": (pa.list_(pa.int64()), False),
        "forced": (pa.binary(), False),
        "list": (pa.list_(pa.float32()), True),
        "raw": (pa.binary(), False),
        "some": (pa.int64(), True),
        "text": (pa.string(), False),
    }
    assert schema.field("fixed").metadata == {b"kindler.length": b"2"}
    assert infer(path, sample_rows=1).field("some").nullable is False


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
    with pytest.raises(TFRecordError, match=f"{problem}(.|\n)*Hint: .*sample_rows=None"):
        read(path, sample_rows=20)


def test_bytes_that_are_no_text_after_all_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    write(pa.table({"s": pa.array([b"a"] * 70 + [b"\xff"] + [b"b"] * 10)}), path)
    with pytest.raises(TFRecordError, match="column 's': record 70 of .*UTF-8(.|\n)*binary="):
        read(path, sample_rows=50)


def test_a_value_too_large_for_the_schema_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    write(pa.table({"x": [[1, 2], [], [3, 300]]}), path)
    with pytest.raises(TFRecordError, match="column 'x': record 2 of"):
        read(path, schema={"x": pa.list_(pa.int8())})


def test_a_column_that_must_not_be_null_and_is_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    write(pa.table({"x": [1, None], "y": [1, 2]}), path)
    with pytest.raises(TFRecordError, match="column 'x': record 1 of .*missing"):
        read(path, schema=pa.schema([pa.field("x", pa.int64(), nullable=False)]))


def test_a_record_longer_than_a_block_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    long = [bytes([i]) * 5_000_000 for i in range(3)]
    write(pa.table({"b": pa.array(["", *long, b"x"], pa.binary())}), path)
    assert read(path, binary=["b"])["b"].to_pylist() == [b"", *long, b"x"]


def test_a_plain_record_that_begins_like_gzip_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.tfrecord"
    size = int.from_bytes(b"\x1f\x8b\x08", "little")
    spare = size - len(example(b=field(1, field(1, bytes(size - 40)))))
    write(pa.table({"b": pa.array([bytes(size - 40 + spare)])}), path)

    assert path.read_bytes().startswith(b"\x1f\x8b\x08")
    assert len(read(path, binary=["b"])["b"][0].as_py()) == size - 40 + spare


def test_the_program_of_the_readme_reads_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(readme.partition("```python\n")[2].partition("```")[0], names)

    (batch,) = names["batches"]
    assert batch.to_pylist() == names["rows"].to_pylist()
