"""The oldest Spark that is supported."""

from __future__ import annotations

import pytest

from tests.in_turn import Printed
from tests.spark_programs import shards_seen
from tests.spark_programs.conftest import last_line

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


def test_spark_4_0_trains_and_predicts(on_the_oldest_spark: Printed) -> None:
    seen = last_line(on_the_oldest_spark("oldest.py"))

    assert seen["version"].startswith("4.0.")
    assert seen["rows"] == [500] * 10
    assert seen["loss"] < 1e-3
    assert (seen["in_order"], seen["words"]) == (True, True)
    assert seen["off_by"] < 1e-5


def test_spark_4_0_has_the_same_shards(on_the_oldest_spark: Printed) -> None:
    assert last_line(on_the_oldest_spark("shards.py")) == shards_seen.EXPECTED
