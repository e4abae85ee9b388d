"""An environment that is shipped to a real cluster is the one that its executors run in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.spark_programs.cluster import Cluster
from tests.spark_programs.conftest import PROGRAMS
from tests.whole import whole_only

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600), whole_only]

SRC = Path(__file__).parents[2] / "src"
INSTALLED = Path(sysconfig.get_paths()["purelib"])


@pytest.fixture
def small_environment(tmp_path: Path) -> Path:
    """An environment with what workers always need, and Kindler by reference; no torch."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python3.*/site-packages")
    for pattern in ("numpy*", "pyarrow*", "cloudpickle*", "tqdm*"):
        for path in INSTALLED.glob(pattern):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, site / path.name)
    (site / "_kindler.pth").write_text(f"{SRC}\n")
    return venv


def test_executors_run_in_the_environment_of_the_program(
    cluster: Cluster, small_environment: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [small_environment / "bin" / "python", "-W", "ignore", PROGRAMS / "shipped.py", cluster.address],
        # The driver finds pyspark where the tests do; executors do not.
        env={**os.environ, "PYTHONPATH": f"{SRC}:{INSTALLED}", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    again, found = json.loads(done.stdout.splitlines()[-1])
    assert again
    for executable, has in found:
        assert executable.endswith("/environment/bin/python")
        assert has == {"kindler": True, "numpy": True, "pyarrow": True, "torch": False}
