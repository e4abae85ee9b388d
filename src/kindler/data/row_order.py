"""Which worker gets which row, and the order of an epoch: computed identically by all workers.

Rows are assigned to *lanes*, of which there are more than workers; worker r of W owns the lanes l with
l % W == r. An epoch takes one row of each lane in turn, and this sequence is cut into steps. It depends only
on the seed, the lanes and the rows: worker counts with the same lanes make the same global batches (see
`RowAssignment.between`).

With N rows in all and T = ceil(N / batch size) steps, every step takes nearly N / T rows. `Bucketed` puts
rows of similar length together: the rows of many steps are sorted by length, cut into steps, and the steps
shuffled.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np

from kindler.data.columns import Array
from kindler.errors import ConfigError

# 1, 2, 3, 4 and 6 divide twelve; of ten times as many lanes 5, 8, 10, 15, 20, 24 and 30 have even shares too.
BASE = 12
_LEAST_LANES = 120
_LANES_PER_WORKER = 8  # so that after the loss of a worker the others have nearly even shares
_FEWEST_PER_WORKER = 4  # where a worker has as many of those that everybody has
_ROWS_PER_LANE, _ROWS_PER_LANE_MIN = 8, 4  # lanes of fewer rows are joined, or there is little to shuffle
_CHUNK_ROWS = 1 << 20
_BLOCKS = 256
_BUCKET_STEPS = 64  # that are sorted together: batches of nearly one length, and still a random sample
# What sets the random numbers of one purpose apart from others of the same seed.
_DEALING, _BUCKETS, _ROWS = 0x6465616C, 0x6275636B, 0x726F7773


def steps(total_rows: int, batch_size: int) -> int:
    """Number of steps in an epoch.

    >>> steps(10, 4)
    3
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: must be at least 1.")
    return -(-total_rows // batch_size)


def bound(step: int, total_rows: int, steps: int) -> int:
    """Number of rows before a step; each step has N / steps rows, rounded down or up.

    >>> [bound(step, 10, 3) for step in range(4)]
    [0, 3, 6, 10]
    """
    return step * total_rows // steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAssignment:
    """How the rows of a run are assigned to lanes.

    `joined` is the number of lanes after merging small ones; None lets the number of rows decide.

    >>> [RowAssignment.between(workers, seed=0).lanes for workers in (1, 2, 5, 7, 12, 24, 64)]
    [120, 120, 120, 168, 120, 120, 576]
    >>> RowAssignment.between(2, seed=0).lanes_for(10_000), RowAssignment.between(2, seed=0).lanes_for(20)
    (120, 2)
    """

    seed: int
    lanes: int
    workers: int
    joined: int | None = None

    @staticmethod
    def between(workers: int, *, seed: int) -> RowAssignment:
        """The assignment of a run that begins with this many workers. Worker counts that divide 120 lanes
        evenly all use those, and assign alike from 960 rows on; from 48 rows on, those that divide 12 do.
        Other counts have lanes of their own: uneven shares would cost time, and the order of runs begun
        earlier is kept."""
        if _LEAST_LANES % workers == 0 and _LEAST_LANES // workers >= _FEWEST_PER_WORKER:
            return RowAssignment(seed=seed, lanes=_LEAST_LANES, workers=workers)
        base = math.lcm(workers, BASE)
        least = max(_LEAST_LANES, _LANES_PER_WORKER * workers)
        return RowAssignment(seed=seed, lanes=-(-least // base) * base, workers=workers)

    @property
    def base(self) -> int:
        return math.lcm(self.workers, BASE)

    @property
    def known_lanes(self) -> int:
        return self.joined or self.lanes

    def lanes_for(self, rows: int) -> int:
        """Number of lanes for this many rows; lane l becomes l modulo this."""
        if self.joined is not None:
            return self.joined
        if rows >= _ROWS_PER_LANE * self.lanes:
            return self.lanes
        return self.base if rows >= _ROWS_PER_LANE_MIN * self.base else self.workers

    def of_rank(self, rows: int, rank: int, size: int) -> tuple[Array, Array]:
        lanes, first = self.lanes_for(rows), 0
        numbers, shares = [], []
        for assigned in self._lanes_of_rows(rows):
            joined = assigned.reshape(-1) % lanes
            mine = np.flatnonzero(joined % size == rank)
            numbers.append(mine + first)
            shares.append(joined[mine])
            first += len(joined)
        return np.concatenate(numbers), np.concatenate(shares)

    def drawn(self, orders: int, width: int) -> list[int]:
        rows: list[int] = _permuted(generator(self.seed, _DEALING, width), orders, width).reshape(-1).tolist()
        return rows

    def of_groups(self, sizes: Sequence[int]) -> Array:
        """The lane (modulo `base`) of each row group: balanced, in random order."""
        have = [(0, lane) for lane in range(self.base)]
        assigned = np.empty(len(sizes), np.int32)
        for group in generator(self.seed, _DEALING).permutation(len(sizes)):
            rows, lane = have[0]
            assigned[group] = lane
            heapq.heapreplace(have, (rows + sizes[group], lane))
        return assigned

    def within_group(self, group: int, lane: int, rows: int) -> Array:
        """Deal one group's rows evenly among the lanes that are `lane` modulo `base`."""
        high = generator(self.seed, _DEALING, group).permutation(rows) % (self.lanes // self.base)
        return (high * self.base + lane).astype(np.int32)

    def _lanes_of_rows(self, rows: int) -> Iterator[Array]:
        random = generator(self.seed, _DEALING)
        whole, rest = divmod(rows, self.lanes)
        drawn = _blocks(random, min(whole, _BLOCKS), self.lanes)
        most = max(1, _CHUNK_ROWS // self.lanes)
        yield drawn
        for start in range(len(drawn), whole, most):
            count = min(most, whole - start)
            # A drawn block shifted by some lanes is far cheaper than a new one, and as good.
            shift = random.integers(self.lanes, size=(count, 1), dtype=np.int32)
            yield (drawn[random.integers(_BLOCKS, size=count)] + shift) % self.lanes
        # What is left goes to the first lanes, so that the next workers in turn have a row more.
        groups, few = divmod(rest, BASE)
        yield _blocks(random, 1, groups * BASE)
        yield (groups * BASE + random.permutation(few)).astype(np.int32)


def _blocks(random: np.random.Generator, count: int, lanes: int) -> Array:
    """Random permutations of all lanes, one per line; any twelve neighbours differ modulo twelve."""
    groups = lanes // BASE
    low = _permuted(random, count * groups, BASE).reshape(count, groups, BASE)
    high = _permuted(random, count * BASE, groups).reshape(count, BASE, groups)
    assigned: Array = np.take_along_axis(high.transpose(0, 2, 1), low, axis=2) * BASE + low
    return assigned.reshape(count, lanes)


def joined_counts(by_rank: Sequence[Sequence[int]], lanes: int, joined: int) -> list[int]:
    """Rows per lane after merging `lanes` into `joined`, from each rank's counts of its own lanes.

    >>> joined_counts([[5, 6], [7, 8]], 4, 2)
    [11, 15]
    """
    counts = np.zeros(lanes, np.int64)
    for rank, own in enumerate(by_rank):
        if own:
            counts[rank :: len(by_rank)] = own
    return [int(counts[lane::joined].sum()) for lane in range(joined)]


class Rounds:
    """The order of an epoch: round by round, one row of every lane that has any left. While all lanes have
    rows, each epoch visits them in another order, in which neighbours belong to different workers; the
    remainder goes by lane number. Without a seed, lanes and rows keep their order."""

    def __init__(self, counts: Sequence[int], *, rank: int, size: int, seed: int | None) -> None:
        self._counts = np.asarray(counts, np.int64)
        self._rank, self._size, self._seed = rank, size, seed
        self._lanes = len(counts)
        self._even = int(self._counts.min()) if self._lanes else 0
        self.own = np.arange(rank, self._lanes, size)
        self.rows = int(self._counts[self.own].sum())
        self.total = int(self._counts.sum())
        self._epoch: tuple[int, Array] | None = None

    def own_before(self, place: Array | int, epoch: int) -> Array:
        place = np.asarray(place)
        if self._size == 1:
            return place
        turn, lane = np.divmod(np.minimum(place, self._even * self._lanes), max(1, self._lanes))
        even = turn * len(self.own) + self._mine_before(epoch)[lane]
        beyond: Array = np.maximum(place - self._even * self._lanes, 0)
        before: Array = even + self._rest_before[beyond]
        return before

    def may_miss(self, bounds: Array) -> bool:
        """Whether a stretch may lack a row of this worker in some epoch. While all lanes have rows, any W
        neighbours belong to one worker each, if all have equally many lanes."""
        if self._lanes % self._size:
            return True
        edge = self._even * self._lanes
        in_turn = np.diff(np.minimum(bounds, edge))
        later = np.diff(self._rest_before[np.maximum(bounds - edge, 0)])
        return bool(((in_turn < self._size) & (later == 0)).any())

    def order(self, epoch: int) -> Array:
        """This worker's rows in turn order, as places in its rows sorted by lane."""
        ends = np.cumsum(self._counts[self.own])
        firsts = ends - self._counts[self.own]
        turns = np.empty((self._even, len(self.own)), np.int64)
        rests = []
        order = self._lane_order(epoch)
        for i, place in enumerate(np.argsort(order[order % self._size == self._rank], kind="stable")):
            taken = firsts[i] + self._within(int(self.own[i]), epoch)
            turns[:, place] = taken[: self._even]
            rests.append(taken[self._even :])
        mine = self._rest[self._rest % self._size == self._rank]
        rest = np.empty(len(mine), np.int64)
        if len(mine):
            rest[np.argsort(mine, kind="stable")] = np.concatenate(rests)
        return np.concatenate([turns.reshape(-1), rest])

    @cached_property
    def _rest(self) -> Array:
        extra = self._counts - self._even
        lane = np.repeat(np.arange(self._lanes), extra)
        turn = np.arange(len(lane)) - np.repeat(np.cumsum(extra) - extra, extra)
        rest: Array = lane[np.lexsort((lane, turn))]
        return rest

    @cached_property
    def _rest_before(self) -> Array:
        return np.concatenate([[0], np.cumsum(self._rest % self._size == self._rank)])

    def _lane_order(self, epoch: int) -> Array:
        """A stride coprime to the number of lanes: any stretch meets every worker equally often."""
        if self._seed is None or self._lanes < 2:
            return np.arange(self._lanes)
        random = generator(self._seed, epoch, self._lanes)
        widths = [w for w in range(1, self._lanes) if math.gcd(w, self._lanes) == 1]
        width, start = widths[random.integers(len(widths))], random.integers(self._lanes)
        order: Array = (start + width * np.arange(self._lanes)) % self._lanes
        return order

    def _mine_before(self, epoch: int) -> Array:
        """Running count of this worker's lanes within a round; the last epoch's is cached."""
        kept = self._epoch  # another thread may ask for another epoch
        if kept is None or kept[0] != epoch:
            mine = self._lane_order(epoch) % self._size == self._rank
            kept = self._epoch = (epoch, np.concatenate([[0], np.cumsum(mine)]))
        return kept[1]

    def _within(self, lane: int, epoch: int) -> Array:
        rows = int(self._counts[lane])
        if self._seed is None:
            return np.arange(rows)
        return generator(self._seed, epoch, lane).permutation(rows)


class Bucketed(Rounds):
    """`lengths` covers all rows, lane after lane; `bounds` are the step boundaries."""

    def __init__(
        self, counts: Sequence[int], *, rank: int, size: int, seed: int, lengths: Array, bounds: Array
    ) -> None:
        super().__init__(counts, rank=rank, size=size, seed=seed)
        self._everybody = Rounds(counts, rank=0, size=1, seed=seed)
        self._bucket_seed, self._lengths, self._step_bounds = seed, lengths, bounds
        lanes = np.repeat(np.arange(len(counts)), counts)
        self._is_own = lanes % size == rank
        self._own_place = np.cumsum(self._is_own) - 1
        self._made: tuple[int, Array, Array] | None = None

    def sequence(self, epoch: int) -> Array:
        return self._of(epoch)[1]

    def order(self, epoch: int) -> Array:
        rows = self.sequence(epoch)
        own: Array = self._own_place[rows[self._is_own[rows]]]
        return own

    def own_before(self, place: Array | int, epoch: int) -> Array:
        before: Array = self._of(epoch)[2][np.asarray(place)]
        return before

    def may_miss(self, bounds: Array) -> bool:
        """Bucketing shares the rows of a step by chance."""
        return self._size > 1

    def _of(self, epoch: int) -> tuple[int, Array, Array]:
        kept = self._made  # another thread may ask for another epoch
        if kept is None or kept[0] != epoch:
            rows = self._sorted(self._everybody.order(epoch), epoch)
            before = np.concatenate([[0], np.cumsum(self._is_own[rows])])
            kept = self._made = (epoch, rows, before)
        return kept

    def _sorted(self, rows: Array, epoch: int) -> Array:
        bounds, result = self._step_bounds, np.empty_like(rows)
        steps = len(bounds) - 1
        for number, first in enumerate(range(0, steps, _BUCKET_STEPS)):
            last = min(first + _BUCKET_STEPS, steps)
            part = rows[bounds[first] : bounds[last]]
            part = part[np.argsort(self._lengths[part], kind="stable")]
            taken = 0
            random = generator(self._bucket_seed, epoch & 0xFFFFFFFF, _BUCKETS, number)
            for step in first + random.permutation(last - first):
                start, stop = int(bounds[step]), int(bounds[step + 1])
                result[start:stop] = part[taken : taken + stop - start]
                taken += stop - start
        return result


class RowRandom:
    """Determined by seed, epoch and row number alone: each row of each epoch has its own stretch of a
    Philox counter. Resetting one generator is far cheaper than creating one per row."""

    def __init__(self, seed: int) -> None:
        sequence = np.random.SeedSequence([seed & (2**63 - 1), _ROWS])
        self._key = np.asarray(sequence.generate_state(2, np.uint64), np.uint64)
        self._counter = np.zeros(4, np.uint64)
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": self._key},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._bits = np.random.Philox(0)
        self._generator = np.random.Generator(self._bits)

    def of(self, epoch: int, number: int) -> np.random.Generator:
        """Always the same generator object, reset to this row."""
        self._counter[2], self._counter[3] = number & (2**64 - 1), epoch
        self._bits.state = self._state  # which is copied
        return self._generator


class RowRandoms(Sequence[np.random.Generator]):
    def __init__(self, seed: int, epoch: int, numbers: Array) -> None:
        self._seed, self._epoch, self._numbers = seed, epoch, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def in_turn(self) -> Iterator[np.random.Generator]:
        """One generator reset to each row in turn: faster, if a row is finished before the next."""
        random = RowRandom(self._seed)
        return (random.of(self._epoch, number) for number in self._numbers.tolist())

    @overload
    def __getitem__(self, row: int) -> np.random.Generator: ...
    @overload
    def __getitem__(self, row: slice) -> RowRandoms: ...
    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return RowRandoms(self._seed, self._epoch, self._numbers[row])
        return RowRandom(self._seed).of(self._epoch, int(self._numbers[row]))


def generator(seed: int, *path: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed & (2**63 - 1), *path])))


def _permuted(random: np.random.Generator, lines: int, width: int) -> Array:
    return random.permuted(np.tile(np.arange(width, dtype=np.int32), (lines, 1)), axis=1)
