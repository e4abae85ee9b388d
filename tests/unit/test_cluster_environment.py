"""What programs find in their environment, and which nodes a task feeds; no process is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kindler.cluster.context import variables
from kindler.cluster.feeder import NodeAddress, nearest
from kindler.cluster.node import assign_gpus, claim
from kindler.engine.job import GangMember
from kindler.engine.placement import TASK_GPUS
from kindler.errors import ConfigError

MEMBERS = (
    GangMember(0, "chief", 0, "a", "10.0.0.1", (4000, 4001)),
    GangMember(1, "worker", 0, "a", "10.0.0.1", (4002,)),
    GangMember(2, "ps", 0, "b", "10.0.0.2", (4003,)),
    GangMember(3, "evaluator", 0, "b", "10.0.0.2", (4004,)),
)


def test_tensorflow_finds_the_cluster_without_the_evaluator() -> None:
    spec = {"chief": ["10.0.0.1:4000"], "worker": ["10.0.0.1:4002"], "ps": ["10.0.0.2:4003"]}

    for rank, role in enumerate(("chief", "worker", "ps", "evaluator")):
        config = json.loads(variables(MEMBERS, rank, "tensorflow")["TF_CONFIG"])
        assert config == {"cluster": spec, "task": {"type": role, "index": 0}}


def test_torch_and_jax_count_the_nodes_that_train() -> None:
    assert variables(MEMBERS, 1, "torch") == {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4000",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert "RANK" not in variables(MEMBERS, 2, "torch")
    assert variables(MEMBERS, 0, "jax") == {
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:4000",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "0",
    }


def test_a_task_feeds_nodes_of_its_machine_and_then_those_with_the_likest_address() -> None:
    nodes = [
        NodeAddress(0, "a", "10.0.0.1", 1),
        NodeAddress(1, "b", "10.0.0.2", 1),
        NodeAddress(2, "b", "10.0.0.2", 2),
    ]

    assert [[node.rank for node in group] for group in nearest(nodes, 1, host="b")] == [[2, 1], [0]]


def test_a_gpu_that_is_claimed_is_given_to_nobody_else(tmp_path: Path) -> None:
    first = claim(["0", "1", "2"], 2, tmp_path)
    second = claim(["0", "1", "2"], 2, tmp_path)

    assert (first, second) == (["0", "1"], ["2"])


def test_the_gpus_of_sparks_task_are_used_and_too_few_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TASK_GPUS, "3,5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert assign_gpus(None, position=0, nodes=1) == ("3", "5")
    with pytest.raises(ConfigError, match="gpus=3"):
        assign_gpus(3, position=0, nodes=1)
