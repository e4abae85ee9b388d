"""TFRecord files at paths: folders, schemas, options and errors; the format is tested in kindler-tfrecord."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kindler import tfrecord
from kindler.errors import ConfigError, DataError


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
    with pytest.raises(DataError, match="^record 2 of .*does not match its checksum") as caught:
        tfrecord.read(path, schema={"x": "float32"})
    assert caught.value.row == 2


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


def test_arrays_of_several_axes_are_lists_of_their_values(tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((50, 4, 5), np.float32)
    tfrecord.write({"image": images}, tmp_path / "rows.tfrecord")

    read = tfrecord.read(tmp_path / "rows.tfrecord")["image"]
    assert np.array_equal(read.to_numpy().tolist(), images.reshape(50, 20))
