"""Means, sums and broadcasts of numpy arrays, between real processes, over every kind of topology."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kindler.errors import ConfigError, SyncError, SyncTimeoutError
from kindler.sync.host_group import ALIGN_BYTES, HostGroup, plan
from kindler.testing.ranks import DIED, GangWorker, run_ranks

LARGE = 1_300_000  # elements: several windows of float32


@dataclass(frozen=True)
class Gang:
    hosts: tuple[str, ...]
    shared_memory: bool = True

    @property
    def size(self) -> int:
        return len(self.hosts)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return run_ranks(self.size, function, self.shared_memory, *args, hosts=self.hosts)


GANGS = {
    "two": Gang(("a",) * 2),
    "three": Gang(("a",) * 3),
    "five": Gang(("a",) * 5),
    "two-over-the-network": Gang(("a",) * 2, shared_memory=False),
    "three-over-the-network": Gang(("a",) * 3, shared_memory=False),
    "five-over-the-network": Gang(("a",) * 5, shared_memory=False),
    "two-hosts-of-two": Gang(("a", "a", "b", "b")),
    "three-hosts-of-uneven-size": Gang(("a", "b", "a", "b", "c")),
}


@pytest.fixture(params=GANGS)
def gang(request: pytest.FixtureRequest) -> Gang:
    return GANGS[request.param]


def _values(rank: int, shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(shape).astype(dtype)


def _gradients(rank: int) -> list[np.ndarray]:
    return [
        _values(rank, (3, 5)),
        _values(rank, (LARGE,)),
        _values(rank, (7,), np.float64),
        _values(rank, (4, 6)).T,
        _values(rank, (33,), np.float16),
        _values(rank, ()),
        np.empty((0, 4), np.float32),
    ]


def _weight(rank: int) -> float:
    return [0.0, 3.0, 1.5, 10.0, 0.0][rank]


def _exchange(worker: GangWorker, shared_memory: bool) -> dict[str, list[np.ndarray]]:
    group = HostGroup(worker, timeout_s=60.0, shared_memory=shared_memory)
    mine = _gradients(worker.rank)
    before = [array.copy() for array in mine]
    counts = [
        np.array([worker.rank, 1], np.int64),
        np.array([worker.rank], np.uint8),
        np.array([2], np.float16),
    ]
    results = {
        "mean": group.mean(mine, _weight(worker.rank)),
        "again": group.mean(mine, _weight(worker.rank)),
        "total": group.sum(counts),
        "nothing": group.mean([np.full(3, np.nan, np.float32)], 0.0),
        "poisoned": group.mean(
            [np.full(3, np.nan if worker.rank == 0 else worker.rank, np.float32)], float(worker.rank > 0)
        ),
        "equal": group.mean([np.full(1000, 0.1, np.float32)], 7.0),
        "empty": [*group.mean([], 1.0), *group.sum([]), *group.broadcast([])],
        "first": group.broadcast(mine),
        "last": group.broadcast(
            [np.array([worker.rank], np.int8), np.array([True]), *mine], src=worker.size - 1
        ),
    }
    assert all(np.array_equal(one, other) for one, other in zip(mine, before, strict=True))
    assert group.waited_s >= 0.0
    assert worker.waiting is False
    group.close()
    group.close()
    with pytest.raises(SyncError, match="closed"):
        group.broadcast(mine)
    return results


def test_all_ranks_get_the_same_means_sums_and_broadcasts(gang: Gang) -> None:
    results = gang.run(_exchange)

    ranks = range(gang.size)
    whole = sum(_weight(rank) for rank in ranks)
    for place, got in enumerate(results[0]["mean"]):
        parts = [_gradients(rank)[place] for rank in ranks]
        expected = (
            sum(_weight(rank) * part.astype(np.float64) for rank, part in zip(ranks, parts, strict=True))
            / whole
        )
        assert (got.dtype, got.shape) == (parts[0].dtype, parts[0].shape)
        tolerance = 1e-3 if got.dtype == np.float16 else 2e-6
        np.testing.assert_allclose(got.astype(np.float64), expected, rtol=tolerance, atol=tolerance)
    total = results[0]["total"]
    assert [array.tolist() for array in total] == [[sum(ranks), gang.size], [sum(ranks)], [2 * gang.size]]
    assert [array.dtype for array in total] == [np.int64, np.uint8, np.float16]
    assert results[0]["nothing"][0].tolist() == [0.0] * 3
    np.testing.assert_allclose(results[0]["poisoned"][0], [sum(ranks) / (gang.size - 1)] * 3, rtol=1e-6)
    np.testing.assert_allclose(results[0]["equal"][0], np.full(1000, 0.1, np.float32), rtol=3e-7)
    assert results[0]["empty"] == []
    for got, sent in zip(results[0]["first"], _gradients(0), strict=True):
        np.testing.assert_array_equal(got, sent, strict=True)
    last = [np.array([gang.size - 1], np.int8), np.array([True]), *_gradients(gang.size - 1)]
    for got, sent in zip(results[0]["last"], last, strict=True):
        np.testing.assert_array_equal(got, sent, strict=True)
    for result in results[1:]:
        for name, arrays in result.items():
            assert [array.tobytes() for array in arrays] == [array.tobytes() for array in results[0][name]]
    for result in results:
        for once, twice in zip(result["mean"], result["again"], strict=True):
            assert once.tobytes() == twice.tobytes()


def _small_floats(worker: GangWorker, shared_memory: bool) -> tuple[str, list[float]]:
    from ml_dtypes import bfloat16

    group = HostGroup(worker, timeout_s=60.0, shared_memory=shared_memory)
    mine = np.array([256.0 + 2 * worker.rank, 1.0], bfloat16)
    [mean], [total] = group.mean([mine], 1.0), group.sum([mine])
    group.close()
    return mean.dtype.name, [*mean.tolist(), *total.tolist()]


def test_floats_that_numpy_does_not_know_are_summed_in_float32_and_come_back_as_they_were() -> None:
    pytest.importorskip("ml_dtypes")

    results = run_ranks(3, _small_floats, True)

    assert results == [("bfloat16", [258.0, 1.0, 774.0 + 2, 3.0])] * 3


def _missing(worker: GangWorker, shared_memory: bool, absent: int) -> tuple[int, ...]:
    worker.barrier()  # processes do not start at the same time, and exchanges are to wait for one rank only
    group = HostGroup(worker, timeout_s=2.5, shared_memory=shared_memory)
    arrays = [_values(worker.rank, (LARGE,))]
    group.mean(arrays, 1.0)
    missing: tuple[int, ...] = ()
    worker.barrier()
    if worker.rank != absent:
        with pytest.raises(SyncTimeoutError, match="did not arrive") as caught:
            group.mean(arrays, 1.0)
        missing = caught.value.missing
    worker.barrier()
    group.close()
    return missing


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        *((name, 1) for name in ("two", "three", "five", "two-over-the-network", "three-over-the-network")),
        *((name, 0) for name in ("three", "two-over-the-network")),
    ],
)
def test_a_rank_that_never_comes_is_named_by_all_and_nobody_hangs(name: str, absent: int) -> None:
    results = GANGS[name].run(_missing, absent)

    assert results == [() if rank == absent else (absent,) for rank in range(GANGS[name].size)]


def test_the_host_of_a_rank_that_never_comes_names_it_and_the_other_host_does_not_hang() -> None:
    results = GANGS["two-hosts-of-two"].run(_missing, 1)

    assert results[0] == (1,)
    assert results[1] == ()
    assert all(results[2:])


class _Dying(HostGroup):
    def _collect(self, *args: Any) -> None:
        os._exit(1)


def _outlive(worker: GangWorker, shared_memory: bool, mortal: int) -> str:
    group_type = _Dying if worker.rank == mortal else HostGroup
    worker.barrier()
    group = group_type(worker, timeout_s=2.5, shared_memory=shared_memory)
    try:
        for _ in range(3):
            group.mean([_values(worker.rank, (LARGE,))], 1.0)
    except SyncError as exc:
        return str(exc)
    finally:
        group.close()
    return "did not notice"


def test_a_peer_that_dies_in_mid_exchange_is_an_error_on_every_other_rank(gang: Gang) -> None:
    mortal = gang.size - 1
    told = gang.run(_outlive, mortal)

    assert told.pop(mortal) == DIED
    assert all("Hint:" in message for message in told), told
    # Who waits for it directly says its name; those behind may only know of the neighbour that gave up.
    assert any(f"[{mortal}] did not arrive" in text or f"worker {mortal} broke" in text for text in told), (
        told
    )


def _disagree(worker: GangWorker, shared_memory: bool) -> str:
    group = HostGroup(worker, timeout_s=30.0, shared_memory=shared_memory)
    same = np.zeros(2, np.float32)
    other = np.zeros((3, 4) if worker.rank else (4, 3), np.float32)
    with pytest.raises(SyncError) as caught:
        group.mean([same, other], 1.0)
    group.close()
    return str(caught.value)


@pytest.mark.parametrize("name", ["two", "two-over-the-network"])
def test_arrays_that_differ_between_ranks_are_both_named(name: str) -> None:
    for told in GANGS[name].run(_disagree):
        assert "Worker 0: mean of 2 arrays, number 1 is float32 (4, 3)." in told
        assert "Worker 1: mean of 2 arrays, number 1 is float32 (3, 4)." in told


def _twice(worker: GangWorker, shared_memory: bool) -> list[float]:
    sums = []
    for turn in range(2):
        group = HostGroup(worker, timeout_s=30.0, shared_memory=bool(turn))
        sums.append(float(group.sum([np.array([worker.rank + turn])])[0][0]))
        group.close()
    return sums


def test_a_second_group_works_after_the_first_is_closed() -> None:
    assert run_ranks(2, _twice, True) == [[1.0, 3.0], [1.0, 3.0]]


@pytest.fixture
def alone() -> HostGroup:
    worker: Any = type("Alone", (), {"rank": 0, "size": 1})()
    return HostGroup(worker, timeout_s=1.0)


def test_one_worker_needs_nobody_and_gets_copies(alone: HostGroup) -> None:
    mine = np.array([1.0, np.nan], np.float32)

    for [got] in (alone.mean([mine], 0.1), alone.sum([mine]), alone.broadcast([mine])):
        np.testing.assert_array_equal(got, mine, strict=True)
        assert not np.shares_memory(got, mine)
    assert alone.mean([mine], 0.0)[0].tolist() == [0.0, 0.0]
    alone.close()


def test_a_mean_of_whole_numbers_is_refused_with_what_to_do(alone: HostGroup) -> None:
    with pytest.raises(ConfigError, match=r"int64.*sum"):
        alone.mean([np.array([1])], 1.0)


def test_python_objects_do_not_travel(alone: HostGroup) -> None:
    with pytest.raises(ConfigError, match="objects"):
        alone.broadcast([np.array([object()])])


DTYPES = [np.dtype(name) for name in ("float16", "float32", "float64", "uint8", "complex128")]
LAYOUTS = st.lists(st.tuples(st.integers(0, 300), st.sampled_from(DTYPES)), max_size=8)


def _carrier(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if dtype == np.float16 else dtype


@given(LAYOUTS, st.sampled_from([64, 256, 1024]), st.sampled_from([0, ALIGN_BYTES]))
def test_every_element_travels_once_aligned_and_in_windows_that_are_not_too_large(
    layout: list[tuple[int, np.dtype]], window_bytes: int, lead_bytes: int
) -> None:
    made = plan(layout, _carrier, window_bytes=window_bytes, lead_bytes=lead_bytes)

    seen: list[list[int]] = [[] for _ in layout]
    for window in made.windows:
        dtype, _ = made.sections[window.section]
        assert (window.stop - window.start) * dtype.itemsize <= window_bytes
        for piece in window.pieces:
            assert window.start + piece.at == made.places[piece.array][1].start + piece.start
            assert piece.at + piece.stop - piece.start <= window.stop - window.start
            seen[piece.array] += range(piece.start, piece.stop)
    assert seen == [list(range(count)) for count, _ in layout]
    for (count, dtype), (section, place) in zip(layout, made.places, strict=True):
        carrier, whole = made.sections[section]
        assert carrier == _carrier(dtype)
        assert place.start * carrier.itemsize >= lead_bytes
        assert place.start * carrier.itemsize % ALIGN_BYTES == 0
        assert (place.stop - place.start, place.stop <= whole) == (count, True)
