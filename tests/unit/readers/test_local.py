"""The facts of readers on the local engine, and what is said on the driver before a worker starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kindler
from kindler.data.paths import every_file
from kindler.engine import fork_server
from kindler.errors import ConfigError, DataError
from kindler.readers.files import find
from tests.readers_facts import ReaderFacts, pixels, save_image, write


@pytest.fixture(scope="module", autouse=True)
def _no_processes_left() -> Iterator[None]:
    yield
    fork_server.retire()


class TestLocalReaders(ReaderFacts):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> str:
        return "local"


@pytest.mark.parametrize(
    ("path", "options", "told"),
    [
        ("nothing.csv", {}, r"nothing\.csv' does not exist"),
        ("*.nothing", {}, r"no CSV file in"),
        ("a.csv", {"seperator": ";"}, r"no option 'seperator'"),
        ("a.csv", {"use_cols": ["x"]}, r"Did you mean 'usecols'"),
        ("a.csv", {"chunksize": 10}, r"the shards are the chunks(.|\n)*num_shards"),
        ("a.csv", {"num_shards": 0}, r"num_shards=0\): must be at least 1"),
        ("a.csv", {"engine": "mars"}, r"'auto', 'local' or 'spark'"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(
    tmp_path: Path, path: str, options: dict[str, Any], told: str
) -> None:
    write(tmp_path, a="x\n1\n")
    with pytest.raises(ConfigError, match=told):
        kindler.read_csv(tmp_path / path, **{"engine": "local", **options})


def test_only_empty_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, a="", b="\n\n")
    with pytest.raises(DataError, match=r"a\.csv and 1 other files: no columns"):
        kindler.read_csv(tmp_path, engine="local")


def test_an_index_column_stays_the_index(tmp_path: Path) -> None:
    write(tmp_path, a="k,x\nb,1\na,2\n", b="k,x\nc,3\n")
    shards = kindler.read_csv(tmp_path, engine="local", index_col="k", num_shards=1)

    assert shards.first()["x"].to_dict() == {"b": 1, "a": 2, "c": 3}


def test_categories_of_several_files_are_united(tmp_path: Path) -> None:
    write(tmp_path, a="k\nx\ny\n", b="k\nz\n")
    shards = kindler.read_csv(tmp_path, engine="local", dtype={"k": "category"})

    assert {str(shard["k"].dtype) for shard in shards.collect()} == {"category"}
    assert shards.to_pandas()["k"].tolist() == ["x", "y", "z"]


@pytest.mark.parametrize("read", [kindler.read_csv, kindler.read_parquet])
def test_folders_that_hold_values_are_refused(tmp_path: Path, read: Any) -> None:
    write(tmp_path / "year=2024", a="x\n1\n")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "year=2024" / "a.parquet")
    with pytest.raises(ConfigError, match="'year=2024': a column that is not in the files"):
        read(tmp_path, engine="local")


def test_a_column_that_one_parquet_file_lacks_is_named_with_the_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "y": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet lacks \['y'\](.|\n)*columns="):
        kindler.read_parquet(tmp_path, engine="local")
    assert len(kindler.read_parquet(tmp_path, ["x"], engine="local")) == 2


@pytest.mark.parametrize("schema", [[("k", "float32")], "k float", 7])
def test_a_schema_of_another_kind_is_answered_with_those_that_work(tmp_path: Path, schema: Any) -> None:
    pq.write_table(pa.table({"k": [1]}), tmp_path / "a.parquet")

    with pytest.raises(ConfigError, match=r"is not a schema.\nHint: pass a pyarrow.Schema"):
        kindler.read_parquet(tmp_path, schema=schema, engine="local")


def test_files_behind_a_url_are_read_through_fsspec(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [1, 2]})
    frame.to_csv(tmp_path / "a.csv.gz", index=False)
    frame.to_csv(tmp_path / "b.csv", index=False)
    frame.to_parquet(tmp_path / "c.parquet")
    save_image(tmp_path / "d.png", pixels(0))
    url = f"local://{tmp_path}"

    assert kindler.read_csv(f"{url}/*.csv*", engine="local").to_pandas()["x"].tolist() == [1, 2, 1, 2]
    assert kindler.read_parquet(f"{url}/c.parquet", engine="local").to_pandas()["x"].tolist() == [1, 2]
    np.testing.assert_array_equal(kindler.read_images(url, engine="local").first()["x"][0], pixels(0))


def test_patterns_behind_a_url_match_names_or_folders_below() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/in/{name}.csv": b"x" for name in ("a", "deep/b", "_c")})
    try:
        assert find(["memory://in/*.csv"], every_file, "CSV") == ["memory://in/a.csv"]
        assert find(["memory://in/**/[!a].csv"], every_file, "CSV") == ["memory://in/deep/b.csv"]
        assert find(["memory://in"], every_file, "CSV") == ["memory://in/a.csv", "memory://in/deep/b.csv"]
        with pytest.raises(ConfigError, match="no CSV file in"):
            find(["memory://in/*.json"], every_file, "CSV")
    finally:
        memory.rm("/in", recursive=True)


def test_labels_come_from_a_dict_a_function_a_table_or_a_file(tmp_path: Path) -> None:
    for i, name in enumerate(["cat/1.png", "cat/2.png", "dog/1.png"]):
        save_image(tmp_path / "in" / name, pixels(i))
    table = pd.DataFrame(
        {"file": ["cat/1.png", "2.png", f"{tmp_path}/in/dog/1.png"], "kind": ["b", "a", "c"]}
    )
    table.rename(columns={"file": "path", "kind": "label"}).to_csv(tmp_path / "labels.csv", index=False)

    def labels(given: Any, **options: Any) -> list[int]:
        shards = kindler.read_images(tmp_path / "in", given, engine="local", num_shards=1, **options)
        return list(shards.first()["y"])

    assert labels({"cat": 7, "dog": 3}) == [7, 7, 3]
    assert labels(lambda path: int(path[-5])) == [1, 2, 1]
    assert labels(table, path_col="file", label_col="kind") == [1, 0, 2]
    assert labels(tmp_path / "labels.csv") == [1, 0, 2]
    with pytest.raises(ConfigError, match="no entry for the folder 'dog'"):
        labels({"cat": 1})
    with pytest.raises(DataError, match=r"the label of .*1\.png is 'cat'; expected a whole number"):
        labels(lambda path: "cat")
    with pytest.raises(ConfigError, match=r"no row for .*dog/1\.png"):
        labels(table[:2], path_col="file", label_col="kind")


def test_images_with_16_bits_are_refused(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png", np.full((2, 2), 60_000, np.uint16))
    with pytest.raises(DataError, match=r"a\.png has more than 8 bits per channel"):
        kindler.read_images(tmp_path, engine="local")


def test_an_image_beside_the_folders_of_classes_is_refused(tmp_path: Path) -> None:
    save_image(tmp_path / "cat" / "1.png", pixels(0))
    save_image(tmp_path / "stray.png", pixels(0))
    with pytest.raises(ConfigError, match=r"stray\.png is not in a class folder"):
        kindler.read_images(tmp_path, engine="local")
