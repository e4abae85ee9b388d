"""The same programs through Spark Connect: no JVM gateway, no RDD."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.direct_facts import CASES

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "connect.py"


def test_fit_and_predict_through_connect_do_what_they_do_on_a_classic_session(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), str(tmp_path)],
        # SPARK_TESTING: a free port for the server instead of Connect's fixed one.
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "SPARK_TESTING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])

    assert (seen["rows"], seen["same"], seen["in_order"]) == (10_000, True, True)
    assert seen["at_driver"] == pytest.approx(seen["among_workers"], abs=1e-6)
    assert seen["at_driver"] == pytest.approx(seen["from_files"], abs=1e-6)
    assert seen["echoed"] == ["through Connect"]
    assert seen["error_at_driver"] == seen["error_among_workers"] == ["no such thing", True]
    for name, case in CASES.items():
        found, wanted = seen["direct"][name], case.connect or case.refused
        assert (found is None) == (wanted is None), f"{name}: {found}"
        assert (wanted or "") in (found or ""), name
    assert "Traceback" not in done.stderr
    assert "at org.apache.spark" not in done.stderr
