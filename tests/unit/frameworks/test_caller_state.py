"""What models must not change of their caller is put back, one model after the other."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kindler.frameworks.caller_state import untouched
from kindler.frameworks.rng import OwnGenerators


def test_models_are_made_by_one_thread_at_a_time() -> None:
    entered = threading.Event()

    def enter() -> None:
        with untouched():
            entered.set()

    other = threading.Thread(target=enter)
    with untouched():
        other.start()
        assert not entered.wait(0.2)
    other.join()
    assert entered.is_set()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: None,
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.seed(5),
        lambda: [random.random() for _ in range(312)],  # as many words as a generator has
        np.random.random,
        np.random.normal,  # which keeps a second number for the next call
        lambda: np.random.seed(5),
        lambda: np.random.random(312),
    ],
)
def test_generators_are_put_back_to_where_they_were_taken(draw: Callable[[], object]) -> None:
    before, generators = OwnGenerators().take(), OwnGenerators()
    try:
        generators.take()
        for _ in range(3):
            draw()
            taken = generators.take()
            drawn = [random.random(), random.gauss(0, 1), np.random.random(), np.random.normal()]

            OwnGenerators.put_back(taken)

            assert [random.random(), random.gauss(0, 1), np.random.random(), np.random.normal()] == drawn
            OwnGenerators.put_back(taken)
    finally:
        OwnGenerators.put_back(before)
