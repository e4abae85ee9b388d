"""Which GPU a worker takes; no GPU is asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kindler.engine.placement import VISIBLE_GPUS, Placement, machine_gpus, place
from kindler.errors import ConfigError


def placed(
    device: str = "auto", *, rank: int = 0, size: int = 1, share: bool = False, **where: str
) -> Placement:
    given, gpus = (where.get(name, "").split() for name in ("given", "gpus"))
    return place(device, local_rank=rank, local_size=size, share=share, assigned=given, gpus=gpus)


def test_workers_of_a_machine_see_one_gpu_each() -> None:
    assert [placed(rank=rank, size=3, gpus="0 1 2").visible for rank in range(3)] == [("0",), ("1",), ("2",)]
    assert placed(rank=1, size=2, gpus="GPU-a GPU-b") == Placement("auto", ("GPU-b",))


def test_gpus_that_spark_gave_to_a_task_are_its_own_whatever_the_machine_has() -> None:
    assert placed(rank=1, size=2, given="3", gpus="0 1 2 3") == Placement("auto", ("3",))
    assert placed("cuda:1", given="2 3") == Placement("cuda", ("2", "3"), 1)


def test_more_workers_than_gpus_is_a_problem_that_names_both_unless_they_may_share() -> None:
    crowded = placed(rank=2, size=3, gpus="0 1")
    assert crowded.problem is not None
    assert "3 workers on one machine, which has 2 GPUs" in crowded.problem
    assert "Device(share=True)" in crowded.problem
    assert crowded.shared

    shared = placed(rank=2, size=3, gpus="0 1", share=True)
    assert (shared.visible, shared.shared, shared.problem) == (("0",), True, None)


def test_several_workers_on_the_one_gpu_that_was_named_must_say_so() -> None:
    problem = placed("cuda:1", rank=1, size=2, gpus="0 1").problem
    assert problem is not None
    assert "device='cuda:1'" in problem
    assert placed("cuda:1", rank=1, size=2, gpus="0 1", share=True).visible == ("1",)
    assert placed("cuda:1", gpus="0 1") == Placement("cuda", ("1",))


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="'cuda:2' was requested; there are 2 GPUs for this worker: 0, 1"):
        placed("cuda:2", gpus="0 1")


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_what_is_visible_stays_as_it_is_where_no_gpu_was_asked_for(device: str) -> None:
    assert placed(device, gpus="0 1").visible is None
    assert placed("auto").visible is None


def test_a_worker_that_shares_lets_tensorflow_and_jax_take_memory_as_they_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (VISIBLE_GPUS, "XLA_PYTHON_CLIENT_PREALLOCATE", "TF_FORCE_GPU_ALLOW_GROWTH"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)

    placed(rank=1, size=2, gpus="5", share=True).take()

    assert os.environ[VISIBLE_GPUS] == "5"
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"


def test_the_machines_gpus_are_those_that_this_process_may_see(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VISIBLE_GPUS, "2, GPU-b")
    assert machine_gpus() == ["2", "GPU-b"]
    for hidden in ("", "-1"):
        monkeypatch.setenv(VISIBLE_GPUS, hidden)
        assert machine_gpus() == []

    monkeypatch.delenv(VISIBLE_GPUS)
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-a'\necho '1, GPU-b'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert machine_gpus() == ["0", "1"]
