"""The oldest Spark that is supported runs a fit and a predict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PROGRAM = Path(__file__).parent / "programs" / "oldest.py"
SPARK_4_0 = Path(sys.prefix) / "spark-4.0"


def test_spark_4_0_trains_and_predicts(tmp_path: Path) -> None:
    if not SPARK_4_0.is_dir():
        pytest.skip(f"pyspark 4.0 is not installed at {SPARK_4_0} (make test does it)")
    paths = [str(SPARK_4_0), str(PROGRAM.parents[3] / "src")]
    hidden = ("SPARK_HOME", "PYSPARK_PYTHON", "PYTHONPATH")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), str(tmp_path)],
        env={
            **{k: v for k, v in os.environ.items() if k not in hidden},
            "PYTHONPATH": os.pathsep.join(paths),
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])

    assert seen["version"].startswith("4.0.")
    assert seen["rows"] == [500] * 10
    assert seen["loss"] < 1e-3
    assert (seen["in_order"], seen["words"]) == (True, True)
    assert seen["off_by"] < 1e-5
