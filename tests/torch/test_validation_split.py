"""A share of the rows is held out: the last ones, as in Keras, with the result of passing them by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from kindler import Columns, Estimator
from kindler.errors import ConfigError
from tests import exact

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

ROWS, KEPT, SHARE = 50, 35, 0.3
DATA = exact.problem(ROWS)
X, Y = DATA["x"], DATA["y"]
TRAINING, HELD_OUT = (
    {name: values[part] for name, values in DATA.items()} for part in (slice(KEPT), slice(KEPT, None))
)


def estimator(workers: int = 2) -> Estimator:
    torch.manual_seed(0)
    return Estimator.from_torch(
        model=nn.Linear(exact.WIDTH, exact.CLASSES),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        metrics="accuracy",
        workers=workers,
    )


def trained(data: Any, **options: Any) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Figures without those of a clock, and weights."""
    est = estimator()
    history = est.fit(data, 2, 8, verbose=0, **options)
    timed = {"seconds", "rows_per_s"}
    return [{k: v for k, v in row.items() if k not in timed} for row in history], exact.weights(est)


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(scope="module")
def by_hand() -> Any:
    return trained((X[:KEPT], Y[:KEPT]), validation_data=(X[KEPT:], Y[KEPT:]))


def written(folder: Path) -> str:
    table = pa.table({"x": list(X), "y": Y})
    pq.write_table(table.slice(0, 20), folder / "a.parquet", row_group_size=7)
    pq.write_table(table.slice(20), folder / "b.parquet", row_group_size=11)
    return str(folder)


@pytest.mark.parametrize(
    "data",
    [
        lambda folder: (X, Y),
        lambda folder: DATA,
        lambda folder: pd.DataFrame({"x": list(X), "y": Y}),
        lambda folder: pa.table({"x": list(X), "y": Y}),
        written,
    ],
    ids=["tuple", "dict", "pandas", "arrow", "parquet"],
)
def test_the_last_rows_are_held_out_as_if_they_had_been_passed_by_hand(
    data: Callable[[Path], Any], by_hand: Any, tmp_path: Path
) -> None:
    found = trained(data(tmp_path), validation_split=SHARE)

    assert [(row["num_samples"], row["val_num_samples"]) for row in found[0]] == [(KEPT, ROWS - KEPT)] * 2
    assert_same(found, by_hand)


def test_columns_that_are_named_and_weights_are_those_of_the_rows() -> None:
    data, names = (
        {**DATA, "w": np.linspace(0.5, 2, ROWS, dtype=np.float32)},
        {"feature_cols": "x", "label_cols": "y"},
    )
    options: dict[str, Any] = {**names, "columns": Columns(weight_col="w")}
    parts = [
        {name: values[part] for name, values in data.items()} for part in (slice(KEPT), slice(KEPT, None))
    ]

    found = trained(data, validation_split=SHARE, **options)

    assert_same(found, trained(parts[0], validation_data=parts[1], **options))


def test_a_run_that_is_resumed_holds_out_the_same_rows(tmp_path: Path) -> None:
    options: dict[str, Any] = {"validation_split": SHARE, "verbose": 0, "checkpoint": tmp_path / "run"}
    whole, again = estimator(), estimator()
    expected = whole.fit((X, Y), 3, 8, validation_split=SHARE, verbose=0)
    estimator().fit((X, Y), 1, 8, **options)

    history = again.fit((X, Y), 3, 8, resume=True, **options)

    for name in ("loss", "val_loss"):
        assert history[name] == expected[name]
    exact.assert_close(exact.weights(again), exact.weights(whole))


@pytest.mark.parametrize("share", [0, 1, 0.0, 1.0, -0.5, 1.5, True, "0.2", float("nan")], ids=repr)
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match="validation_split must be a number between 0 and 1; received"):
        estimator().fit((X, Y), validation_split=share)


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    )
    with pytest.raises(ConfigError, match="validation_split and validation_data were both passed"):
        estimator().fit((X, Y), validation_data=(X, Y), validation_split=SHARE)
    for stream in (loader, lambda config, batch_size: loader):
        with pytest.raises(
            ConfigError, match="validation_split needs rows that can be split.*\n.*validation_data"
        ):
            estimator().fit(stream, validation_split=SHARE)
    for data in ((X[:2], Y[:2]), written(tmp_path)):
        with pytest.raises(ConfigError, match="rows, 0 would be left to train on and"):
            estimator().fit(data, validation_split=0.99)


def test_a_group_of_another_type_is_named_before_any_worker_starts() -> None:
    x, y = np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")
    with pytest.raises(ConfigError, match=r"optimization must be a kindler.Optimization; received \{"):
        Estimator.from_torch(model=torch.nn.Linear(2, 1), optimization={"clip_norm": 1})  # type: ignore[arg-type]
    estimator = Estimator.from_torch(model=torch.nn.Linear(2, 1), loss=torch.nn.MSELoss())
    with pytest.raises(ConfigError, match=r"columns must be a kindler.Columns; received \['a'\]"):
        estimator.fit((x, y), columns=["a"])  # type: ignore[arg-type]
