"""Every row goes to one lane, lanes are even, and each is a fair sample whatever the order of the rows."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kindler.data.row_order import Bucketed, Rounds, RowAssignment, RowRandom, RowRandoms, joined_counts

WORKERS = [1, 2, 3, 4, 5, 6, 8, 10, 12]
ORDERS_OF_0_2 = [3838216657, 750541587, 2692096880, 1196937762, 1235332397, 3445534830, 4011764987]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 3000), st.integers(1, 16), st.integers(0, 2**64))
def test_every_row_goes_to_one_worker_and_lanes_are_even(rows: int, workers: int, seed: int) -> None:
    dealing = RowAssignment.between(workers, seed=seed)
    ranks = [dealing.of_rank(rows, rank, workers) for rank in range(workers)]
    counts = np.bincount(np.concatenate([lanes for _, lanes in ranks]), minlength=dealing.lanes_for(rows))

    assert sorted(np.concatenate([numbers for numbers, _ in ranks]).tolist()) == list(range(rows))
    assert all((np.diff(numbers) > 0).all() for numbers, _ in ranks)
    assert len(counts) == dealing.lanes_for(rows)
    assert counts.max() - counts.min() <= 1
    shares = [len(numbers) for numbers, _ in ranks]
    assert max(shares) - min(shares) <= 1


@given(st.integers(0, 3000), st.sampled_from(WORKERS), st.sampled_from(WORKERS))
@settings(deadline=None, max_examples=40)
def test_a_row_stays_in_its_lane_whoever_shares_the_lanes(rows: int, workers: int, size: int) -> None:
    dealing = RowAssignment.between(workers, seed=1)
    _, expected = dealing.of_rank(rows, 0, 1)
    found = np.full(rows, -1)
    for rank in range(size):
        numbers, lanes = dealing.of_rank(rows, rank, size)
        found[numbers] = lanes
        assert (lanes % size == rank).all()

    np.testing.assert_array_equal(found, expected)


def test_usual_numbers_of_workers_deal_alike() -> None:
    lanes = {tuple(RowAssignment.between(w, seed=0).of_rank(1000, 0, 1)[1].tolist()) for w in WORKERS}

    assert len(lanes) == 1


@pytest.mark.parametrize(
    ("rows", "alike"),
    [
        (47, [1]),
        (48, [1, 2, 3, 4, 6, 12]),
        (959, [1, 2, 3, 4, 6, 12]),
        (960, [1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 24, 30]),
        (10**9, [1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 24, 30]),
    ],
)
def test_just_these_numbers_of_workers_up_to_64_have_the_order_of_one(rows: int, alike: list[int]) -> None:
    def lanes(workers: int) -> tuple[int, int]:
        dealing = RowAssignment.between(workers, seed=0)
        return dealing.lanes, dealing.lanes_for(rows)

    assert [workers for workers in range(1, 65) if lanes(workers) == lanes(1)] == alike


def test_the_pages_name_the_numbers_of_workers_that_deal_alike() -> None:
    docs = Path(__file__).parents[3] / "docs"
    for page in ("exact.md", "concepts.md"):
        text = " ".join((docs / page).read_text().split())
        assert "1, 2, 3, 4, 6 or 12 workers on 48 rows or more" in text, page
        assert "5, 8, 10, 15, 20, 24 or 30 on 960 rows or more" in text, page


@pytest.mark.parametrize("rows", [200, 1000])
def test_numbers_of_workers_with_the_same_lanes_make_the_same_batches(rows: int) -> None:
    def batches(workers: int) -> list[list[int]]:
        dealing = RowAssignment.between(workers, seed=3)
        bounds = np.arange(0, rows + 1, 40)
        made: list[list[int]] = [[] for _ in bounds[1:]]
        every = dealing.of_rank(rows, 0, 1)[1]
        counts = np.bincount(every, minlength=dealing.lanes_for(rows)).tolist()
        for rank in range(workers):
            numbers, lanes = dealing.of_rank(rows, rank, workers)
            rounds = Rounds(counts, rank=rank, size=workers, seed=3)
            own = numbers[np.argsort(lanes, kind="stable")][rounds.order(1)]
            for step, part in enumerate(np.split(own, rounds.own_before(bounds[1:-1], 1))):
                made[step].extend(part.tolist())
        return [sorted(batch) for batch in made]

    same = [2, 3, 12] if rows < 960 else [2, 5, 15, 20, 24, 30]
    assert all(batches(workers) == batches(1) for workers in same)
    assert batches(7) != batches(1)


@pytest.mark.parametrize("rows", [600, 6_000, 60_000])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("period", [2, 3, 12, 60, 120, None], ids=str)
def test_each_worker_gets_its_share_of_every_class(rows: int, size: int, period: int | None) -> None:
    """Sorted rows, alternating ones, and any period: what a worker has differs as a random sample does."""
    classes = np.arange(rows) * 10 // rows if period is None else np.arange(rows) % period % 2
    for rank in range(size):
        numbers, _ = RowAssignment.between(size, seed=7).of_rank(rows, rank, size)
        for label in np.unique(classes):
            expected = (classes == label).sum() / size
            assert abs((classes[numbers] == label).sum() - expected) < 5 * np.sqrt(expected)


def test_lanes_are_joined_where_rows_are_few() -> None:
    dealing = RowAssignment.between(2, seed=0)

    assert [dealing.lanes_for(rows) for rows in (960, 959, 48, 47, 0)] == [120, 12, 12, 2, 2]
    joined = RowAssignment(seed=0, lanes=120, workers=2, joined=2)
    assert [joined.lanes_for(rows) for rows in (10_000, 3)] == [2, 2]
    np.testing.assert_array_equal(joined.of_rank(40, 0, 1)[1], dealing.of_rank(40, 0, 1)[1])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_rounds_take_each_row_of_each_lane_once_however_uneven_lanes_are(
    counts: list[int], size: int, epoch: int
) -> None:
    total = 0
    for rank in range(size):
        rounds = Rounds(counts, rank=rank, size=size, seed=3)
        assert sorted(rounds.order(epoch).tolist()) == list(range(rounds.rows))
        before = rounds.own_before(np.arange(sum(counts) + 1), epoch)
        assert (before[0], before[-1]) == (0, rounds.rows)
        assert set(np.diff(before).tolist()) <= {0, 1}
        total += np.diff(before)

    assert (np.atleast_1d(total) == 1).all() or not sum(counts)


def test_an_epochs_order_can_be_had_again_and_differs_by_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(Rounds([20] * 12, rank=0, size=1, seed=seed).order(epoch).tolist())

    assert order(1, 1) == order(1, 1)
    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_groups_of_rows_are_dealt_evenly_and_whole() -> None:
    sizes = [100] * 95 + [40] * 5
    dealing = RowAssignment.between(2, seed=0)
    dealt = dealing.of_groups(sizes)
    rows = np.bincount(dealt, weights=sizes, minlength=12)

    assert rows.max() - rows.min() <= 100
    within = dealing.within_group(3, int(dealt[3]), 100)
    assert set(within % 12) == {dealt[3]}
    assert np.bincount(within // 12).tolist() == [10] * 10


def test_blocks_that_are_used_again_are_shifted_and_what_is_left_goes_to_the_first_lanes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kindler.data.row_order._BLOCKS", 2)
    monkeypatch.setattr("kindler.data.row_order._CHUNK_ROWS", 360)
    numbers, lanes = RowAssignment.between(1, seed=1).of_rank(9 * 120 + 50, 0, 1)
    blocks, left = lanes[:-50].reshape(9, 120), lanes[-50:]

    assert numbers.tolist() == list(range(9 * 120 + 50))
    assert (np.sort(blocks) == np.arange(120)).all()
    assert len({block.tobytes() for block in blocks}) == 9
    assert (np.sort(blocks.reshape(-1, 12) % 12) == np.arange(12)).all(), "whoever shares twelve lanes"
    assert sorted(left.tolist()) == list(range(50))
    assert set(left[-2:].tolist()) == {48, 49}


def test_orders_that_are_drawn_have_each_number_once_and_depend_on_the_seed() -> None:
    drawn = [RowAssignment.between(2, seed=seed).drawn(4, 6) for seed in (1, 1, 2)]

    assert np.sort(np.reshape(drawn[0], (4, 6))).tolist() == [list(range(6))] * 4
    assert drawn[0] == drawn[1] != drawn[2]


def test_counts_of_lanes_are_joined_in_the_order_of_the_ranks() -> None:
    assert joined_counts([[5, 6], [7, 8]], 4, 4) == [5, 7, 6, 8]
    assert joined_counts([[5, 6], [7, 8]], 4, 2) == [11, 15]
    assert joined_counts([[5, 6], []], 4, 2) == [11, 0]
    assert joined_counts([[], []], 4, 2) == [0, 0]


def test_a_workers_places_in_an_epoch_do_not_depend_on_which_was_asked_for_before() -> None:
    places, asked = np.arange(61), Rounds([5] * 12, rank=1, size=3, seed=3)
    fresh = [
        Rounds([5] * 12, rank=1, size=3, seed=3).own_before(places, epoch).tolist() for epoch in range(4)
    ]

    assert [asked.own_before(places, epoch).tolist() for epoch in (2, 1, 1, 3)] == [
        fresh[i] for i in (2, 1, 1, 3)
    ]
    assert len(set(map(tuple, fresh))) > 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_neighbours_belong_to_different_workers_while_all_lanes_have_rows(size: int) -> None:
    ranks = [Rounds([5] * 12, rank=rank, size=size, seed=3) for rank in range(size)]
    for epoch in range(5):
        own = [np.diff(rank.own_before(np.arange(61), epoch)) for rank in ranks]
        for start in range(60 - size + 1):
            assert [turns[start : start + size].sum() for turns in own] == [1] * size
    assert not any(rank.may_miss(np.arange(0, 61, size)) for rank in ranks)
    assert size == 1 or all(rank.may_miss(np.arange(0, 61, size - 1)) for rank in ranks)


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.integers(0, 9),
)
@settings(deadline=None, max_examples=60)
def test_who_may_miss_no_step_misses_none(size: int, batch: int, counts: list[int], epoch: int) -> None:
    total = sum(counts)
    bounds = np.array([*range(0, total, batch), total]) if total else np.array([0])
    for rank in range(size):
        rounds = Rounds(counts, rank=rank, size=size, seed=3)
        misses = (np.diff(rounds.own_before(bounds, epoch)) == 0).any()
        assert rounds.may_miss(bounds) or not misses


def test_rows_that_only_some_lanes_have_may_save_a_worker_from_missing_a_step() -> None:
    counts, bounds = [3, 3, 2, 2], np.array([0, 4, 7, 10])
    first, second = (Rounds(counts, rank=rank, size=2, seed=3) for rank in (0, 1))

    assert not first.may_miss(bounds)
    assert not second.may_miss(bounds)
    assert not first.may_miss(np.array([0, 8, 9])), "the last row but one is the first worker's"
    assert second.may_miss(np.array([0, 8, 9]))
    assert Rounds([3, 3, 3], rank=0, size=2, seed=3).may_miss(np.array([0, 9])), "lanes are uneven"


def test_without_a_seed_lanes_and_their_rows_take_turns_in_their_order() -> None:
    rounds = Rounds([2, 3, 1], rank=0, size=1, seed=None)

    assert rounds.order(1).tolist() == rounds.order(2).tolist() == [0, 2, 5, 1, 3, 4]
    assert Rounds([2, 3, 1, 4], rank=1, size=2, seed=None).order(1).tolist() == [0, 3, 1, 4, 2, 5, 6]
    assert (rounds.rows, rounds.total, rounds.own.tolist()) == (6, 6, [0, 1, 2])
    nothing = Rounds([], rank=0, size=2, seed=3)
    assert (nothing.rows, nothing.order(1).tolist(), nothing.own_before(0, 1).tolist()) == (0, [], 0)


def test_each_row_of_each_epoch_draws_its_own_stretch_of_one_counter() -> None:
    key = np.random.SeedSequence([5, 0x726F7773]).generate_state(2, np.uint64)
    random = RowRandom(5)
    for epoch, number in ((0, 0), (0, 1), (1, 0), (3, 2**40), (2, 2**64 - 1)):
        counter = (epoch << 192) + (number << 128)
        expected = np.random.Generator(np.random.Philox(key=key, counter=counter))
        drawn = random.of(epoch, number)
        assert drawn.random(9).tolist() == expected.random(9).tolist()
        assert drawn.integers(1 << 32, dtype=np.uint32) == expected.integers(1 << 32, dtype=np.uint32)
    assert random.of(2, -1).random() == random.of(2, 2**64 - 1).random()
    assert RowRandom(5 + 2**63).of(1, 1).random() == random.of(1, 1).random()


def test_rows_of_a_batch_draw_the_same_one_by_one_and_in_turn() -> None:
    numbers = [7, 3, 9]
    randoms = RowRandoms(5, 2, np.array(numbers))
    drawn = [RowRandom(5).of(2, number).random() for number in numbers]

    assert len(randoms) == 3
    assert [random.random() for random in randoms.in_turn()] == drawn
    assert [randoms[row].random() for row in range(3)] == drawn
    assert [random.random() for random in randoms[1:].in_turn()] == drawn[1:]


def test_a_run_of_an_earlier_release_continues_in_its_order() -> None:
    """Checkpoints within an epoch say how far it has come, not which rows those were."""
    dealing, counts = RowAssignment.between(7, seed=11), [9, 8, 9, 9, 8, 9, 9]
    lengths, bounds = np.arange(61) % 13, np.array([*range(0, 61, 5), 61])
    bucketed = Bucketed(counts, rank=1, size=2, seed=11, lengths=lengths, bounds=bounds)
    orders = [
        dealing.of_rank(1500, 2, 7)[1],
        dealing.drawn(3, 5),
        dealing.of_groups([30, 10, 20] * 60),
        dealing.within_group(3, 5, 40),
        Rounds(counts, rank=1, size=2, seed=11).order(4),
        Rounds([20] * 24, rank=0, size=2, seed=11).order(2),
        bucketed.sequence(3),
    ]

    assert [crc32(np.asarray(order, "<i8").tobytes()) for order in orders] == ORDERS_OF_0_2
