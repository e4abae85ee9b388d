"""The contract suite of a framework: what `kindler.frameworks.contract` promises, as tests.

A framework's test file subclasses it:

    class TestMine(ReplicaContract):
        framework = "mine"

        @pytest.fixture
        def case(self) -> ReplicaCase:
            return ReplicaCase(spec=MyReplica.make_spec(model=...), batches=[...])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kindler.collective import Array
from kindler.config import RunSettings
from kindler.frameworks.registry import FRAMEWORKS
from kindler.sync.registry import SYNCS
from kindler.testing.ranks import GangWorker, run_ranks

Columns = tuple[Array, ...]
Cuts = tuple[tuple[int, ...], ...]


@dataclass
class Rows:
    """A batch as replicas see it."""

    features: Columns
    labels: Columns
    rows: int
    global_rows: int
    where: Callable[[int], int | str] | None = None


def cut(features: Columns, labels: Columns, counts: Sequence[int], rank: int = 0) -> Rows:
    """One rank's rows of a step that is cut into so many for each rank."""
    start = sum(counts[:rank])
    part = slice(start, start + counts[rank])
    own = tuple(array[part].copy() for array in features), tuple(array[part].copy() for array in labels)
    return Rows(*own, counts[rank], sum(counts))


@dataclass(frozen=True)
class ReplicaCase:
    """A model to test a framework with.

    Attributes:
        spec: The model with an optimizer and a loss that is a mean over rows; no randomness except in its
            initial weights.
        batches: Features and labels of a few steps with 12 rows each.
        features: Names of the features.
        labels: Names of the labels.
        tolerance: How much ranks may differ from one process.
    """

    spec: Any
    batches: Sequence[tuple[Columns, Columns]]
    features: tuple[str, ...] = ("x",)
    labels: tuple[str, ...] = ("y",)
    tolerance: float = 1e-5


@dataclass(frozen=True)
class _Setup:
    """A case, ready to travel to ranks."""

    framework: str
    spec: bytes
    case: ReplicaCase
    sync: str

    @property
    def fits(self) -> bool:
        return FRAMEWORKS.spec(self.framework).loop == "fit"

    def replica(self, rank: int = 0) -> Any:
        """A replica that is ready for its first epoch."""
        case = self.case
        made = FRAMEWORKS.load(self.framework).from_bytes(
            self.spec, device="cpu", rank=rank, feature_names=case.features, label_names=case.labels
        )
        if self.fits:
            made.arrange(case.features, case.labels)
            made.build(*(tuple(array[:1] for array in part) for part in case.batches[0]), may_idle=True)
        return made

    def started(self) -> Any:
        """A replica that is ready for its first step."""
        replica = self.replica()
        replica.begin_epoch(1)
        return replica

    def parts(self, counts: Sequence[int], rank: int = 0) -> list[Rows]:
        """One rank's rows of every step."""
        return [cut(features, labels, counts, rank) for features, labels in self.case.batches]

    def whole(self) -> list[Rows]:
        return self.parts([len(self.case.batches[0][0][0])])


def _trained_by_ranks(
    worker: GangWorker, setup: _Setup, cuts: Cuts
) -> list[tuple[list[Array], dict[str, float]]]:
    """For each cut the parameters after all steps, and the metrics of all ranks."""
    outcomes = []
    for counts in cuts:
        replica = setup.replica(worker.rank)
        sync = SYNCS.load(setup.sync)(RunSettings(sync_timeout_s=60.0))
        sync.attach(replica, worker)
        if setup.fits:
            replica.share_steps(sync.collective)
        replica.begin_epoch(1)
        for part in setup.parts(counts, worker.rank):
            # A framework with a loop of its own exchanges gradients there, and not in the sync.
            replica.train_step(part) if setup.fits else sync.step(replica, part)
        sync.catch_up(replica)
        replica.merge_buffers()
        metrics = replica.merge_tallies(worker.all_gather(replica.take_tallies()))
        outcomes.append((replica.read(), metrics))
        sync.close()
    return outcomes


