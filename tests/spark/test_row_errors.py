"""Rows of a frame that fail, in any partitioning and by either way to Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator, Prepare, XShards

pytestmark = pytest.mark.spark

ROWS = 200
SCHEMA = "id long, x array<float>"
# One of each kind; the first two rows of the frame, and a whole partition, are among them.
POISON: dict[int, Any] = {
    0: None,
    1: [1.0],
    90: [1.0, None],
    **{i: [1000.0, 0.0] for i in range(100, 110)},
    150: [float("nan"), 0.0],
    199: [1.0, 2.0, 3.0],
}
SAID = {
    0: "DataError: column 'x': is null; missing values are not allowed.",
    1: "DataError: column 'x': has another number of values than 2",
    90: "DataError: column 'x': holds a null; missing values are not allowed.",
    **dict.fromkeys(range(100, 110), "ValueError: too large"),
    150: "DataError: column 'x': is NaN.",
    199: "DataError: column 'x': has another number of values than 2",
}
CUTS = {"uneven": [0, 1, 100, 110, 110, 200], "one": [0, 200]}


class Picky(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if (x[:, 0] > 100).any():
            raise ValueError("too large")
        return x * 2, x.sum(1) > 0


def rows() -> list[tuple[int, Any]]:
    return [(i, POISON[i] if i in POISON else [float(i % 50), 1.0]) for i in range(ROWS)]


def check(table: Any, name: str = "a") -> None:
    found = {row["id"]: row for row in table.collect()}
    assert len(found) == ROWS
    assert {i: row[f"{name}_error"] for i, row in found.items() if row[f"{name}_error"]} == SAID
    for i, row in found.items():
        assert (row["a"], row["b"]) == ((None, None) if i in SAID else ([i % 50 * 2.0, 2.0], True))


@pytest.mark.parametrize("cuts", list(CUTS))
def test_errors_are_the_same_in_any_partitioning(partitioned: Callable[..., Any], cuts: str) -> None:
    ends = CUTS[cuts]
    frame = partitioned([rows()[a:b] for a, b in itertools.pairwise(ends)], SCHEMA)
    est = Estimator.from_torch(model=Picky())

    scored = est.predict(frame, 16, "x", ["a", "b"], on_error="column", columns=Columns(shapes={"x": (2,)}))

    assert scored.columns == ["id", "x", "a", "b", "a_error"]
    check(scored)


@pytest.mark.parametrize("ingest", ["direct", "inline"])
def test_rows_of_files_fail_alike_both_ways_and_their_width_is_what_most_have(
    spark: Any, partitioned: Callable[..., Any], tmp_path: Path, ingest: Any
) -> None:
    partitioned([rows()], SCHEMA).write.parquet(str(tmp_path / "in"))
    est = Estimator.from_torch(model=Picky())

    scored = est.predict(
        spark.read.parquet(str(tmp_path / "in")),
        64,
        "x",
        ["a", "b"],
        on_error="column",
        columns=Columns(ingest=ingest),
    )

    check(scored)


def halved(row: dict[str, Any]) -> dict[str, Any]:
    if row["x"][0] > 100:
        raise ValueError("too large")
    return {"x": np.asarray(row["x"]) / 2}


def test_null_keeps_the_schema_and_a_transform_fails_alone(partitioned: Callable[..., Any]) -> None:
    frame = partitioned([rows()[:101], rows()[101:]], SCHEMA)
    est = Estimator.from_torch(model=nn.Identity(), prepare=Prepare(transform=halved))

    scored = est.predict(frame, 16, "x", on_error="null").collect()

    assert [row.id for row in scored if row.prediction is None] == sorted(SAID)
    assert all(row.prediction == [row.id % 50 / 2, 0.5] for row in scored if row.id not in SAID)


def test_more_errors_in_a_partition_than_allowed_end_the_action(partitioned: Callable[..., Any]) -> None:
    # Five in the first partition, ten in the second: the limit is for each.
    frame = partitioned([rows()[:102], rows()[102:]], SCHEMA)
    est = Estimator.from_torch(model=Picky())
    options = {"columns": Columns(shapes={"x": (2,)}), "on_error": "null"}

    assert est.predict(frame, 16, "x", ["a", "b"], max_errors=10, **options).collect()[ROWS - 1].a is None
    with pytest.raises(Exception, match=r"RowsFailedError.*more than max_errors=9"):
        est.predict(frame, 16, "x", ["a", "b"], max_errors=9, **options).collect()


def test_a_stream_is_scored_with_errors_beside_its_rows(
    spark: Any, partitioned: Callable[..., Any], tmp_path: Path
) -> None:
    partitioned([rows()], SCHEMA).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(SCHEMA).parquet(str(tmp_path / "in"))

    scored = Estimator.from_torch(model=Picky()).predict(
        stream, 64, "x", ["a", "b"], on_error="column", columns=Columns(shapes={"x": (2,)})
    )
    query = scored.writeStream.format("memory").queryName("row_errors").trigger(availableNow=True).start()
    assert query.awaitTermination(120)

    check(spark.table("row_errors"))


def test_shards_have_nulls_and_errors_also_where_all_of_their_rows_fail(spark: Any) -> None:
    import pandas as pd

    shards = XShards.partition(pd.DataFrame({"id": range(40), "x": [r[1] for r in rows()[90:130]]}), 4)
    est = Estimator.from_torch(model=Picky())

    scored = est.predict(shards, 16, "x", ["a", "b"], on_error="column").collect()

    table = pd.concat(scored)
    errors = {90 + i: text for i, text in zip(table["id"], table["a_error"], strict=True) if text is not None}
    assert errors == {i: text for i, text in SAID.items() if 90 <= i < 130}
