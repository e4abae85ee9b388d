"""What a server keeps of its requests, and what it tells of their drift."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kindler.data.drift import DriftRule
from kindler.data.statistics import Statistics, measured, summarised
from kindler.models.signature import Signature
from kindler.serve.drift import DriftWatch, DriftWindow

DRAW = np.random.default_rng(3)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def window(
    columns: dict[str, Any], *, names: tuple[str, ...] | None = None, rows: int = 500, clock: Any = None
) -> DriftWindow:
    count = len(next(iter(columns.values())))
    predictions = summarised(measured({"prediction": DRAW.normal(0, 1, 4000)}), 4000)
    known = Statistics(columns=summarised(measured(columns), count), predictions=predictions)
    return DriftWindow(known, Signature((), (), columns=names), DriftRule(), rows, clock or Clock())


def ask(to: DriftWindow, inputs: dict[str, Any], *, answer: float = 0.0) -> None:
    rows = len(next(iter(inputs.values())))
    to.add(inputs, {"y": DRAW.normal(answer, 1, rows)}, rows)


def test_a_shifted_column_raises_the_alarm_within_500_requests_and_20_unshifted_windows_do_not() -> None:
    clock = Clock()
    asked = window({"x": DRAW.normal(0, 1, 5000), "k": DRAW.integers(0, 5, 5000)}, clock=clock)
    for _ in range(20):
        for _ in range(500):
            clock.now += 0.01
            ask(asked, {"x": DRAW.normal(0, 1, 1), "k": DRAW.integers(0, 5, 1)})
        told = asked.compare()
        assert (told["alarm"], told["sampled"]) == (False, 500), told["reasons"]

    for _ in range(500):
        clock.now += 0.01
        ask(asked, {"x": DRAW.normal(1, 1, 1), "k": DRAW.integers(0, 5, 1)})

    told = asked.compare()
    assert [name for name, one in told["columns"].items() if one["alarm"]] == ["x"]


def test_shifted_predictions_raise_the_alarm() -> None:
    asked = window({"x": np.zeros(1000)})
    for _ in range(300):
        ask(asked, {"x": np.zeros(1)}, answer=2.0)

    told = asked.compare()

    assert told["predictions"]["prediction"]["alarm"]
    assert not told["columns"]["x"]["alarm"]


def test_of_a_large_request_a_few_rows_are_kept_and_of_many_requests_the_last() -> None:
    asked = window({"x": np.zeros(1000)}, rows=100)

    ask(asked, {"x": np.arange(100_000.0)})
    assert asked.compare()["sampled"] == 8
    for _ in range(50):
        ask(asked, {"x": np.arange(100_000.0)})

    assert 100 <= asked.compare()["sampled"] < 108


def test_requests_are_sampled_at_a_bounded_rate() -> None:
    clock = Clock()
    asked = window({"x": np.zeros(1000)}, rows=10_000, clock=clock)
    for _ in range(3000):
        ask(asked, {"x": np.zeros(1)})
    assert asked.compare()["sampled"] == 1000

    clock.now += 1.0
    for _ in range(3000):
        ask(asked, {"x": np.zeros(1)})
    assert asked.compare()["sampled"] == 1100


def test_an_input_that_joins_columns_is_compared_by_column() -> None:
    trained = {"a": DRAW.normal(0, 1, 4000), "b": DRAW.normal(0, 1, 4000)}
    asked = window(trained, names=("a", "b"))

    for _ in range(300):
        ask(asked, {"features": np.stack([DRAW.normal(0, 1, 1), DRAW.normal(3, 1, 1)], axis=1)})

    told = asked.compare()["columns"]
    assert (told["a"]["alarm"], told["b"]["alarm"] is not None) == (None, True)


def test_images_and_texts_are_kept_as_what_is_measured_of_them() -> None:
    texts = np.array(["red", "blue"] * 500, object)
    asked = window({"image": DRAW.random((1000, 32, 32)), "colour": texts})

    for _ in range(300):
        image = 0.5 + DRAW.random((1, 32, 32))
        ask(asked, {"image": image, "colour": np.array([DRAW.choice(["red", "violet"])], object)})

    told = asked.compare()["columns"]
    assert told["mean(image)"]["alarm"]
    assert "new categories" in told["colour"]["alarm"]


def test_inputs_whose_shapes_change_and_inputs_that_nobody_knows_break_nothing() -> None:
    asked = window({"x": np.zeros(1000), "t[0]": np.zeros(1000)})

    for width in (1, 2, 3):
        ask(asked, {"x": np.zeros((1, width)), "else": np.array([{"a": 1}], object)})
    ask(asked, {"x": np.zeros(1)})

    assert asked.compare()["alarm"] is False


def test_an_alarm_is_logged_once_and_again_after_it_was_over(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    asked = window({"x": DRAW.normal(0, 1, 4000)}, rows=300, clock=clock)
    caplog.set_level(logging.WARNING)

    with ThreadPoolExecutor(1) as threads:
        watch = DriftWatch(lambda: [("net", 3, asked)], threads)
        for shift, logged in ((2.0, 1), (2.0, 1), (0.0, 1), (2.0, 2)):
            clock.now += 100
            for _ in range(300):
                asked.add({"x": DRAW.normal(shift, 1, 1)}, {}, 1)
            asyncio.run(watch.look())
            assert [r.message[:26] for r in caplog.records] == ["net@3 has drifted: x: PSI "] * logged
