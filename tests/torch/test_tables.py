"""Fits on Delta and Iceberg tables in an object store, and on streams of Arrow, equal those on their rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import kindler
from kindler import Columns, Estimator, Table
from kindler.errors import ConfigError
from tests import exact
from tests.unit.data.lake import s3_server

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

with contextlib.suppress(ImportError):
    import polars  # noqa: F401  it sets a variable of the environment, which a test may not

SECRET = "tiger-of-the-test"
CHOICE: dict[str, Any] = {
    "feature_cols": ["a", "k"], "label_cols": "y", "columns": Columns(stack_features=True),
}  # fmt: skip


def table(first: int, last: int) -> pa.Table:
    numbers = np.arange(first, last)
    return pa.table({"k": numbers % 3, "a": np.sin(numbers), "y": np.cos(numbers)})


def trained(data: Any, **choice: Any) -> Estimator:
    torch.manual_seed(0)
    made = Estimator.from_torch(
        model=nn.Linear(2, 1),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        loss=nn.MSELoss(),
        workers=2,
    )
    made.fit(data, 2, 8, verbose=0, **(choice or CHOICE))
    return made


def assert_same(one: Estimator, other: Estimator) -> None:
    for ours, theirs in zip(exact.weights(one), exact.weights(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with s3_server("lake") as address:
        yield address


def delta(address: str, folder: Path) -> Table:
    """Three versions, partitioned; rows of the second are deleted."""
    library = pytest.importorskip("deltalake")
    options = {
        "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_S3_ALLOW_UNSAFE_RENAME": "true",
    }  # fmt: skip
    for part in (table(0, 30), table(30, 50)):
        library.write_deltalake(
            "s3://lake/delta", part, mode="append", partition_by=["k"], storage_options=options
        )
    library.DeltaTable("s3://lake/delta", storage_options=options).delete("a > 0.9")
    return Table("s3://lake/delta", format="delta", options=options)


def iceberg(address: str, folder: Path) -> Table:
    catalogs = pytest.importorskip("pyiceberg.catalog.sql")
    options = {
        "s3.endpoint": address, "s3.region": "us-east-1",
        "s3.access-key-id": "id", "s3.secret-access-key": SECRET,
        "type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": "s3://lake/iceberg",
    }  # fmt: skip
    catalog = catalogs.SqlCatalog("c", **options)
    catalog.create_namespace("n")
    made = catalog.create_table("n.t", schema=table(0, 1).schema)
    with made.update_spec() as change:
        change.add_identity("k")
    made.append(table(0, 30))
    made.append(table(30, 50))
    made.delete("a > 0.9")
    catalog.close()
    return Table("c.n.t", options=options)


@pytest.mark.parametrize("make", [delta, iceberg])
def test_a_table_in_an_object_store_trains_scores_and_is_read_as_its_rows_in_memory(
    make: Any, address: str, tmp_path: Path
) -> None:
    stored = make(address, tmp_path)
    shards = kindler.read_parquet(stored, columns=["k", "a", "y"], engine="local")
    rows = pa.concat_tables([pa.Table.from_pandas(frame, preserve_index=False) for frame in shards.collect()])
    rows = rows.replace_schema_metadata(None)
    whole = table(0, 50)
    kept = whole.filter(pa.array(np.sin(np.arange(50)) <= 0.9))
    assert rows.sort_by("y").equals(kept.sort_by("y"))

    ours = trained(stored)
    assert_same(ours, trained(rows))
    found = ours.predict(stored, output_path=tmp_path / "scores")
    scores = pq.read_table(found)
    assert scores.column("a").to_pylist() == rows.column("a").to_pylist()
    expected = ours.predict(rows).column("prediction").to_pylist()
    np.testing.assert_allclose(scores.column("prediction").to_pylist(), expected, rtol=1e-6)

    assert (ours.drift(stored)["rows"], ours.drift(stored)["reasons"]) == (len(rows), [])
    ours.save(tmp_path / "kept")
    written = [path.read_bytes() for path in tmp_path.rglob("kept*") if path.is_file()]
    assert written
    assert not any(SECRET.encode() in content for content in written)
    assert SECRET not in repr((stored, stored.files(), ours.lineage))
    (read,) = ours.lineage[-1]["data"]["tables"]
    assert read == stored.describe()


class Stream:
    """Can be read once, as a cursor can."""

    def __init__(self, rows: pa.Table) -> None:
        self._reader = rows.to_reader(max_chunksize=7)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._reader.__arrow_c_stream__(requested_schema)


def test_what_gives_a_stream_of_arrow_trains_as_its_rows_do() -> None:
    expected = trained(table(0, 40))
    polars = pytest.importorskip("polars").from_arrow(table(0, 40))
    for data in (Stream(table(0, 40)), table(0, 40).to_reader(), polars):
        assert_same(trained(data), expected)
    scored = expected.predict(polars)
    assert isinstance(scored, pa.Table)
    assert scored.equals(expected.predict(table(0, 40)))
    halves = trained(Stream(table(0, 40)), **CHOICE, validation_split=0.5)
    assert_same(halves, trained(table(0, 20)))
    with pytest.raises(ConfigError, match="does not give named columns"):
        trained(pytest.importorskip("polars").Series([1.0, 2.0]))
