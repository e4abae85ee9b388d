"""Files that Kindler writes are read by TensorFlow and the other way round, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from flavour import tensorflow_only

from kindler import tfrecord

pytestmark = [pytest.mark.keras, tensorflow_only]

ROWS = 100_000
SPECIAL_FLOATS = np.array([0x7FC00001, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x7F7FFFFF], np.uint32)
COMPRESSIONS = [(None, ""), ("gzip", "GZIP")]


@pytest.fixture(scope="module")
def tf() -> Any:
    return pytest.importorskip("tensorflow")


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """Every kind of column; the first rows hold the extremes."""
    random = np.random.default_rng(0)
    shifts = random.integers(0, 63, ROWS)
    numbers = random.integers(-(2**62), 2**62, ROWS) >> shifts
    numbers[:4] = [2**63 - 1, -(2**63), 0, -1]
    floats = random.normal(size=ROWS).astype(np.float32)
    floats[: len(SPECIAL_FLOATS)] = SPECIAL_FLOATS.view(np.float32)
    offsets = np.concatenate(([0], np.cumsum(random.integers(0, 6, ROWS)))).astype(np.int32)
    total = int(offsets[-1])
    text = [("é" * (i % 7)) + str(i) for i in range(ROWS)]
    return pa.table(
        {
            "number": numbers,
            "float": floats,
            "text": text,
            "raw": pa.array([random.bytes(i % 9) for i in range(ROWS)], pa.binary()),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(random.random(ROWS * 3, np.float32)), 3),
            "ints": pa.ListArray.from_arrays(offsets, random.integers(-1000, 1000, total)),
            "words": pa.ListArray.from_arrays(offsets, pa.array([f"w{i % 1000}" for i in range(total)])),
            "some": pa.array(numbers, mask=random.random(ROWS) < 0.3),
        }
    )


def examples(tf: Any, table: pa.Table) -> Any:
    """The rows as TensorFlow's own messages."""
    for row in table.to_pylist():
        features = {}
        for name, value in row.items():
            if value is None:
                continue
            values = value if isinstance(value, list) else [value]
            kind = str(getattr(table.schema.field(name).type, "value_type", table.schema.field(name).type))
            if kind == "int64":
                features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
            elif kind == "float":
                features[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
            else:
                data = [v.encode() if isinstance(v, str) else v for v in values]
                features[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=data))
        yield tf.train.Example(features=tf.train.Features(feature=features))


def same_bits(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return bool(np.array_equal(one.view(np.uint32), other.view(np.uint32)))


@pytest.mark.parametrize(("compression", "tf_compression"), COMPRESSIONS)
def test_tensorflow_reads_what_kindler_writes(
    tf: Any, table: pa.Table, compression: Any, tf_compression: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.tfrecord"
    tfrecord.write(table, path, compression=compression)

    spec = {
        "number": tf.io.FixedLenFeature([], tf.int64),
        "float": tf.io.FixedLenFeature([], tf.float32),
        "text": tf.io.FixedLenFeature([], tf.string),
        "raw": tf.io.FixedLenFeature([], tf.string),
        "vector": tf.io.FixedLenFeature([3], tf.float32),
        "ints": tf.io.RaggedFeature(tf.int64),
        "words": tf.io.RaggedFeature(tf.string),
        "some": tf.io.VarLenFeature(tf.int64),
    }
    data = tf.data.TFRecordDataset(str(path), compression_type=tf_compression).batch(ROWS + 1)
    (got,) = [tf.io.parse_example(batch, spec) for batch in data]

    assert np.array_equal(got["number"].numpy(), table["number"].to_numpy())
    assert same_bits(got["float"].numpy(), table["float"].to_numpy())
    assert [text.decode() for text in got["text"].numpy()] == table["text"].to_pylist()
    assert got["raw"].numpy().tolist() == table["raw"].to_pylist()
    assert same_bits(got["vector"].numpy().reshape(-1), table["vector"].combine_chunks().flatten().to_numpy())
    for name in ("ints", "words"):
        column = table[name].combine_chunks()
        assert np.array_equal(got[name].row_splits.numpy(), column.offsets.to_numpy())
        values = column.values.to_pylist()
        assert got[name].values.numpy().tolist() == [v.encode() if isinstance(v, str) else v for v in values]
    assert np.array_equal(got["some"].indices.numpy()[:, 0], np.flatnonzero(table["some"].is_valid()))
    assert got["some"].values.numpy().tolist() == table["some"].drop_null().to_pylist()


@pytest.mark.parametrize(("compression", "tf_compression"), COMPRESSIONS)
def test_kindler_reads_what_tensorflow_writes(
    tf: Any, table: pa.Table, compression: Any, tf_compression: str, tmp_path: Path
) -> None:
    path, table = tmp_path / "rows.tfrecord", table.slice(0, ROWS if compression is None else 5_000)
    with tf.io.TFRecordWriter(str(path), options=tf_compression) as writer:
        for example in examples(tf, table):
            writer.write(example.SerializeToString())

    given = tfrecord.read(path, schema=table.schema, compression=compression)
    found = tfrecord.read(path, binary=["raw"], sample_rows=None)

    for name in table.column_names:
        if name in ("float", "vector"):
            continue
        assert given[name].combine_chunks().equals(table[name].combine_chunks())
    assert same_bits(given["float"].to_numpy(), table["float"].to_numpy())
    vectors = [t["vector"].combine_chunks().flatten().to_numpy() for t in (given, table)]
    assert same_bits(*vectors)
    assert found.schema.field("text").type == pa.string()
    assert found["number"].equals(given["number"])
    assert found["some"].to_pylist() == table["some"].to_pylist()


def test_records_that_all_look_alike_are_read_and_written_the_same(tf: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    images, labels = random.random((3_000, 28, 28), np.float32), random.integers(0, 10, 3_000)
    names = [f"n{label}" for label in labels]
    ours, theirs = tmp_path / "ours.tfrecord", tmp_path / "theirs.tfrecord"
    table = pa.table({"image": list(images.reshape(3_000, -1)), "label": labels, "name": names})

    tfrecord.write({"image": images, "label": labels, "name": np.array(names)}, ours)
    with tf.io.TFRecordWriter(str(theirs)) as writer:
        for example in examples(tf, table):
            writer.write(example.SerializeToString())

    for path in (ours, theirs):
        got = tfrecord.read(path, schema={"image": ("float32", (28, 28)), "label": "int64", "name": "string"})
        shown = np.concatenate([c.to_numpy_ndarray() for c in got["image"].chunks])
        assert same_bits(shown.reshape(-1), images.reshape(-1))
        assert got["label"].to_pylist() == labels.tolist()
        assert got["name"].to_pylist() == names
    for ours_record, example in zip(tf.data.TFRecordDataset(str(ours)), examples(tf, table), strict=True):
        assert tf.train.Example.FromString(ours_record.numpy()) == example


def test_the_record_that_the_unit_tests_hold_is_tensorflows(tf: Any) -> None:
    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[3]))
    example = tf.train.Example(features=tf.train.Features(feature={"i": feature}))
    assert example.SerializeToString().hex() == "0a0c0a0a0a016912051a030a0103"
