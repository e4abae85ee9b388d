"""Losses are told by their parts: means and sums over rows from those that compare rows with one another."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kindler.collective import all_gather
from kindler.errors import ConfigError
from kindler.frameworks.loss_trial import LossTrial, refusal

X = np.random.default_rng(0).normal(size=40)
Loss = Callable[[Any], float]


def info_nce(x: Any) -> float:
    scores = np.outer(x, np.cos(x))
    return float(np.mean(np.log(np.exp(scores).sum(1)) - np.diag(scores)))


def own_size_only(x: Any) -> float:
    if len(x) != 40:
        raise ValueError("40 rows, please")
    return float(x.mean())


def tried(loss: Loss, rows: int = 40, data: Any = X, **options: Any) -> Any:
    trial = LossTrial(64, np.concatenate, **options)

    def judge(chosen: list[int]) -> Sequence[tuple[float, float]]:
        return [(loss(data[chosen]) * len(chosen), float(len(chosen)))]

    return trial, trial(judge, rows, 1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: float((x**2).mean()),
        lambda x: float((x**2).mean()) + 3.0,
        lambda x: float(np.sign(x).mean()) + random.gauss(0, 1),
        lambda x: float("nan"),
        lambda x: info_nce(all_gather(x)),
        lambda x: float((x * all_gather(x).mean() * all_gather(x).std()).mean()),
    ],
    ids=["mean", "with a constant", "random", "nan", "gathers", "gathers and takes a mean"],
)
@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_what_parts_make_up_is_let_through(loss: Loss, rows: int) -> None:
    assert tried(loss, rows)[1] is None


@pytest.mark.parametrize(
    "loss",
    [
        info_nce,
        lambda x: float(x.std()),
        lambda x: float((x**2).mean() + 1e-3 * np.median(x)),
        lambda x: float((x**2).sum()) ** 0.5,
        lambda x: float(np.corrcoef(x, x**2)[0, 1]) if len(x) > 20 else float("nan"),
        lambda x: float(np.abs(np.diff(x)).mean()),
        lambda x: info_nce(x) + random.gauss(0, 0.01),
        own_size_only,
        lambda x: float((all_gather(x)).sum()) / len(x),
    ],
    ids=[
        "nce",
        "std",
        "a little",
        "norm",
        "nan of parts",
        "neighbours",
        "random",
        "one size",
        "gathers wrongly",
    ],
)
def test_what_compares_rows_is_found(loss: Loss) -> None:
    _, found = tried(loss)

    assert found is not None
    assert found.rows == (40, 14, 26)


def test_a_batch_that_tells_nothing_is_followed_by_others_and_one_that_does_ends_it() -> None:
    trial, _ = tried(lambda x: 0.0)
    assert not trial.over
    trial, _ = tried(lambda x: float("nan"))
    assert not trial.over
    trial, _ = tried(lambda x: float(x.mean()))
    assert trial.over


def test_passes_of_one_step_cannot_gather_one_anothers_rows() -> None:
    trial = LossTrial(64, None)

    found = trial(lambda chosen: [(info_nce(all_gather(X[chosen])) * len(chosen), len(chosen))], 40, 1e-6)

    assert found is not None
    assert trial.gathers


def test_the_complaint_has_the_loss_the_numbers_and_the_way_out() -> None:
    _, found = tried(lambda x: float(x.std()))
    told = str(refusal(found, "the loss spread()", why="several workers", hint="gather."))

    assert told.startswith(f"the loss spread() of 40 rows together is {X.std():.6g}, and that of 14")
    assert told.endswith("Hint: gather.")
    _, found = tried(own_size_only)
    with pytest.raises(ConfigError, match=r"for 40 rows, but not for 14 or 26 of them \(ValueError: 40 rows"):
        raise refusal(found, "the loss", why="several workers", hint="")
