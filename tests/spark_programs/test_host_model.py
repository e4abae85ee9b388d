"""One model for all tasks of a host, with a CPU that stands in for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark_programs.conftest import last_line, run_programs

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_two_tasks_at_once_share_one_model_that_ends_with_the_session(tmp_path: Path) -> None:
    printed = run_programs(tmp_path, ("host_model.py", tmp_path), warm=True, KINDLER_HOST_MODEL="always")
    told = last_line(printed("host_model.py"))

    assert told == {
        "rows": 4_000,
        "equal": True,
        "loads": 1,
        "same process": True,
        "alive": [True],
        "ended": [True],
    }
