"""The same programs through Spark Connect: no JVM gateway, no RDD."""

from __future__ import annotations

import pytest

from tests.in_turn import Printed
from tests.spark_programs import shards_seen
from tests.spark_programs.conftest import last_line
from tests.unit.with_spark.direct_facts import CASES, ON_CONNECT

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


def test_fit_and_predict_do_what_they_do_on_a_classic_session(through_connect: Printed) -> None:
    seen = last_line(through_connect("connect.py"))

    assert (seen["rows"], seen["same"], seen["in_order"]) == (10_000, True, True)
    null = "DataError: column 'features': is null; missing values are not allowed."
    assert seen["failed"] == [[7, True, null]]
    assert seen["at_driver"] == pytest.approx(seen["among_workers"], abs=1e-6)
    assert seen["at_driver"] == pytest.approx(seen["from_files"], abs=1e-6)
    assert seen["error_at_driver"] == seen["error_among_workers"] == ["no such thing", True]


def test_workers_are_fed_and_frames_are_scanned(through_connect: Printed) -> None:
    seen = last_line(through_connect("parts_on_connect.py"))

    assert seen["echoed"] == ["through Connect", 2]
    for name in ON_CONNECT:
        case = CASES[name]
        found, wanted = seen["direct"][name], case.connect or case.refused
        assert (found is None) == (wanted is None), f"{name}: {found}"
        assert (wanted or "") in (found or ""), name


def test_tfrecord_files_are_written_and_scanned_as_on_a_classic_session(through_connect: Printed) -> None:
    seen = last_line(through_connect("tfrecord_connect.py"))

    files = [f"part-0000{i}.tfrecord" for i in range(3)]
    assert (seen["files"], seen["inside"]) == (files, ["_SUCCESS", *files])
    assert (seen["same"], seen["count"]) == (True, 1_000)
    assert "already exists" in seen["refused"]
    assert seen["bad"] == ["bad", "0 of partition 0"]
    assert "does not exist" in seen["none"]
    assert seen["left"] == ["rows"]


def test_shards_do_what_they_do_on_a_classic_session(through_connect: Printed) -> None:
    assert last_line(through_connect("shards.py")) == shards_seen.EXPECTED


def test_shards_are_trained_on_and_scored(through_connect: Printed) -> None:
    seen = last_line(through_connect("shards_estimator.py"))

    assert seen["engines"] == ["spark", "spark"]
    assert seen["samples"] == [40, 40, 40]
    assert seen["rows"] == [0, 15, 25]
    assert seen["off by"] < 1e-6
    assert seen["weights"] == pytest.approx(seen["expected"], abs=1e-5)


def test_stages_are_fitted_validated_saved_and_loaded(through_connect: Printed) -> None:
    seen = last_line(through_connect("ml_connect.py"))

    assert (seen["remote"], seen["same"], seen["learned"]) == (True, True, True)
    assert seen["alone"] == "prediction"
    assert seen["metrics"][1] < seen["metrics"][0]


def test_a_session_is_used_as_it_is_and_ended_so_that_a_classic_one_can_follow(
    through_connect: Printed,
) -> None:
    told = last_line(through_connect("connect_session.py"))

    connect, same, partitions, rows, variables_left, *classic = told
    assert (connect, same, partitions, rows) == (True, True, "7", 5)
    assert variables_left == []
    assert classic == [False, 2]
