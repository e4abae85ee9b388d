"""Every row of every rank exactly once an epoch, in equal steps."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kindler.data.batches import Batch, Batches, BatchOptions
from kindler.data.columns import Array, Column, ColumnPlan
from kindler.data.row_order import Rounds, RowAssignment
from kindler.data.spool import Spool
from kindler.errors import ConfigError

COLUMNS = ColumnPlan(features=(Column(name="x", role="feature"),), labels=(Column(name="y", role="label"),))


def spool(rows: int, *, start: int = 0, order: Any = None) -> Spool:
    y = np.arange(start, start + rows)
    return Spool(rows=rows, arrays={"x": np.stack([y, y + 0.5], 1).astype(np.float32), "y": y}, order=order)


def made(source: Spool, columns: ColumnPlan = COLUMNS, **options: Any) -> Batches:
    given = {"counts": [source.rows], "rank": 0, "batch_size": 4, **options}
    return Batches(source, columns, BatchOptions(**given))


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.integers(1, 16),
    st.booleans(),
    st.sampled_from([None, 4]),  # nothing is read ahead, or all
)
def test_all_ranks_together_use_each_row_once(
    counts: list[int], batch_size: int, shuffle: bool, memory: int | None
) -> None:
    starts = np.cumsum([0, *counts])
    ranks = [
        made(
            spool(rows, start=int(starts[rank])),
            counts=counts,
            rank=rank,
            batch_size=batch_size,
            shuffle=shuffle,
            memory_bytes=memory,
        )
        for rank, rows in enumerate(counts)
    ]
    epochs = [list(rank.stretch(1)) for rank in ranks]

    assert {len(epoch) for epoch in epochs} == {-(-sum(counts) // batch_size)}
    used = [int(y) for epoch in epochs for batch in epoch for y in batch.labels[0]]
    assert sorted(used) == list(range(sum(counts)))
    for step in zip(*epochs, strict=True):
        assert {batch.global_rows for batch in step} == {sum(batch.rows for batch in step)}
        for batch in step:
            assert len(batch.features[0]) == len(batch.labels[0]) == batch.rows
            np.testing.assert_array_equal(batch.features[0][:, 0], batch.labels[0])


def test_the_natural_order_is_kept_without_shuffling() -> None:
    batches = list(made(spool(10), shuffle=False).stretch(0))

    assert [batch.labels[0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_a_spools_order_is_followed() -> None:
    source = spool(4, order=np.array([2, 0, 3, 1]))

    assert next(made(source, shuffle=False).stretch(0)).labels[0].tolist() == [2, 0, 3, 1]


def test_shuffling_does_not_depend_on_how_rows_arrived() -> None:
    arrival = np.array([4, 2, 0, 1, 3])
    y = np.argsort(arrival)
    arrived = Spool(
        rows=5, arrays={"x": np.stack([y, y], 1).astype(np.float32), "y": y}, order=arrival.astype(np.int64)
    )
    plain = [batch.labels[0].tolist() for batch in made(spool(5), seed=3).stretch(2)]

    assert [batch.labels[0].tolist() for batch in made(arrived, seed=3).stretch(2)] == plain


def test_epochs_differ_and_repeat_with_the_seed() -> None:
    def labels(seed: int, epoch: int) -> list[int]:
        return [int(y) for batch in made(spool(50), seed=seed).stretch(epoch) for y in batch.labels[0]]

    assert labels(1, 0) == labels(1, 0)
    assert labels(1, 0) != labels(1, 1)
    assert labels(1, 0) != labels(2, 0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_may_be_written_to(shuffle: bool) -> None:
    source = spool(4)
    for array in source.arrays.values():
        array.flags.writeable = False
    batch = next(made(source, shuffle=shuffle).stretch(0))
    batch.features[0][:] = -1

    assert source.arrays["x"].min() == 0


def test_stacked_features_are_one_float32_matrix() -> None:
    source = Spool(
        rows=2,
        arrays={
            "a": np.array([1, 2], np.int64),
            "b": np.array([[3, 4], [5, 6]], np.float32),
            "c": np.array([True, False]),
            "y": np.array([0, 1]),
        },
    )
    columns = ColumnPlan(
        features=tuple(Column(name=name, role="feature") for name in "abc"),
        labels=(Column(name="y", role="label"),),
        stack_features=True,
    )
    (stacked,) = next(made(source, columns, shuffle=False).stretch(0)).features

    assert stacked.dtype == np.float32
    np.testing.assert_array_equal(stacked, [[1, 3, 4, 1], [2, 5, 6, 0]])


def test_a_step_without_rows_is_stacked_to_the_same_width() -> None:
    names = ("a", "b")
    arrays = {"a": np.empty(0, np.int64), "b": np.empty((0, 3), np.float32)}
    columns = ColumnPlan(
        features=tuple(Column(name=name, role="feature") for name in names), labels=(), stack_features=True
    )
    batches = made(Spool(rows=0, arrays=arrays), columns, counts=[0, 3], rank=0, batch_size=2)

    assert [batch.features[0].shape for batch in batches.stretch(0)] == [(0, 4), (0, 4)]


def test_images_cannot_be_stacked() -> None:
    source = Spool(rows=2, arrays={"x": np.zeros((2, 3, 4)), "y": np.zeros(2)})
    columns = ColumnPlan(features=COLUMNS.features, labels=COLUMNS.labels, stack_features=True)
    with pytest.raises(ConfigError, match=r"rows of 'x' have shape \(3, 4\)(?s:.*)shapes=\{'x': \(12,\)\}"):
        made(source, columns)


def test_a_label_that_is_also_a_feature_is_int64_as_a_label() -> None:
    source = Spool(rows=2, arrays={"x": np.array([1, 2], np.int8)})
    columns = ColumnPlan(features=COLUMNS.features, labels=(Column(name="x", role="label"),))
    batch = next(made(source, columns).stretch(0))

    assert (batch.features[0].dtype, batch.labels[0].dtype) == (np.int8, np.int64)


def test_counts_that_do_not_fit_the_spool_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 1 has 3 rows, but counts say \[3, 4\]"):
        made(spool(3), counts=[3, 4], rank=1, batch_size=2)


def lanes_of(rows: int, size: int, workers: int = 1) -> list[Spool]:
    """The spools of `size` workers that share one, as a run begun by `workers` deals them."""
    whole, dealing = spool(rows), RowAssignment.between(workers, seed=5)
    return [whole.assigned(*dealing.of_rank(rows, rank, size)) for rank in range(size)]


def gang(rows: int, size: int, *, workers: int = 1, batch_size: int = 16, **options: Any) -> list[Batches]:
    lanes = RowAssignment.between(workers, seed=5).lanes_for(rows)
    spools = lanes_of(rows, size, workers)
    counts = np.sum([part.lane_counts(lanes) for part in spools], axis=0)
    return [
        made(part, counts=counts, rank=rank, size=size, batch_size=batch_size, seed=5, **options)
        for rank, part in enumerate(spools)
    ]


def global_batches(ranks: list[Batches], epoch: int) -> list[list[int]]:
    steps = zip(*(rank.stretch(epoch) for rank in ranks), strict=True)
    return [sorted(int(y) for batch in step for y in batch.labels[0]) for step in steps]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 1500),
    st.integers(1, 70),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 5),
)
def test_any_number_of_workers_makes_the_same_global_batches(
    rows: int, batch_size: int, workers: int, size: int, shuffle: bool, epoch: int
) -> None:
    options = {"workers": workers, "batch_size": batch_size, "shuffle": shuffle}
    alone = global_batches(gang(rows, 1, **options), epoch)

    assert sorted(y for batch in alone for y in batch) == list(range(rows))
    assert {len(batch) for batch in alone} <= {rows // len(alone), -(-rows // len(alone))}
    assert global_batches(gang(rows, size, **options), epoch) == alone
    if not shuffle:
        assert [y for batch in alone for y in batch] == list(range(rows)), "consecutive rows"


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 1500), st.integers(1, 70), st.sampled_from([1, 2, 3, 5]), st.booleans())
def test_what_is_said_of_steps_ahead_is_what_they_are(
    rows: int, batch_size: int, size: int, shuffle: bool
) -> None:
    for rank in gang(rows, size, workers=size, batch_size=batch_size, shuffle=shuffle):
        made = [(batch.rows, batch.global_rows) for batch in rank.stretch(1, steps=3 * rank.steps)]
        for first, last in ((0, 1), (rank.steps - 1, rank.steps + 1), (1, 3 * rank.steps)):
            ahead = [sum(counts) for counts in zip(*made[first:last], strict=True)] or [0, 0]
            assert list(rank.rows_of(first, last)) == ahead
        assert rank.may_idle or all(own for own, _ in made)
        assert not rank.may_idle or size > 1
        own = [step for step, (count, _) in enumerate(made[: rank.steps]) if count]
        assert rank.own_steps() == own


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8, 10, 12])
def test_workers_have_even_shares_of_every_step_and_none_idles(size: int) -> None:
    for rank in gang(6007, size, workers=size, batch_size=60):
        counts = {batch.rows for batch in rank.stretch(1, steps=4 * rank.steps)}
        assert counts <= set(range(60 // size - 2, 60 // size + 3))
        assert not rank.may_idle


def test_rows_meet_other_rows_in_each_epoch() -> None:
    (batches,) = gang(1200, 1, batch_size=4)
    partners = [
        {y for batch in seen(batches.stretch(epoch)) if 7 in batch for y in batch} for epoch in range(1, 9)
    ]

    assert len(set.union(*partners)) > 20


def test_no_thread_is_left_when_an_epoch_is_given_up() -> None:
    epoch = made(spool(100), batch_size=1).stretch(0)
    next(epoch)
    epoch.close()

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kindler-batches")]


def seen(batches: Iterable[Batch]) -> list[list[int]]:
    return [batch.labels[0].tolist() for batch in batches]


def test_a_span_is_a_piece_of_the_endless_stream_of_passes() -> None:
    batches = made(spool(10), batch_size=4)
    stream = [*seen(batches.stretch(1)), *seen(batches.stretch(2)), *seen(batches.stretch(3))]

    assert len(stream) == 3 * batches.steps
    for start in range(len(stream)):
        for stop in range(start + 1, len(stream) + 1):
            assert seen(batches.stretch(1, done=start, steps=stop)) == stream[start:stop]


def test_a_step_of_the_stream_can_be_asked_for_by_its_number() -> None:
    batches = made(spool(10), batch_size=4)
    stream = seen(batches.stretch(1, steps=7))

    for step in (0, 1, 2, 3, 6, 2, 2):
        assert batches.batch(step).labels[0].tolist() == stream[step]


def test_the_order_of_a_pass_is_computed_once_for_steps_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    order = Rounds.order

    def noted(self: Rounds, epoch: int) -> Array:
        computed.append(epoch)
        return order(self, epoch)

    monkeypatch.setattr(Rounds, "order", noted)
    batches = made(spool(20), batch_size=4)
    for step in (*range(10), 9, 10):
        batches.batch(step)

    assert computed == [1, 2, 2, 3]
    batches.close()


def test_only_rows_in_the_order_of_their_numbers_leave_a_worker_without_some_in_a_step() -> None:
    numbered = Spool(rows=4, arrays=spool(4).arrays, numbers=np.arange(4))
    options: dict[str, Any] = {"counts": [4, 4], "rank": 0, "batch_size": 2}
    shuffled, in_order = made(numbered, **options), made(numbered, shuffle=False, **options)

    assert (shuffled.may_idle, [*shuffled.own_steps()]) == (False, [0, 1, 2, 3])
    assert (in_order.may_idle, [*in_order.own_steps()]) == (True, [0, 1])


def test_steps_before_a_span_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def note(array: Array, rows: slice | Array) -> Array:
        taken = array[rows].copy()
        read.append(len(taken))
        return taken

    monkeypatch.setattr("kindler.data.batches._taken", note)

    list(made(spool(100), batch_size=10).stretch(1, done=7, steps=9))

    assert sum(read) == 2 * 2 * 10, "ten rows a step of a feature and a label"


class Taker:
    """Takes rows as a GPU would: several steps at once, cut only where a step begins at a multiple."""

    def __init__(self, column: Array, together: int, multiple: int, asked: list[int]) -> None:
        self._column, self.together, self._multiple, self._asked = column, together, multiple, asked

    def __call__(self, rows: slice | Array) -> Array:
        taken = self._column[rows]
        self._asked.append(len(taken))
        return taken

    def split(self, taken: Array, start: int, stop: int) -> Array | None:
        return None if start % self._multiple else taken[start:stop]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=3),
    st.integers(1, 8),
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 4),
)
def test_rows_that_are_taken_for_several_steps_at_once_are_those_of_each_step(
    counts: list[int], batch_size: int, shuffle: bool, together: int, multiple: int
) -> None:
    for rank, rows in enumerate(counts if sum(counts) else []):
        options: Any = {"counts": counts, "rank": rank, "batch_size": batch_size, "shuffle": shuffle}
        plain, held = made(spool(rows), **options), made(spool(rows), **options)
        asked: list[int] = []
        held.held_by(lambda columns, a=asked: [Taker(c, together, multiple, a) for c in columns])

        for one, other in zip(
            plain.stretch(1, done=1, steps=30), held.stretch(1, done=1, steps=30), strict=True
        ):
            np.testing.assert_array_equal(one.features[0], other.features[0])
            np.testing.assert_array_equal(one.labels[0], other.labels[0])


def test_steps_of_one_size_are_taken_eight_at_a_time() -> None:
    asked: list[int] = []
    held = made(spool(96))
    held.held_by(lambda columns: [Taker(column, 1000, 4, asked) for column in columns])
    assert len(list(held.stretch(1))) == 24
    assert asked == [32, 32, 32]
