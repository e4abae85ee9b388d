"""Programs that were written for TensorFlowOnSpark, with Kindler's imports."""

from __future__ import annotations

import getpass
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import functions as F

from kindler.compat.tensorflowonspark import TFCluster, TFNode, TFParallel, dfutil
from kindler.errors import ConfigError, DataError


def squares(args: Any, ctx: Any) -> None:
    import numpy as np

    feed = TFNode.DataFeed(ctx.mgr, False)
    while not feed.should_stop():
        batch = feed.next_batch(batch_size=10)
        if len(batch) > 0:
            feed.batch_results(np.square(batch))


def mapped(args: Any, ctx: Any) -> Any:
    """What `train` feeds, by the names of tensors."""
    feed = ctx.get_data_feed(input_mapping={"b": "labels", "a": "images"})
    images, labels = [], []
    while not feed.should_stop():
        batch = feed.next_batch(8)
        images += batch["images"]
        labels += batch["labels"]
    assert feed.done_feeding
    assert all(label == 2 * image for image, label in zip(images, labels, strict=True))
    return len(images)


def ports(args: Any, ctx: Any) -> tuple[int, str, str]:
    """Binds its port without SO_REUSEADDR: first it is held, then it is not."""
    port = int(ctx.cluster_spec[ctx.job_name][ctx.task_index].rpartition(":")[2])
    if args["held"]:
        assert ctx.tmp_socket.getsockname()[1] == port
        with socket.socket() as early, pytest.raises(OSError, match="in use"):
            early.bind(("0.0.0.0", port))
        ctx.release_port()
    assert ctx.tmp_socket is None
    with socket.socket() as mine:
        mine.bind(("0.0.0.0", port))
    return ctx.num_workers, ctx.job_name, os.environ["TF_CONFIG"]


def test_an_rdd_is_squared_through_the_feed_and_trained_in_ten_epochs_by_default(spark: Any) -> None:
    sc = spark.sparkContext
    spark_mode = TFCluster.InputMode.SPARK
    cluster = TFCluster.run(sc, squares, {}, num_executors=2, num_ps=0, input_mode=spark_mode)
    total = cluster.inference(sc.parallelize([[x] for x in range(1000)], 10)).sum()
    cluster.shutdown()
    cluster = TFCluster.run(sc, mapped, {}, num_executors=2, num_ps=0, input_mode=spark_mode)
    cluster.train(sc.parallelize([(x, 2 * x) for x in range(10)], 3))
    with pytest.raises(AssertionError, match="negative"):
        cluster.train(sc.parallelize([1]), num_epochs=-1)
    cluster.shutdown()

    assert total == sum(x * x for x in range(1000))
    assert sum(cluster.cluster.return_values) == 100


def test_ports_are_released_before_the_program_or_by_it(spark: Any) -> None:
    sc = spark.sparkContext
    cluster = TFCluster.run(sc, ports, {"held": False}, 2, 0, master_node="chief")
    cluster.shutdown()
    assert [value[:2] for value in cluster.cluster.return_values] == [(2, "chief"), (2, "worker")]

    cluster = TFCluster.run(sc, ports, {"held": False}, 2, 0, master_node="master")
    cluster.shutdown()
    (workers, role, config), _ = cluster.cluster.return_values
    assert (workers, role) == (2, "master")
    assert list(json.loads(config)["cluster"]) == ["master", "worker"]
    assert json.loads(config)["task"] == {"type": "master", "index": 0}

    cluster = TFCluster.run(sc, ports, {"held": True}, 2, 0, release_port=False)
    cluster.shutdown()
    assert [value[:2] for value in cluster.cluster.return_values] == [(2, "worker")] * 2
    with pytest.raises(AssertionError, match="InputMode.SPARK"):
        cluster.train(None)
    with pytest.raises(ConfigError, match="leaves no worker"):
        TFCluster.run(sc, ports, {}, 1, 1)


def test_independent_instances_return_what_they_computed(spark: Any) -> None:
    def instance(args: Any, ctx: Any) -> tuple[Any, ...]:
        return args, ctx.worker_num, ctx.num_workers, "TF_CONFIG" in os.environ

    together = TFParallel.run(spark.sparkContext, instance, "x", 2)
    in_turn = TFParallel.run(spark.sparkContext, instance, "x", 3, use_barrier=False)

    assert together == [("x", 0, 2, False), ("x", 1, 2, False)]
    assert in_turn == [("x", number, 3, False) for number in range(3)]
    with pytest.raises(ConfigError, match="workers=3 but"):
        TFParallel.run(spark.sparkContext, instance, "x", 3)


def test_frames_are_saved_and_loaded_with_the_types_of_the_original(spark: Any, tmp_path: Path) -> None:
    row = ("text", 1, [2, 3, 4], -1.5, [0.5, 2.25], bytearray(b"\xff\xfe\xfd"))
    kinds = "a string, b int, c array<int>, d float, e array<double>, f binary"
    saved = spark.createDataFrame([row] * 5, kinds).repartition(3)
    dfutil.saveAsTFRecords(saved, str(tmp_path / "records"))
    loaded = dfutil.loadTFRecords(spark.sparkContext, str(tmp_path / "records"), binary_features=["f"])

    assert loaded.dtypes == [
        ("a", "string"),
        ("b", "bigint"),
        ("c", "array<bigint>"),
        ("d", "double"),
        ("e", "array<double>"),
        ("f", "binary"),
    ]
    assert [tuple(one) for one in loaded.collect()] == [row] * 5
    assert dfutil.isLoadedDF(loaded)
    assert not dfutil.isLoadedDF(saved)
    assert not dfutil.isLoadedDF(loaded.filter(F.col("b") == 1))
    with pytest.raises(DataError, match="unsupported dtype"):
        dfutil.toTFExample([("x", "decimal(10,0)")])


@pytest.mark.parametrize(
    ("default", "absolute", "relative"),
    [
        ("file://", "file:///foo/bar", f"file://{os.getcwd()}/foo/bar"),
        ("hdfs://n:8020", "hdfs://n:8020/foo/bar", f"hdfs://n:8020/user/{getpass.getuser()}/foo/bar"),
        ("viewfs://n:8020", "viewfs://n:8020/foo/bar", f"viewfs://n:8020/user/{getpass.getuser()}/foo/bar"),
    ],
)
def test_paths_are_those_of_the_default_file_system(default: str, absolute: str, relative: str) -> None:
    ctx = SimpleNamespace(defaultFS=default, working_dir=os.getcwd())

    assert TFNode.hdfs_path(ctx, "/foo/bar") == absolute
    assert TFNode.hdfs_path(ctx, "foo/bar") == relative
    for path in ("hdfs://foo/bar", "s3a://foo/bar", "file://foo/bar"):
        assert TFNode.hdfs_path(ctx, path) == path
