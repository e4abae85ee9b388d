"""What the batches of the user's own code consist of, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kindler.data.batch_format import Form, form_of, read
from kindler.errors import ConfigError, DataError

X, Y, W = np.zeros((4, 2)), np.arange(4, dtype=np.int32), np.ones(4)


class Tensor:
    """As frameworks have them."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape

    def numpy(self) -> np.ndarray:
        return self.values


@pytest.mark.parametrize(
    ("batch", "form"),
    [
        ((X, Y), Form(("x",), ("y",), False, False)),
        ([X, Y, W], Form(("x",), ("y",), True, False)),
        (((X, X), {"a": Y, "b": Y}), Form(("x0", "x1"), ("a", "b"), False, False)),
        (({"a": X, "b": X}, Y), Form(("a", "b"), ("y",), False, True)),
        ({"x": X, "y": Y}, Form(("x",), ("y",), False, False)),
        ((X,), Form(("x",), (), False, False)),
        ((X, None, W), Form(("x",), (), True, False)),
    ],
)
def test_the_parts_of_a_batch_are_found_by_their_place(batch: Any, form: Form) -> None:
    assert form_of(batch, weights=True) == form


def test_where_nobody_weighs_rows_the_last_of_several_is_the_target() -> None:
    assert form_of((X, X, Y), weights=False) == Form(("x0", "x1"), ("y",), False, False)


def test_tensors_become_arrays_by_the_rules_of_columns() -> None:
    form = form_of((Tensor(X), Tensor(Y)), weights=True)

    part = read((Tensor(X), Tensor(Y)), form, weights=True, allow_nan=False, number=0)

    assert [array.dtype.name for array in (*part.features, *part.labels)] == ["float32", "int64"]
    assert part.rows == 4


def test_memory_is_shared_where_nothing_has_to_be_cast() -> None:
    x = np.zeros((4, 2), np.float32)

    part = read((x, Y), form_of((x, Y), weights=True), weights=True, allow_nan=False, number=0)

    assert np.shares_memory(part.features[0], x)
    assert not np.shares_memory(part.taken(0, 1).features[0], x)


def test_a_rank_takes_every_size_th_row() -> None:
    part = read((X, Y), form_of((X, Y), weights=True), weights=True, allow_nan=False, number=0)

    assert [part.taken(rank, 3).labels[0].tolist() for rank in range(3)] == [[0, 3], [1], [2]]
    assert part.taken(5, 6).rows == 0


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((np.full((4, 2), np.nan), Y), "column 'x', row 0 of batch 3: is NaN"),
        ((X, Y[:3]), "batch 3 has arrays of different lengths"),
        ((X, 7), "single value.*\nHint: batch the dataset"),
        (([[1, 2], [3]], Y), "column 'x': batch 3 cannot become an array"),
        ((np.array([np.zeros(2), np.zeros(3)], object), Y), "rows of different lengths"),
        ((np.array(["a"] * 4), Y), "cannot feed a model"),
        (((X, X), Y), r"inputs \['x0', 'x1'\].*where the first has inputs \['x'\]"),
    ],
)
def test_what_cannot_feed_a_model_is_named(batch: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read(batch, form_of((X, Y), weights=True), weights=True, allow_nan=False, number=3)


@pytest.mark.parametrize(
    ("batch", "weights", "words"),
    [
        ((X, Y, W, W), True, "4 parts"),
        (X, False, "no target"),
        ({"x": X, "y": Y, "sample_weight": W}, False, "a sample_weight"),
    ],
)
def test_batches_of_other_parts_are_refused(batch: Any, weights: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        form_of(batch, weights=weights)
