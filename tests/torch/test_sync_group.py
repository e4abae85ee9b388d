"""Sums and broadcasts over workers of one and of several hosts, between real processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gang import GangWorker, run_ranks

from kindler.errors import SyncError
from kindler.sync.allreduce_torch import Group

pytestmark = pytest.mark.torch

LAYOUTS = [
    pytest.param(("a", "a"), True, id="one-host"),
    pytest.param(("a", "a"), False, id="one-host-over-the-network"),
    pytest.param(("a", "b"), True, id="two-hosts"),
    pytest.param(("a", "b", "a", "b", "c"), True, id="three-hosts-of-uneven-size"),
]


def _group(worker: GangWorker, shared_memory: bool = True, timeout_s: float = 60.0) -> Group:
    return Group(worker, device=torch.device("cpu"), timeout_s=timeout_s, shared_memory=shared_memory)


def _values(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def _exchange(worker: GangWorker, shared_memory: bool) -> dict[str, torch.Tensor]:
    group = _group(worker, shared_memory)
    small, large = _values(worker.rank, 7), _values(worker.rank, 1_500_000)
    counts = torch.tensor([worker.rank, 1], dtype=torch.int64)
    columns = _values(worker.rank, 12).reshape(3, 4).t()
    handles = [group.all_reduce(tensor) for tensor in (small, large, counts, columns)]
    for handle in handles:
        handle.wait()
    last = torch.full((3,), float(worker.rank))
    group.broadcast(last, src=worker.size - 1)
    first = _values(worker.rank, 1_500_000)
    group.broadcast(first)
    group.close()
    return {
        "small": small,
        "large": large,
        "counts": counts,
        "columns": columns,
        "last": last,
        "first": first,
    }


@pytest.mark.parametrize(("hosts", "shared_memory"), LAYOUTS)
def test_all_ranks_get_the_same_sums_and_broadcasts(hosts: Sequence[str], shared_memory: bool) -> None:
    size = len(hosts)
    results = run_ranks(size, _exchange, shared_memory, hosts=hosts)

    expected = sum(_values(rank, 1_500_000).double() for rank in range(size))
    for result in results:
        torch.testing.assert_close(result["large"].double(), expected, atol=1e-5, rtol=1e-5)
        small = sum(_values(rank, 7) for rank in range(size))
        torch.testing.assert_close(result["small"], small)
        assert result["counts"].tolist() == [size * (size - 1) // 2, size]
        wanted = sum(_values(rank, 12).reshape(3, 4).t() for rank in range(size))
        torch.testing.assert_close(result["columns"], wanted)
        assert result["last"].tolist() == [size - 1.0] * 3
        assert torch.equal(result["first"], _values(0, 1_500_000))
        for name, value in result.items():
            assert torch.equal(value, results[0][name])


def _twice(worker: GangWorker) -> list[float]:
    sums = []
    for turn in range(2):
        group = _group(worker, shared_memory=bool(turn))
        value = torch.tensor([float(worker.rank + turn)])
        group.all_reduce(value).wait()
        sums.append(value.item())
        group.close()
        group.close()
    assert not torch.distributed.is_initialized()
    return sums


def test_a_second_group_works_after_the_first_is_closed_and_none_is_torchs_default() -> None:
    assert run_ranks(2, _twice) == [[1.0, 3.0], [1.0, 3.0]]


def test_one_worker_needs_nobody() -> None:
    worker: Any = type("Alone", (), {"rank": 0, "size": 1})()
    group = Group(worker, device=torch.device("cpu"), timeout_s=1.0)
    value = torch.tensor([2.0])
    group.all_reduce(value).wait()
    group.broadcast(value)

    assert value.item() == 2.0
    group.close()


def _left_alone(worker: GangWorker) -> str:
    group = _group(worker, shared_memory=False, timeout_s=1.0)
    if worker.rank == 1:
        return "gone"
    with pytest.raises(SyncError, match="connection to worker 1 broke in an exchange between hosts"):
        group.all_reduce(torch.ones(3)).wait()
    return "told"


def test_a_lost_peer_on_the_network_is_a_sync_error() -> None:
    assert run_ranks(2, _left_alone) == ["told", "gone"]
