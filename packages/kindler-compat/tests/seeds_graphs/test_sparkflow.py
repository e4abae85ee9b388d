"""The program of SparkFlow's README: trained, saved, and read again."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.seeds.digits import digits
from tests.seeds.programs import Program, quoted
from tests.whole import WHOLE

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(3600 if WHOLE else 600),
    pytest.mark.filterwarnings("ignore:.*tf.layers.dense.*:UserWarning"),
]
ENOUGH = 0.95 if WHOLE else 0.75
FLOATS = 784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10


def write_csv(folder: Path, name: str, split: str) -> None:
    images, labels = digits(split)
    np.savetxt(folder / name, np.column_stack([labels, images.reshape(-1, 784)]), fmt="%d", delimiter=",")


def operations(graph: str) -> list[str]:
    """What the nodes of a graph compute, in order."""
    return [node["op"] for node in json.loads(graph)["graphDef"]["node"]]


def predicted(frame: Any) -> list[Any]:
    return [[row._c0, row.predicted] for row in frame.select("_c0", "predicted").collect()]


def test_the_readme_learns_digits_and_its_pipeline_is_read_again(spark: Any, folder: Path) -> None:
    write_csv(folder, "mnist_train.csv", "train")
    write_csv(folder, "mnist_test.csv", "test")
    test = spark.read.option("inferSchema", "true").csv("mnist_test.csv")
    program = Program(folder, spark=spark)

    names = program.run("sparkflow/mnist")  # fits, and saves to "location"
    here = predicted(names["p"].transform(test))
    assert np.mean([label == found for label, found in here]) >= ENOUGH
    (last,) = (stage for stage in (folder / "location" / "stages").iterdir() if stage.name.startswith("2_"))
    assert sum(file.stat().st_size for file in last.rglob("*") if file.is_file()) < 1.2 * FLOATS * 4 + 100_000

    names["df"] = test
    names = program.run("sparkflow/load", "sparkflow/transform")
    assert predicted(names["predictions"]) == here

    graph = names["mg"]
    names = program.run("sparkflow/graph", "sparkflow/build-graph")
    assert operations(names["mg"]) == operations(graph)

    names["df"] = spark.read.option("inferSchema", "true").csv("mnist_train.csv").limit(40)
    before = (folder / "location").stat().st_mtime_ns
    program.run("sparkflow/save")
    assert (folder / "location").stat().st_mtime_ns > before


def test_every_parameter_of_the_readme_is_a_param_of_the_stage() -> None:
    from kindler.compat.sparkflow.tensorflow_async import SparkAsyncDL

    listed = re.findall(r"^(\w+): ", quoted("sparkflow")["sparkflow/parameters"], re.MULTILINE)
    assert len(listed) == 18
    assert set(listed) <= set(inspect.signature(SparkAsyncDL).parameters)
    assert all(SparkAsyncDL(**{name: "x"}).hasParam(name) for name in ("inputCol", "tfInput", "tfOutput"))
    assert all(SparkAsyncDL().hasParam(name) for name in listed)