class ReplicaContract:
    """Facts about every framework that can train.

    Attributes:
        framework: Its name in the registry.
        sync: The sync that its ranks use.
        preload: Modules that the ranks' processes inherit.
    """

    framework: str
    sync = "allreduce"
    preload: tuple[str, ...] = ("numpy",)

    @pytest.fixture
    def case(self) -> ReplicaCase:
        """Override it."""
        raise NotImplementedError

    @pytest.fixture
    def prepared(self, case: ReplicaCase) -> _Setup:
        """The case, as ranks get it."""
        spec = FRAMEWORKS.load(self.framework).dumps(case.spec)
        # A spec may hold what only this process has, such as a session.
        return _Setup(self.framework, spec, replace(case, spec=None), self.sync)

    @pytest.mark.parametrize(
        "cuts", [((5, 7), (12, 0)), ((4, 0, 8),)], ids=["two-ranks", "three-ranks-one-empty"]
    )
    def test_ranks_train_as_one_process_does(self, prepared: _Setup, cuts: Cuts) -> None:
        alone = prepared.started()
        for part in prepared.whole():
            alone.train_step(part)
        expected = _metrics(alone)
        by_rank = run_ranks(len(cuts[0]), _trained_by_ranks, prepared, cuts, preload=self.preload)

        for outcomes in zip(*by_rank, strict=True):
            for parameters, metrics in outcomes:
                assert_close(parameters, alone.read(), prepared.case.tolerance)
                assert_equal(parameters, outcomes[0][0])
                assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)

    def test_training_moves_the_parameters(self, prepared: _Setup) -> None:
        replica = prepared.started()
        before = replica.read()
        replica.train_step(prepared.whole()[0])

        assert replica.step == 1
        assert any(not np.array_equal(a, b) for a, b in zip(before, replica.read(), strict=True))

    def test_gradients_and_apply_are_what_a_step_is(self, prepared: _Setup) -> None:
        whole, halves = prepared.started(), prepared.started()
        for part in prepared.whole():
            whole.train_step(part)
            halves.apply(halves.gradients(part).arrays)

        assert_close(halves.read(), whole.read(), prepared.case.tolerance)
        assert halves.step == whole.step
        assert _metrics(halves) == pytest.approx(_metrics(whole), rel=1e-4, abs=1e-5)

    def test_gradients_move_nothing(self, prepared: _Setup) -> None:
        replica = prepared.started()
        before = replica.read()
        replica.gradients(prepared.whole()[0])

        assert_equal(replica.read(), before)
        assert replica.step == 0

    def test_no_rows_weigh_nothing_and_give_zeros_of_the_right_shapes(self, prepared: _Setup) -> None:
        replica = prepared.started()
        mine = replica.gradients(prepared.parts((12, 0), rank=1)[0])

        assert mine.weight == 0
        assert [array.shape for array in mine.arrays] == [array.shape for array in replica.read()]
        assert not any(array.any() for array in mine.arrays)

    def test_a_step_that_nobody_has_rows_for_changes_nothing(self, prepared: _Setup) -> None:
        replica = prepared.started()
        before = replica.read()
        replica.train_step(cut(*prepared.case.batches[0], [0]))

        assert_equal(replica.read(), before)
        assert replica.step == 0

    def test_what_was_read_can_be_written_back(self, prepared: _Setup) -> None:
        replica = prepared.replica()
        before = replica.read()
        replica.write([array + 1 for array in before])

        assert len(replica.names()) == len(set(replica.names())) == len(before)
        assert_close(replica.read(), [array + 1 for array in before], 1e-6)
        replica.write(before)
        assert_equal(replica.read(), before)

    def test_training_goes_on_from_a_state_as_if_nothing_had_happened(self, prepared: _Setup) -> None:
        first, second, steps = prepared.started(), prepared.replica(), prepared.whole()
        first.train_step(steps[0])
        second.load_state(first.state())
        for replica in (first, second):
            replica.begin_epoch(2)
            replica.train_step(steps[1])

        assert (second.epoch, second.step) == (2, 2)
        assert_close(second.read(), first.read(), 1e-6)

    def test_a_frozen_state_stays_what_it_was(self, prepared: _Setup) -> None:
        replica = prepared.started()
        before = replica.read()
        frozen = replica.freeze()
        replica.train_step(prepared.whole()[0])
        replica.load_state(b"".join(frozen()))

        assert_close(replica.read(), before, 1e-6)

    def test_a_scorer_of_the_state_predicts_the_same(self, prepared: _Setup) -> None:
        replica, part = prepared.started(), prepared.whole()[0]
        replica.train_step(part)
        scorer = FRAMEWORKS.load(prepared.framework).from_bytes(
            prepared.spec, device="cpu", seed=5, feature_names=prepared.case.features
        )
        scorer.load_state(replica.state(), weights_only_model=True)

        outputs = scorer.predict(part.features)
        assert all(len(output) == part.rows for output in outputs)
        assert_close(outputs, replica.predict(part.features), 1e-6)

    def test_tallies_of_parts_are_those_of_the_whole(self, prepared: _Setup) -> None:
        whole, one, other = (prepared.replica() for _ in range(3))
        for part in prepared.whole():
            whole.eval_step(part)
        for rank, replica in enumerate((one, other)):
            for part in prepared.parts((9, 3), rank):
                replica.eval_step(part)
        expected = _metrics(whole)

        assert expected["num_samples"] == 12 * len(prepared.case.batches)
        assert _metrics(one, other) == pytest.approx(expected, rel=1e-4)

    def test_judging_learns_nothing(self, prepared: _Setup) -> None:
        replica = prepared.replica()
        before = replica.read()
        for part in prepared.whole():
            replica.eval_step(part)

        assert_equal(replica.read(), before)

    def test_weights_come_back(self, prepared: _Setup) -> None:
        replica, other = prepared.started(), prepared.replica()
        replica.train_step(prepared.whole()[0])
        other.load_weights(replica.weights())

        assert_close(other.read(), replica.read(), 1e-6)

    def test_an_epoch_goes_on_in_its_middle(self, prepared: _Setup) -> None:
        first, second, steps = prepared.started(), prepared.replica(), prepared.whole()
        first.train_step(steps[0])
        state, local = first.state(), first.local_state()
        second.load_state(state)
        second.begin_epoch(1)
        second.load_local_state(local)
        for replica in (first, second):
            replica.train_step(steps[1])

        assert_close(second.read(), first.read(), 1e-6)


def _metrics(first: Any, *others: Any) -> dict[str, float]:
    merged: dict[str, float] = first.merge_tallies([each.take_tallies() for each in (first, *others)])
    return merged


def assert_close(found: Sequence[Array], expected: Sequence[Array], tolerance: float) -> None:
    """The arrays are equal within a tolerance."""
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=tolerance)


def assert_equal(found: Sequence[Array], expected: Sequence[Array]) -> None:
    """The arrays are the same, bit by bit."""
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, wanted)
