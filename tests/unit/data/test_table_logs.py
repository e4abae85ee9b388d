"""Delta and Iceberg tables by their paths: the rows that the table has now, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kindler.data import parquet
from kindler.errors import ConfigError, DataError, MissingExtraError


def table(first: int, last: int) -> pa.Table:
    return pa.table({"x": np.arange(first, last, dtype="float32"), "y": np.arange(first, last)})


def rows(path: Path) -> list[int]:
    files = parquet.inspect(path)
    read = parquet.scan(files, ["y"], 0, files.rows)
    return sorted(value for batch in read for value in batch.column("y").to_pylist())


@pytest.fixture
def delta() -> Any:
    return pytest.importorskip("deltalake", reason="deltalake is not installed")


def test_a_delta_table_has_the_rows_of_its_newest_version_only(delta: Any, tmp_path: Path) -> None:
    place = tmp_path / "table"
    delta.write_deltalake(str(place), table(0, 5))
    delta.write_deltalake(str(place), table(5, 8), mode="append")
    assert rows(place) == list(range(8))

    delta.write_deltalake(str(place), table(20, 24), mode="overwrite")
    assert rows(place) == [20, 21, 22, 23]  # the files of the others are still there
    assert len(list(place.glob("*.parquet"))) == 3

    delta.DeltaTable(str(place)).delete("y >= 22")  # without deletion vectors: files are written anew
    assert rows(place) == [20, 21]


def test_a_delta_table_that_lacks_a_file_or_has_a_broken_log_is_refused(delta: Any, tmp_path: Path) -> None:
    place = tmp_path / "table"
    delta.write_deltalake(str(place), table(0, 5))
    (file,) = place.glob("*.parquet")
    file.unlink()
    with pytest.raises(DataError, match=rf"lacks its file '{file.name}'"):
        parquet.inspect(place)

    (log,) = (place / "_delta_log").glob("*.json")
    log.write_text("{")
    with pytest.raises(ConfigError, match=r"(?s)log of this Delta table cannot be read.*pass the DataFrame"):
        parquet.inspect(place)


def test_a_table_whose_files_hold_deleted_rows_is_refused(
    delta: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta.write_deltalake(str(tmp_path), table(0, 5))

    class Protocol:
        reader_features = ("deletionVectors", "timestampNtz")

    monkeypatch.setattr(delta.DeltaTable, "protocol", lambda table: Protocol())
    with pytest.raises(ConfigError, match=r"(?s)is a Delta table with deletionVectors,.*pass the DataFrame"):
        parquet.inspect(tmp_path)


def test_a_table_in_a_folder_below_is_not_read_as_plain_files(delta: Any, tmp_path: Path) -> None:
    delta.write_deltalake(str(tmp_path / "below"), table(0, 5))
    with pytest.raises(ConfigError, match="contains a table of Delta"):
        parquet.inspect(tmp_path)


@pytest.mark.parametrize(
    ("mark", "library", "extra"),
    [
        ("_delta_log/0.json", "deltalake", "delta"),
        ("metadata/v1.metadata.json", "pyiceberg", "iceberg"),
    ],
)
def test_without_the_library_that_reads_the_log_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, library: str, extra: str
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name=library)

    monkeypatch.setattr("kindler.data.parquet.importlib.import_module", missing)
    (tmp_path / mark).parent.mkdir()
    (tmp_path / mark).touch()
    with pytest.raises(MissingExtraError, match=rf"kindler\[{extra}\]"):
        parquet.inspect(tmp_path)


def test_an_iceberg_table_has_the_rows_of_the_version_that_its_folder_names(tmp_path: Path) -> None:
    catalogs = pytest.importorskip("pyiceberg.catalog.sql", reason="pyiceberg is not installed")
    catalog = catalogs.SqlCatalog("c", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}/w")
    catalog.create_namespace("n")
    made = catalog.create_table("n.t", schema=table(0, 1).schema)
    made.append(table(0, 5))
    made.append(table(5, 8))
    place = Path(made.location().removeprefix("file://"))
    with pytest.raises(ConfigError, match=r"(?s)only its catalog knows.*pass the DataFrame"):
        parquet.inspect(place)

    def name_newest() -> None:
        newest = Path(made.metadata_location.removeprefix("file://"))
        newest.with_name("v1.metadata.json").write_bytes(newest.read_bytes())
        newest.with_name("version-hint.text").write_text("1")

    name_newest()
    assert rows(place) == list(range(8))
    made.overwrite(table(20, 23))
    assert rows(place) == list(range(8))  # as long as the hint has not moved on
    name_newest()
    assert rows(place) == [20, 21, 22]
