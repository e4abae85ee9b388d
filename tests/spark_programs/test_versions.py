"""The core facts on the older Sparks that are supported; all other tests run on the newest one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.in_turn import Printed
from tests.spark_programs import shards_seen
from tests.spark_programs.conftest import last_line
from tests.whole import whole_only

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


def test_frames_train_to_the_weights_of_one_process_are_scored_in_order_and_fail_with_the_cause(
    on_an_older_spark: tuple[str, Printed],
) -> None:
    version, printed = on_an_older_spark
    seen = last_line(printed("versions.py"))

    assert seen["version"].startswith(f"{version}.")
    assert not seen["connect"]
    if version == "3.5":
        assert "pyspark 3.5 does not know this setting" in seen["refused"]
        assert "start a Spark Connect server" in seen["refused"]
    check_core_facts(seen)


@whole_only
def test_the_same_holds_through_spark_connect(connect_on_4_0: Printed) -> None:
    seen = last_line(connect_on_4_0("versions.py"))

    assert seen["version"].startswith("4.0.")
    assert seen["connect"]
    check_core_facts(seen)


def check_core_facts(seen: dict[str, Any]) -> None:
    assert seen["server"] == seen["version"]
    assert seen["rows"] == [500] * 10
    assert seen["weights"] == pytest.approx(seen["one_process"], abs=1e-5)
    assert seen["from_files"] == pytest.approx(seen["one_process"], abs=1e-5)
    assert (seen["in_order"], seen["words"]) == (True, True)
    assert seen["off_by"] < 1e-5
    assert seen["failing"].startswith("no such thing")
    assert "column 'label'" in seen["hole"]
    assert "row 7 of partition 0" in seen["hole"]
    assert "workers=5 but this Spark application can run 2 tasks" in seen["too many"]
    assert "predict: ingest='direct' needs Spark 4.1 or newer" in seen["direct"]
    assert "KeyError: too many kinds of rows" in seen["picky"]
    assert "raised in a task of Spark (partition " in seen["picky"]
    assert len(seen["picky"].splitlines()) < 15
    assert "at org.apache.spark" not in seen["picky"]
    assert seen["computed"].startswith("Spark cannot compute the frame")


def test_shards_are_the_same(on_an_older_spark: tuple[str, Printed]) -> None:
    assert last_line(on_an_older_spark[1]("shards.py")) == shards_seen.EXPECTED
