"""Iterables of batches, dealt out to ranks; orders that are drawn alike on all of them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kindler.errors import ConfigError
from kindler.frameworks.loaders import LoaderSharding, is_loader, open_stream
from kindler.frameworks.rng import Drawing


def dealt(make: Any, size: int, number: int = 1, **options: Any) -> list[list[Any]]:
    streams = [
        open_stream(make, LoaderSharding(rank, size, 7, **options), title="f()") for rank in range(size)
    ]
    return [list(stream.batches(number)) for stream in streams]


def test_each_rank_takes_every_size_th_batch() -> None:
    assert dealt(lambda: list("abcde"), 2) == [["a", "c", "e"], ["b", "d"]]
    assert [open_stream(lambda: [0] * 5, LoaderSharding(r, 2, 7), title="").length() for r in (0, 1)] == [
        3,
        2,
    ]


def test_what_says_that_it_is_sharded_is_left_alone() -> None:
    class Mine(list):
        sharded = True

    assert dealt(lambda: Mine("ab"), 2) == [["a", "b"], ["a", "b"]]


def test_batches_of_all_ranks_are_given_to_all_of_them() -> None:
    assert dealt(lambda: ["ab"], 2, unit="rows") == [["ab"], ["ab"]]
    assert open_stream(lambda: ["ab"], LoaderSharding(0, 2, 7, unit="rows"), title="").cut


def test_all_ranks_draw_the_same_order_and_each_pass_another() -> None:
    def shuffled() -> Iterator[int]:
        order = list(range(10))
        random.shuffle(order)
        yield from order[:5]
        yield from np.random.permutation(order[5:]).tolist()

    first, again, second = dealt(shuffled, 2), dealt(shuffled, 2), dealt(shuffled, 2, number=2)

    assert sorted(itertools.chain(*first)) == list(range(10))
    assert first == again != second


def test_an_iterator_is_made_anew_for_each_pass() -> None:
    stream = open_stream(lambda: iter([1, 2]), LoaderSharding(0, 1, 7), title="")

    assert [list(stream.batches(number)) for number in (1, 2, 3)] == [[1, 2]] * 3
    assert stream.length() is None
    assert open_stream(itertools.count, LoaderSharding(0, 1, 7), title="").length() == math.inf


@pytest.mark.parametrize("made", [(1, 2), {"x": 1}, np.zeros(3), "text"])
def test_data_itself_is_not_taken_for_batches(made: Any) -> None:
    with pytest.raises(ConfigError, match=r"f\(\) must return a torch DataLoader.*\nHint: arrays and frames"):
        open_stream(lambda: made, LoaderSharding(0, 1, 7), title="f()")


def test_only_loaders_of_known_libraries_are_loaders() -> None:
    assert not any(is_loader(thing) for thing in ([], object(), dict, np.zeros(3)))


def test_draws_of_their_own_leave_no_trace() -> None:
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    drawing = Drawing(3)

    with drawing:
        one = random.random(), np.random.rand()
    with drawing:
        two = random.random(), np.random.rand()

    assert (random.random(), np.random.rand()) == expected
    with Drawing(3):
        assert [(random.random(), np.random.rand()) for _ in range(2)] == [one, two]
