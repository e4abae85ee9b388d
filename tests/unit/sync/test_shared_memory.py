"""Who shares memory, and sums of numpy arrays through it, between real processes, without any framework."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kindler.errors import SyncTimeoutError
from kindler.group import Group
from kindler.sync.ring import neighbours
from kindler.sync.shared_memory import NUMPY, Topology, Waiting, channels
from kindler.testing.ranks import GangWorker, run_ranks

DTYPES = (np.float32, np.float64, np.int64)
ROUNDS = 40


def _values(rank: int, turn: int, dtype: type) -> np.ndarray:
    return (np.random.default_rng(1000 * turn + rank).standard_normal(1003) * 10).astype(dtype)


def _host(worker: GangWorker, timeout_s: float = 30.0) -> Topology:
    return Topology(worker.hosts, worker.rank, timeout_s=timeout_s)


def _sums(worker: GangWorker) -> list[list[np.ndarray]]:
    sums = []
    for dtype, channel in zip(DTYPES, channels(worker, _host(worker), [1003 * 8] * 3, NUMPY), strict=True):
        for turn in range(ROUNDS):
            channel.slot(np.dtype(dtype))[:1003] = _values(worker.rank, turn, dtype)
            channel.post()
            out = np.empty(1003, dtype)
            channel.sum_into(out)
            sums.append(out)
    return sums


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_gets_the_sum_in_rank_order_bit_by_bit(size: int) -> None:
    results = run_ranks(size, _sums)

    wanted = []
    for dtype in DTYPES:
        for turn in range(ROUNDS):
            expected = _values(0, turn, dtype)
            for rank in range(1, size):
                expected = expected + _values(rank, turn, dtype)
            wanted.append(expected)
    for sums in results:
        assert all(np.array_equal(got, expected) for got, expected in zip(sums, wanted, strict=True))


def _miss(worker: GangWorker) -> tuple[int, ...]:
    [channel] = channels(worker, _host(worker, timeout_s=0.3), [64], NUMPY)
    if worker.rank == 1:
        worker.barrier()
        return ()
    channel.slot(np.dtype(np.float32)).fill(0)
    channel.post()
    worker.barrier()  # the others have come, however late
    with pytest.raises(SyncTimeoutError, match="did not arrive") as caught:
        channel.sum_into(np.empty(16, np.float32))
    return caught.value.missing


def test_a_rank_that_does_not_come_is_named_and_nobody_hangs() -> None:
    assert run_ranks(3, _miss) == [(1,), (), (1,)]


def test_neither_shared_memory_nor_the_host_group_loads_a_framework() -> None:
    code = (
        "import sys, kindler.sync.shared_memory, kindler.sync.host_group\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'tensorflow', 'jax', 'keras')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0


HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)


@given(HOSTS)
def test_every_rank_computes_the_same_leaders_one_for_each_host(hosts: list[str]) -> None:
    views = [Topology(hosts, rank) for rank in range(len(hosts))]

    assert {view.leaders for view in views} == {views[0].leaders}
    assert sorted(hosts[leader] for leader in views[0].leaders) == sorted(set(hosts))
    for rank, view in enumerate(views):
        assert rank in view.ranks
        assert {hosts[other] for other in view.ranks} == {hosts[rank]}
        assert view.leads == (rank in view.leaders)
        assert hosts[view.leaders[view.leader_of[rank]]] == hosts[rank]


@given(st.lists(st.integers(0, 99), min_size=2, max_size=9, unique=True))
def test_going_right_from_anyone_leads_through_all_and_back(members: list[int]) -> None:
    rank, seen = members[0], []
    for _ in members:
        seen.append(rank)
        right = neighbours(members, rank)[1]
        assert neighbours(members, right)[0] == rank
        rank = right

    assert rank == members[0]
    assert sorted(seen) == sorted(members)


def test_the_worker_is_marked_while_the_block_runs_and_the_time_adds_up() -> None:
    worker = Group()
    waiting = Waiting(worker)
    with waiting:
        assert worker.waiting is True
    first = waiting.seconds

    assert worker.waiting is False
    with pytest.raises(TimeoutError), waiting:
        raise TimeoutError
    assert worker.waiting is False
    assert waiting.seconds >= first >= 0.0
