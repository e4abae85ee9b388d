"""Sums through shared memory, between real processes."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import GangWorker, run_ranks

from kindler.errors import SyncError
from kindler.frameworks.torch.exchange import TORCH
from kindler.sync.shared_memory import Channel, Segment, Topology, channels

pytestmark = pytest.mark.torch


DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16)
ROUNDS = 40


def _values(rank: int, turn: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return (torch.randn(1003, generator=generator) * 10).to(dtype)


def _host(worker: GangWorker) -> Topology:
    return Topology(worker.hosts, worker.rank, timeout_s=30.0)


def _sums(worker: GangWorker) -> dict[torch.dtype, list[torch.Tensor]]:
    made = channels(worker, _host(worker), [1003 * 8] * len(DTYPES), TORCH)
    return {dtype: _rounds(worker, channel, dtype) for dtype, channel in zip(DTYPES, made, strict=True)}


def _rounds(worker: GangWorker, channel: Channel, dtype: torch.dtype) -> list[torch.Tensor]:
    sums = []
    for turn in range(ROUNDS):
        channel.slot(dtype)[:1003].copy_(_values(worker.rank, turn, dtype))
        channel.post()
        out = torch.empty(1003, dtype=dtype)
        channel.sum_into(out)
        sums.append(out)
    return sums


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_gets_the_sum_in_rank_order_bit_by_bit(size: int) -> None:
    results = run_ranks(size, _sums)

    for turn, dtype in itertools.product(range(ROUNDS), DTYPES):
        expected = _values(0, turn, dtype)
        for rank in range(1, size):
            expected = expected + _values(rank, turn, dtype)
        for sums in results:
            assert torch.equal(sums[dtype][turn], expected)


def _names_left(worker: GangWorker) -> list[str]:
    made = channels(worker, _host(worker), [1 << 20], TORCH)
    worker.barrier()
    left = [name for folder in ("/dev/shm", worker.scratch) for name in os.listdir(folder)]
    worker.barrier()
    assert made
    return [name for name in left if worker.run_id in name]


def test_nothing_is_left_to_clean_up_while_the_memory_is_in_use() -> None:
    assert run_ranks(2, _names_left) == [[], []]


def test_a_folder_without_room_is_passed_over(tmp_path: Path) -> None:
    segment = Segment.create([tmp_path / "absent", tmp_path], "kindler-test", 4096)

    assert Path(segment.path).parent == tmp_path
    segment.unlink()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte in memory, as /dev/shm is."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_file_system_that_is_too_small_is_said_with_its_size_and_another_is_used(
    small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segment = Segment.create([small, tmp_path], "kindler-test", 2 << 20)
    segment.mapping[-1] = 1  # every page is there: no SIGBUS
    segment.unlink()

    assert "no space for 2,097,152 bytes" in caplog.text
    assert "1,048,576 of 1,048,576 bytes are free" in caplog.text
    assert "--shm-size" in caplog.text
    with pytest.raises(
        SyncError, match=r"(?s)no space for 2,097,152 bytes.*of 1,048,576 bytes.*Hint: .*--shm-size"
    ):
        Segment.create([small], "kindler-test", 2 << 20)


def test_no_room_anywhere_is_said_with_the_size_and_the_places(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=r"no space for 4,096 bytes.*absent"):
        Segment.create([tmp_path / "absent"], "kindler-test", 4096)


def _apart(worker: GangWorker) -> Any:
    if worker.rank == 0:  # as if this rank lived in a container with a /dev/shm of its own
        gather = worker.gather
        worker.gather = lambda data, ranks: gather(b"/nowhere/segment" if data else data, ranks)  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="shared_memory=False"):
        channels(worker, _host(worker), [64], TORCH)
    return "told"


def test_ranks_that_do_not_see_each_others_memory_are_told_what_to_do() -> None:
    assert run_ranks(2, _apart) == ["told", "told"]
