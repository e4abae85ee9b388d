"""Datasets: what goes in comes out, whole, in part, or in pieces."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from kindler import Store, tfrecord
from kindler.errors import ConfigError, DataError, UntrustedError
from kindler.shelves.datasets import Datasets

FACTOR = 2


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Datasets:
    return Store(tmp_path_factory.mktemp("store")).datasets


ARRAYS = {
    "scalar": np.float32(1.5),
    "empty": np.zeros((0, 3)),
    "bool": np.array([[True, False]]),
    "complex": np.arange(4).astype(complex),
    "text": np.array(["a", "ü", ""]),
    "bytes": np.array([b"a", b"bc"]),
    "times": np.array(["2024-01-01", "NaT"], "datetime64[ns]"),
    "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "big-endian": np.arange(3, dtype=">i2"),
    "deep": np.random.default_rng(0).random((2, 3, 4, 5), np.float32),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_any_dtype_and_shape_comes_back_the_same(shelf: Datasets, name: str) -> None:
    shelf.put(ARRAYS[name], f"arrays/{name}")
    again = shelf.get(f"arrays/{name}")

    assert (again.dtype, again.shape) == (ARRAYS[name].dtype, ARRAYS[name].shape)
    np.testing.assert_array_equal(again, ARRAYS[name])


def test_bfloat16_comes_back_as_bfloat16(shelf: Datasets) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    shelf.put(array, "bfloat16")

    assert shelf.get("bfloat16").dtype == array.dtype
    np.testing.assert_array_equal(shelf.get("bfloat16"), array)


def test_arrays_are_appended_and_read_in_pieces(shelf: Datasets) -> None:
    for i in range(3):
        shelf.put(np.full((5, 2), i), "pieces", mode="append")

    assert [len(piece) for piece in shelf.iterate("pieces", 4)] == [4, 4, 4, 3]
    np.testing.assert_array_equal(np.concatenate(list(shelf.iterate("pieces", 4))), shelf.get("pieces"))
    with pytest.raises(DataError, match="shape"):
        shelf.put(np.zeros((1, 3)), "pieces", mode="append")
    with pytest.raises(DataError, match="Python objects"):
        shelf.put(np.array([object()]), "objects")


def test_several_arrays_are_one_dataset(shelf: Datasets) -> None:
    data = {"x": np.arange(10.0).reshape(5, 2), "y": np.arange(5), "s": np.array(list("abcde"))}
    shelf.put(data, "several")
    shelf.put(data, "several", mode="append")
    shelf.put((data["x"], data["y"][:2]), "tuple")

    again = shelf.get("several@1")
    assert list(again) == ["x", "y", "s"]
    for name, array in data.items():
        np.testing.assert_array_equal(again[name], array)
    assert [len(piece["y"]) for piece in shelf.iterate("several", 4)] == [4, 4, 2]
    assert np.concatenate([piece["y"] for piece in shelf.iterate("several", 4)]).tolist() == [*range(5)] * 2
    first, second = shelf.get("tuple")
    assert (first.shape, second.tolist()) == ((5, 2), [0, 1])
    with pytest.raises(DataError, match="cannot be appended"):
        shelf.put({"x": data["x"]}, "several", mode="append")
    with pytest.raises(ConfigError, match="no common number of rows"):
        next(shelf.iterate("tuple", 2))


FRAMES: dict[str, Any] = {
    "plain": pd.DataFrame({"x": [1.5, None], "n": [1, 2], "s": ["a", None]}),
    "empty": pd.DataFrame({"x": pd.Series([], dtype="int16")}),
    "no columns": pd.DataFrame(index=range(3)),
    "named index": pd.DataFrame({"x": [1, 2]}, index=pd.Index(["a", "b"], name="k")),
    "multi index": pd.DataFrame({"x": [1, 2]}, index=pd.MultiIndex.from_tuples([(1, "a"), (2, "b")])),
    "categories": pd.DataFrame({"c": pd.Categorical(["a", "b", "a"], categories=["b", "a"], ordered=True)}),
    "times": pd.DataFrame({"t": pd.to_datetime(["2024-01-01", None]).tz_localize("Europe/Vienna")}),
    "number names": pd.DataFrame({0: [1], 1: [2]}),
    "lists": pd.DataFrame({"v": [np.array([1.0, 2.0]), np.array([3.0])]}),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_comes_back_with_its_index_and_types(shelf: Datasets, name: str) -> None:
    shelf.put(FRAMES[name], f"frames/{name}")
    pd.testing.assert_frame_equal(shelf.get(f"frames/{name}"), FRAMES[name])


def test_tables_and_series_come_back_as_what_they_were(shelf: Datasets) -> None:
    table = pa.table(
        {"d": pa.array(["a", "b", "a"]).dictionary_encode(), "t": [datetime.date(2024, 1, 1)] * 3}
    )
    shelf.put(table, "table")
    assert shelf.get("table").equals(table)
    assert isinstance(shelf.get("table", as_="pandas"), pd.DataFrame)

    series = pd.Series([1, 2], name="s", index=["a", "b"])
    shelf.put(series, "series")
    pd.testing.assert_series_equal(shelf.get("series"), series)


def test_only_the_columns_and_rows_that_are_asked_for_are_read(shelf: Datasets) -> None:
    frame = pd.DataFrame({"x": range(10), "y": list("abcdefghij"), "a__b": range(10)}, index=range(10, 20))
    shelf.put(frame, "chosen")

    pd.testing.assert_frame_equal(shelf.get("chosen", columns=["y"]), frame[["y"]])
    assert shelf.get("chosen", x__gte=3, x__lt=5)["x"].tolist() == [3, 4]
    assert shelf.get("chosen", filter={"y__in": ["a", "j"]})["x"].tolist() == [0, 9]
    assert shelf.get("chosen", filter=pc.field("x") == 7, as_="arrow").column("y").to_pylist() == ["h"]
    assert shelf.get("chosen", x__between=(2, 3), columns=["x"]).index.tolist() == [12, 13]
    assert shelf.get("chosen", y="c")["x"].tolist() == [2]
    assert shelf.get("chosen", a__b=4)["x"].tolist() == [4]
    assert shelf.get("chosen", y__startswith="b")["x"].tolist() == [1]
    assert len(shelf.get("chosen", lazy=True, x__gt=6)) == 3
    for wrong in ({"colums": ["x"]}, {"x__not": 1}, {"columns": ["z"]}, {"columns": "x"}, {"filter": 3}):
        with pytest.raises(ConfigError, match="|".join(wrong)):
            shelf.get("chosen", **wrong)


def test_records_are_read_in_pieces_of_the_same_size_whatever_their_files(
    shelf: Datasets, tmp_path: Path
) -> None:
    for i in range(3):
        tfrecord.write(pa.table({"x": range(5 * i, 5 * i + 5)}), tmp_path / f"{i}.tfrecord")
        shelf.put(tmp_path / f"{i}.tfrecord", "records", mode="append")
    pieces = [table.column("x").to_pylist() for table in shelf.iterate("records", 4, as_="arrow")]
    assert pieces == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14]]
    assert len(shelf.get("records", lazy=True)) == 15


def test_a_handle_reads_when_it_is_asked(shelf: Datasets) -> None:
    shelf.put(pd.DataFrame({"x": range(10)}), "lazy")
    shelf.put(pd.DataFrame({"x": range(10, 15)}), "lazy", mode="append")
    with shelf.get("lazy", lazy=True) as handle:
        assert len(handle) == 15
        assert [pq.read_metadata(file).num_rows for file in handle.files] == [10, 5]
        assert [len(piece) for piece in handle.iterate(4)] == [4, 4, 4, 3]
        assert handle.value["x"].tolist() == list(range(15))
        files = handle.files
    assert not any(file.exists() for file in files)
    assert next(shelf.iterate("lazy", 100, x__gt=12))["x"].tolist() == [13, 14]


def test_rows_that_do_not_fit_are_not_appended(shelf: Datasets) -> None:
    shelf.put(pd.DataFrame({"x": [1.5], "s": ["a"]}), "fit")
    shelf.put(pd.DataFrame({"x": [2], "s": ["b"]}), "fit", mode="append")  # whole numbers among others
    assert shelf.get("fit")["x"].tolist() == [1.5, 2.0]

    with pytest.raises(DataError, match="columns"):
        shelf.put(pd.DataFrame({"x": [1.5]}), "fit", mode="append")
    with pytest.raises(DataError, match="column 'x'"):
        shelf.put(pd.DataFrame({"x": ["a"], "s": ["b"]}), "fit", mode="append")
    with pytest.raises(ConfigError, match="kind"):
        shelf.put([1], "fit", mode="append")
    with pytest.raises(DataError, match=r"\bm\b"):
        shelf.put(pd.DataFrame({"m": [1, "a"]}), "mixed")
    assert len(shelf.versions("fit")) == 2
    assert not shelf.exists("mixed")


@pytest.mark.parametrize("value", [None, True, 3, 1.5, "text", [], {}, [1, [2, {"a": None}]], {"ü": [1.0]}])
def test_a_python_value_comes_back_as_it_was(shelf: Datasets, value: Any) -> None:
    shelf.put(value, "value", mode="replace")
    again = shelf.get("value")
    assert (again, type(again)) == (value, type(value))


def test_values_that_json_does_not_have_are_named(shelf: Datasets) -> None:
    with pytest.raises(DataError, match=r"the value\['a'\]\[1\] is a set"):
        shelf.put({"a": [1, {2}]}, "wrong")
    with pytest.raises(DataError, match="key 1"):
        shelf.put({1: 2}, "wrong")
    assert not shelf.exists("wrong")


def made(rows: int = 2, *, offset: int = 0) -> list[int]:
    return [offset + i for i in range(rows)]


def test_a_function_is_a_dataset_that_is_made_when_it_is_read(shelf: Datasets) -> None:
    shelf.put(made, "virtual")
    assert shelf.metadata("virtual").meta == {"form": "import", "path": f"{__name__}:made"}
    assert shelf.get("virtual", trusted=True) == [0, 1]
    assert shelf.get("virtual", trusted=True, rows=3, offset=5) == [5, 6, 7]
    with pytest.raises(UntrustedError):
        shelf.get("virtual")


def test_a_function_that_cannot_be_imported_is_stored_as_source_or_pickled(shelf: Datasets) -> None:
    def alone(rows: int) -> pd.DataFrame:  # what only the annotation names is not needed
        return np.ones(rows)

    shelf.put(alone, "source")
    assert shelf.metadata("source").meta["form"] == "source"
    assert shelf.get("source", trusted=True, rows=2).tolist() == [1.0, 1.0]

    def defaults(rows: int = FACTOR) -> int:
        return rows

    with pytest.raises(UntrustedError, match="pickled"):
        shelf.put(defaults, "defaults")

    around = 3

    def not_alone() -> int:
        return around * FACTOR

    with pytest.raises(UntrustedError, match="pickled"):
        shelf.put(not_alone, "pickled")
    shelf.put(not_alone, "pickled", trusted=True)
    assert shelf.get("pickled", trusted=True) == 6


def test_a_script_is_the_function_itself(shelf: Datasets) -> None:
    scripts = Store(shelf.store.url).scripts
    scripts.put(made, "jobs/made")

    assert scripts.get("jobs/made", trusted=True) is made
    with pytest.raises(UntrustedError):
        scripts.get("jobs/made")


def test_files_are_stored_by_their_path(shelf: Datasets, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "t.parquet")
    np.save(tmp_path / "a.npy", np.arange(3))
    shelf.put(tmp_path / "t.parquet", "from/parquet")
    shelf.put(tmp_path / "a.npy", "from/npy")

    assert shelf.get("from/parquet").to_pydict() == {"x": [1, 2]}
    assert shelf.get("from/npy").tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="does not exist"):
        shelf.put(tmp_path / "missing.npy", "x")


def test_what_no_kind_takes_says_which_kinds_there_are(shelf: Datasets) -> None:
    with pytest.raises(UntrustedError, match="pickle"):
        shelf.put(object(), "x")
    with pytest.raises(ConfigError, match="parquet"):
        shelf.put([1], "x", kind="parket")
    with pytest.raises(ConfigError, match="unexpected option"):
        shelf.put([1], "x", compression="gzip")
