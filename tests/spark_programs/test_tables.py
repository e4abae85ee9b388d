"""Iceberg tables that Spark wrote have the rows that Spark's own reader finds in them, at every snapshot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kindler import Table
from kindler.errors import ConfigError
from tests.spark_programs.conftest import TORCH, last_line, older_spark, run_programs
from tests.unit.data.lake import collected, s3_server, shown, uploaded
from tests.whole import whole_only

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600), whole_only]

_KEYS = {"s3.region": "us-east-1", "s3.access-key-id": "id", "s3.secret-access-key": "key"}


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lake")


@pytest.fixture(scope="module")
def of_spark(lake: Path) -> Any:
    """What Spark with Iceberg's own jars printed."""
    jars = sorted((Path(sys.prefix) / "spark-iceberg").glob("*/jars/iceberg-spark-*_2.12-*.jar"))
    if not jars:
        pytest.skip(f"Iceberg for Spark is not installed at {sys.prefix}/spark-iceberg (make test does it)")
    program = ("iceberg_tables.py", lake, *jars)
    return last_line(run_programs(lake, program, paths=[older_spark("3.5")], warm=True, **TORCH)(program[0]))


@pytest.mark.parametrize(("name", "of"), [("t", "here"), ("v", "vectors")])
def test_deletes_and_changed_schemas_are_read_as_spark_reads_them(
    of_spark: Any, lake: Path, name: str, of: str
) -> None:
    counts = []
    for number, rows in of_spark[of]:
        assert collected(Table(lake / "here/n" / name, snapshot=number)) == shown(rows)
        counts.append(len(rows))
    assert counts == [24, 21, 37, 33, 33]


def test_the_same_in_an_object_store(of_spark: Any, lake: Path) -> None:
    with s3_server("lake") as address:
        uploaded(lake / "lake", "lake", address)
        options = {"s3.endpoint": address, **_KEYS}
        for number, rows in of_spark["s3"]:
            table = Table("s3://lake/iceberg/n/t", format="iceberg", snapshot=number, options=options)
            assert collected(table) == shown(rows)


def test_files_that_are_not_parquet_are_read_by_the_reader_of_the_session(of_spark: Any, lake: Path) -> None:
    seen = of_spark["orc"]
    assert seen["equal"]
    (table,) = seen["tables"]
    assert (table["snapshot"], table["uri"]) == (seen["snapshot"], f"{lake}/here/n/orc")
    with pytest.raises(ConfigError, match=r"has files of ORC.\nHint: read it with Spark"):
        collected(Table(lake / "here/n/orc"))
