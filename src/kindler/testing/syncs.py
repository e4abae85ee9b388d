"""The contract suite of a sync that works in lock-step: what `kindler.sync.contract` promises, as tests.

A sync's whole test file:

    class TestMine(SyncContract):
        sync = "mine"
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kindler.collective import Array, Gradients
from kindler.config import RunSettings
from kindler.errors import SyncTimeoutError
from kindler.frameworks.base import BaseReplica
from kindler.frameworks.contract import Variables
from kindler.group import Group
from kindler.sync.registry import SYNCS
from kindler.testing.ranks import GangWorker, run_ranks
from kindler.testing.replicas import assert_close, assert_equal, cut

ROWS, WEIGHTS = 12, np.array([1.0, -2.0, 0.5])
_STEPS = 3


class Plane(BaseReplica):
    """A plane through points, fitted by gradient descent with momentum; numpy alone."""

    def __init__(self, first: float = 0.0, *, rate: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__(None)
        self._weights, self._speed = np.full(3, first), np.zeros(3)
        self._rate, self._momentum = rate, momentum

    def variables(self, *groups: str) -> Variables:
        return {"parameters": {"weights": self._weights.copy()}, "optimizer": {"speed": self._speed}}

    def assign(self, variables: Mapping[str, Mapping[str, Array]]) -> None:
        self._weights = np.array(variables.get("parameters", {}).get("weights", self._weights))
        self._speed = np.array(variables.get("optimizer", {}).get("speed", self._speed))

    def gradients(self, batch: Any) -> Gradients:
        (x,), (y,) = batch.features, batch.labels
        return Gradients([2 * x.T @ (x @ self._weights - y) / max(batch.rows, 1)], float(batch.rows))

    def apply(self, gradients: Sequence[Array | None]) -> None:
        assert gradients[0] is not None
        self._speed = self._momentum * self._speed + gradients[0]
        self._weights = self._weights - self._rate * self._speed
        self.step += 1


@dataclass(frozen=True)
class _Made:
    """How to make a sync, on any rank."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0

    def attached(self, worker: Group, replica: Any) -> Any:
        sync = SYNCS.load(self.name)(RunSettings(sync_timeout_s=self.timeout_s), **self.options)
        sync.attach(replica, worker)
        return sync


def points(seed: int | Sequence[int]) -> tuple[tuple[Array], tuple[Array]]:
    """The features and labels of a step, which a plane with `WEIGHTS` goes through."""
    x = np.random.default_rng(seed).normal(size=(ROWS, 3))
    return (x,), (x @ WEIGHTS,)


def _values(rank: int) -> list[Array]:
    """Odd sizes, several dtypes, a transposed one, a number and nothing at all."""
    random = np.random.default_rng(rank)
    floats = [random.normal(size=shape) for shape in ((7,), (3, 5), (), (0,), (100_003,))]
    return [*floats, random.normal(size=(4, 3)).T, random.normal(size=11).astype(np.float32)]


def _exchanged(worker: Group, made: _Made) -> dict[str, list[Array]]:
    sync = made.attached(worker, Plane())
    group, mine = sync.collective, _values(worker.rank)
    kept = [array.copy() for array in mine]
    counts = [np.array([worker.rank, 1]), np.array([], np.int64)]
    poisoned = np.full(3, np.nan if worker.rank == 0 else 2.0)
    results = {
        "sum": group.sum(mine),
        "counts": group.sum(counts),
        "mean": group.mean(mine, 1.0 + worker.rank),
        "without the first": group.mean([poisoned], float(worker.rank > 0)),
        "without weights": group.mean([np.full(3, np.nan)], 0.0),
        "first": group.broadcast(mine),
        "last": group.broadcast(mine, src=worker.size - 1),
    }
    group.barrier()
    assert_equal(mine, kept)
    sync.close()
    sync.close()
    return results


def _left_alone(worker: GangWorker, made: _Made) -> tuple[int, ...]:
    sync = made.attached(worker, Plane())
    if worker.rank == 1:
        return ()
    with pytest.raises(SyncTimeoutError, match="did not arrive") as caught:
        sync.collective.mean([np.zeros(1)], 1.0)
    return caught.value.missing


def _trained(worker: GangWorker, made: _Made, cuts: Sequence[Sequence[int]]) -> list[list[Array]]:
    found = []
    for counts in cuts:
        replica = Plane(first=float(worker.rank))
        sync = made.attached(worker, replica)
        for step in range(_STEPS):
            sync.step(replica, cut(*points(step), counts, worker.rank))
        sync.catch_up(replica)
        found.append(replica.read())
        sync.close()
    return found


class _Alone(Group):
    rank, size, hosts, host = 0, 1, ("host",), "host"

    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]:
        return dict.fromkeys(ranks, data)


class SyncContract:
    """Facts about every sync whose ranks meet at each step.

    Attributes:
        sync: Its name in the registry.
        options: Options of its own.
        preload: Modules that the ranks' processes inherit.
    """

    sync: str
    options: dict[str, Any] = {}  # noqa: RUF012 - replaced by subclasses, never changed
    preload: tuple[str, ...] = ("numpy",)

    def _run(self, size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        made = _Made(self.sync, self.options, timeout_s)
        return run_ranks(size, function, made, *args, preload=self.preload)

    @pytest.mark.parametrize("size", [2, 3])
    def test_sums_means_and_broadcasts_are_numpys_and_the_same_on_all_ranks(self, size: int) -> None:
        results = self._run(size, _exchanged)

        values = [_values(rank) for rank in range(size)]
        shares = [(1.0 + rank) / sum(1.0 + other for other in range(size)) for rank in range(size)]
        found = results[0]
        assert_close(found["sum"], [sum(parts) for parts in zip(*values, strict=True)], 1e-5)
        means = [sum(w * a for w, a in zip(shares, p, strict=True)) for p in zip(*values, strict=True)]
        assert_close(found["mean"], means, 1e-5)
        assert found["counts"][0].tolist() == [size * (size - 1) // 2, size]
        assert [array.dtype for array in found["mean"]] == [array.dtype for array in values[0]]
        assert found["without the first"][0].tolist() == [2.0] * 3
        assert found["without weights"][0].tolist() == [0.0] * 3
        assert_equal(found["first"], values[0])
        assert_equal(found["last"], values[-1])
        for result in results:
            for name, arrays in result.items():
                assert_equal(arrays, found[name])

    def test_one_rank_alone_needs_nobody(self) -> None:
        [found] = [_exchanged(_Alone(), _Made(self.sync, self.options))]

        assert_close(found["sum"], _values(0), 0)
        assert_close(found["mean"], _values(0), 1e-12)

    def test_a_missing_rank_is_named_and_nobody_hangs(self) -> None:
        missing = self._run(3, _left_alone, timeout_s=5.0)

        assert missing[1] == ()
        assert 1 in missing[0]
        assert 1 in missing[2]

    @pytest.mark.parametrize("cuts", [[(5, 7), (12, 0)], [(4, 0, 8)]], ids=["two-ranks", "three-ranks"])
    def test_ranks_step_as_one_process_from_the_first_ranks_weights(
        self, cuts: list[tuple[int, ...]]
    ) -> None:
        alone = Plane()
        for step in range(_STEPS):
            alone.train_step(cut(*points(step), [ROWS]))

        for found in zip(*self._run(len(cuts[0]), _trained, cuts), strict=True):
            for parameters in found:
                assert_close(parameters, alone.read(), 1e-5)
                assert_equal(parameters, found[0])
