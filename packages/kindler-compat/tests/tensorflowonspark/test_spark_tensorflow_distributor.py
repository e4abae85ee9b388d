"""MirroredStrategyRunner of spark-tensorflow-distributor."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kindler.compat.spark_tensorflow_distributor import MirroredStrategyRunner
from kindler.errors import ConfigError
from tests.cluster import programs
from tests.whole import whole_only


def train(rate: float) -> tuple[int, float]:
    """A step of a mean over all workers, under the strategy whose scope this runs in."""
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    weight = tf.Variable(1.0)

    @tf.function
    def step() -> Any:
        def of_replica() -> Any:
            context = tf.distribute.get_replica_context()
            gradient = context.all_reduce("mean", tf.cast(context.replica_id_in_sync_group, tf.float32))
            return weight.assign_sub(rate * gradient)

        return strategy.run(of_replica)

    step()
    return strategy.num_replicas_in_sync, float(weight.numpy())


def test_functions_with_a_strategy_of_their_own_find_the_cluster(spark: Any) -> None:
    runner = MirroredStrategyRunner(num_slots=2, use_gpu=False, use_custom_strategy=True)
    seen = runner.run(programs.environment, names=["TF_CONFIG", "CUDA_VISIBLE_DEVICES"])

    assert runner.get_num_tasks() == 2
    assert '"task": {"type": "worker", "index": 0}' in seen["TF_CONFIG"]
    assert seen["TF_CONFIG"].count("127.0.0.1:") == 2
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(ConfigError, match=r"spark\.task\.resource\.gpu\.amount"):
        MirroredStrategyRunner(num_slots=2).run(programs.environment, names=[])


def test_slots_are_counted_and_a_local_run_leaves_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    local = MirroredStrategyRunner(num_slots=1, local_mode=True, use_gpu=False, use_custom_strategy=True)

    assert local.run(programs.environment, names=["CUDA_VISIBLE_DEVICES"]) == {"CUDA_VISIBLE_DEVICES": ""}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    with pytest.raises(ValueError, match="num_slots is 0"):
        MirroredStrategyRunner(num_slots=0)
    with pytest.raises(ValueError, match="must be 1"):
        MirroredStrategyRunner(num_slots=2, local_mode=True, use_gpu=False)


@whole_only
def test_a_function_trains_under_the_strategy(spark: Any) -> None:
    replicas, weight = MirroredStrategyRunner(num_slots=2, use_gpu=False).run(train, rate=0.5)

    assert replicas == 2
    assert weight == 0.75
