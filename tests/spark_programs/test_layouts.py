"""Programs whose modules lie beside them, started from a folder that has a module of the same name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark_programs.cluster import Cluster
from tests.spark_programs.conftest import PROGRAMS
from tests.whole import WHOLE, whole_only

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
ONES, TENS = [float(i) for i in range(1, 9)], [10.0 * i for i in range(1, 9)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, with two folders beside it: one to run from, one to write to."""
    folder = tmp_path_factory.mktemp("layout")
    shutil.copytree(PROGRAMS / "layout", folder / "layout")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "helper.py").write_text('raise ImportError("this is another helper")\n')
    (folder / "work").mkdir()
    return folder


def printed(project: Path, *words: str, cwd: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        cwd=project / cwd,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_every_door_found_them(seen: dict[str, Any], *, trained: bool = True) -> None:
    error = seen.pop("error")
    training = {"fit": [0.0], "evaluate": 0.0, "stage": TENS} if trained else {}
    assert seen == {"predict": TENS, "udf": ONES, "shards": TENS, **training}
    assert re.search(r"^ValueError: three is too much \(in transform, row \d of partition \d", error, re.M)
    assert 'helper.py", line' in error
    assert len(error.splitlines()) < 12
    assert error.count("three is too much") == 2  # said, and in the line that says it
    assert "at org.apache.spark" not in error


@pytest.fixture(scope="module")
def on_two_slots(project: Path) -> dict[str, Any]:
    seen: dict[str, Any] = printed(
        project, "../layout/main.py", "local[2]", str(project / "work"), cwd="elsewhere"
    )
    return seen


def test_modules_beside_a_script_are_found_by_everything_that_spark_runs(
    on_two_slots: dict[str, Any],
) -> None:
    assert_every_door_found_them(on_two_slots["spark"])


def test_and_by_everything_that_runs_in_processes_of_this_machine(on_two_slots: dict[str, Any]) -> None:
    assert on_two_slots["local"] == {
        "fit": [0.0],
        "evaluate": 0.0,
        "predict": TENS,
        "files": TENS,
        "shards": TENS,
        "script": 30.0,
        "model": TENS,
    }


def test_a_stage_is_read_in_a_new_process(on_two_slots: dict[str, Any], project: Path) -> None:
    assert printed(project, "../layout/read.py", str(project / "work"), cwd="elsewhere") == TENS


@whole_only
@pytest.mark.slow
@pytest.mark.cluster
def test_a_module_run_by_name_is_found_on_the_executors_of_a_cluster(cluster: Cluster, project: Path) -> None:
    doors = "all" if WHOLE else "scoring"

    seen = printed(project, "-m", "layout.main", cluster.address, str(project / "work"), doors, cwd=".")

    assert_every_door_found_them(seen["spark"], trained=WHOLE)
