"""A worker that dies is replaced within its Spark task; the others keep their processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exact import Note
from tests.torch.interrupted import (
    DATA,
    EPOCHS,
    FALL,
    STEPS,
    Dies,
    Shaky,
    assert_same,
    figures,
    fit,
    processes,
    shaky,
    times_trained,
    weights,
)

pytestmark = [pytest.mark.spark, pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

WORKERS = 3


def left_alone(strategy: str = "allreduce") -> Any:
    alone = shaky(workers=WORKERS, engine="spark")
    return figures(fit(alone, strategy=strategy)), weights(alone)


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    return left_alone()


def test_a_worker_with_a_part_of_the_optimizer_is_replaced_as_well(tmp_path: Path) -> None:
    expected, trained = left_alone("zero1")
    est = shaky(workers=WORKERS, engine="spark")

    history = fit(est, Note(tmp_path), Dies(tmp_path, 0, 2), strategy="zero1")

    assert figures(history) == expected
    assert_same(est, trained)
    assert processes(tmp_path) == [2, 1, 2]
    assert times_trained(tmp_path) == dict.fromkeys(range(1, EPOCHS * STEPS + 1), 1)


@pytest.mark.parametrize("ranks", [(0,), (1, 2)])
def test_survivors_keep_their_process_and_the_run_ends_as_if_undisturbed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, undisturbed: Any, ranks: tuple[int, ...]
) -> None:
    expected, trained = undisturbed
    est = shaky(workers=WORKERS, engine="spark")

    history = fit(est, Note(tmp_path), Dies(tmp_path, *ranks))

    assert figures(history) == expected
    assert_same(est, trained)
    assert processes(tmp_path) == [2 if rank in ranks else 1 for rank in range(WORKERS)]
    assert times_trained(tmp_path) == dict.fromkeys(range(1, EPOCHS * STEPS + 1), 1)
    assert caplog.text.count("and no step was repeated") == len(ranks)


class Heavy(Shaky):
    """Too large to travel with a task of Spark."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = nn.Parameter(torch.zeros(300_000), requires_grad=False)


def test_a_new_process_gets_the_state_that_the_first_ones_had_passed_on_to_each_other(
    tmp_path: Path, undisturbed: Any
) -> None:
    est = shaky(workers=WORKERS, engine="spark", model=Heavy())

    history = fit(est, Dies(tmp_path, 0))

    assert figures(history) == undisturbed[0]
    assert processes(tmp_path) == [2, 1, 1]


def test_rows_of_a_frame_are_there_for_the_new_process(
    tmp_path: Path, partitioned: Callable[..., Any]
) -> None:
    rows = [(int(i), x.tolist(), int(y)) for i, x, y in zip(DATA["id"], DATA["x"], DATA["y"], strict=True)]
    frame = partitioned([rows[:7], rows[7:]], "id long, x array<float>, y long")
    alone, est = shaky(), shaky()
    expected = figures(fit(alone, data=frame, validation_data=None))

    history = fit(est, Dies(tmp_path, 1, step=FALL), data=frame, validation_data=None)

    assert figures(history) == expected
    assert_same(est, weights(alone))
    assert processes(tmp_path) == [1, 2]
