"""The program of SparkFlow's README on MNIST: trained, saved, and read again."""

from __future__ import annotations

import gzip
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml import PipelineModel

from tests.whole import WHOLE

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:.*tf.layers.dense.*:UserWarning"),
]

PROGRAM = Path(__file__).parent / "programs" / "mnist.py"
ROWS = {"train": 60_000, "t10k": 10_000} if WHOLE else {"train": 2_000, "t10k": 500}
ENOUGH = 0.95 if WHOLE else 0.85

READ = """
import json, sys, kindler
from pyspark.ml import PipelineModel
spark = kindler.init(cores=2)
frame = spark.read.option("inferSchema", "true").csv("mnist_t10k.csv")
rows = PipelineModel.load("location").transform(frame).select("_c0", "predicted").collect()
print(json.dumps([[row._c0, row.predicted] for row in rows]))
"""


def write_csv(folder: Path, mnist: Path, part: str) -> None:
    with gzip.open(mnist / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)
    with gzip.open(mnist / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    rows = np.column_stack([labels, images])[: ROWS[part]]
    name = "mnist_train.csv" if part == "train" else "mnist_t10k.csv"
    np.savetxt(folder / name, rows, fmt="%d", delimiter=",")


def predicted_by_a_new_process(folder: Path) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return rows


def test_the_readme_learns_mnist_and_its_pipeline_is_read_again(
    spark: Any, mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ROWS:
        write_csv(tmp_path, mnist, part)
    monkeypatch.chdir(tmp_path)
    # Spark resolves relative paths against the folder that its session was started in.
    text = PROGRAM.read_text()
    program = tmp_path / "program.py"
    program.write_text(
        text.replace('"mnist_train.csv"', repr(str(tmp_path / "mnist_train.csv"))).replace(
            '"location"', repr(str(tmp_path / "location"))
        )
    )
    names = runpy.run_path(str(program), init_globals={"spark": spark})
    frame = spark.read.option("inferSchema", "true").csv(str(tmp_path / "mnist_t10k.csv"))
    here = [
        [row._c0, row.predicted] for row in names["p"].transform(frame).select("_c0", "predicted").collect()
    ]

    if WHOLE:
        there = predicted_by_a_new_process(tmp_path)
    else:  # test_async_dl.py has a new process read a pipeline
        again = PipelineModel.load(str(tmp_path / "location")).transform(frame)
        there = [[row._c0, row.predicted] for row in again.select("_c0", "predicted").collect()]
    assert there == here
    assert np.mean([label == predicted for label, predicted in there]) >= ENOUGH

    last = max((tmp_path / "location" / "stages").iterdir())
    size = sum(file.stat().st_size for file in last.rglob("*") if file.is_file())
    assert size <= 1.2 * 269_322 * 4 + 100_000
