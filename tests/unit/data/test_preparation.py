"""Transforms, collate and padding, a batch at a time, against the same done by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kindler import batched
from kindler.data.columns import Column, ColumnPlan
from kindler.data.preparation import Prepare, Preparer
from kindler.data.ragged import to_ragged
from kindler.data.row_order import RowRandom, RowRandoms
from kindler.errors import ConfigError, DataError

LISTS = [[3, 1], [7], [4, 1, 5]]
RAW: dict[str, Any] = {
    "tokens": to_ragged(
        pa.array(LISTS), Column(name="tokens", role="feature", ragged=True), where=lambda i: i
    ),
    "x": np.arange(6, dtype=np.float32).reshape(3, 2),
    "y": np.array([0, 1, 2]),
}


def columns(*features: str, labels: tuple[str, ...] = ("y",)) -> ColumnPlan:
    return ColumnPlan(
        features=tuple(Column(name=name, role="feature") for name in features),
        labels=tuple(Column(name=name, role="label") for name in labels),
    )


def prepared(given: Prepare, *features: str, **options: Any) -> Any:
    labels = options.pop("labels", ("y",))
    preparer = Preparer(
        given, columns(*features, labels=labels), trains=options.pop("trains", True), seed=5, rank=3
    )
    raw = {name: RAW[name] for name in (*features, *labels)}
    return preparer(
        raw, rows=3, where=lambda row: 100 + row, **{"epoch": 1, "numbers": np.array([8, 2, 4]), **options}
    )


def test_a_row_becomes_what_the_transform_returns_and_labels_stay() -> None:
    made = prepared(Prepare(transform=lambda row: {"sum": row["x"].sum(), "x": row["x"] * 2}), "x")

    assert list(made.features) == ["sum", "x"]
    np.testing.assert_array_equal(made.features["sum"], [1, 5, 9])
    np.testing.assert_array_equal(made.features["x"], RAW["x"] * 2)
    np.testing.assert_array_equal(made.labels["y"], [0, 1, 2])


def test_labels_are_changed_by_name_and_have_their_dtype() -> None:
    def swapped(row: Any) -> Any:
        return {**row, "y": np.int8(2 - row["y"])}

    made = prepared(Prepare(transform=swapped), "x")

    assert made.labels["y"].dtype == np.int64
    np.testing.assert_array_equal(made.labels["y"], [2, 1, 0])
    assert list(made.features) == ["x"]


def test_what_is_drawn_depends_on_seed_epoch_and_row_alone() -> None:
    def noisy(row: Any, rng: np.random.Generator) -> Any:
        return {"x": rng.normal(size=2)}

    first = prepared(Prepare(transform=noisy), "x").features["x"]
    moved = prepared(Prepare(transform=noisy), "x", numbers=np.array([4, 9, 8])).features["x"]
    later = prepared(Prepare(transform=noisy), "x", epoch=2).features["x"]

    np.testing.assert_array_equal(first[[2, 0]], moved[[0, 2]])
    assert not np.isin(later, first).any()
    expected = [RowRandom(5).of(1, row).normal(size=2) for row in (8, 2, 4)]
    np.testing.assert_allclose(first, expected, rtol=1e-6)


def test_a_batch_transform_has_a_generator_of_each_row_with_the_same_numbers() -> None:
    @batched
    def noisy(given: Any, rngs: Any) -> Any:
        return {"x": np.stack([rng.normal(size=2) for rng in rngs]), "n": [len(t) for t in given["tokens"]]}

    made = prepared(Prepare(transform=noisy), "x", "tokens")

    np.testing.assert_allclose(made.features["x"][1], RowRandom(5).of(1, 2).normal(size=2), rtol=1e-6)
    np.testing.assert_array_equal(made.features["n"], [2, 1, 3])
    assert RowRandoms(5, 1, np.arange(4))[1:][0].random() == RowRandoms(5, 1, np.arange(4))[1].random()


def test_a_default_is_not_taken_for_random_numbers() -> None:
    def scaled(row: Any, by: float = 3.0) -> Any:
        return {"x": row["x"] * by}

    np.testing.assert_array_equal(prepared(Prepare(transform=scaled), "x").features["x"], RAW["x"] * 3)


def test_rows_are_padded_as_by_hand_with_a_mask_after_all_features() -> None:
    made = prepared(Prepare(pad="batch", pad_value=9), "tokens", "x")

    assert list(made.features) == ["tokens", "x", "tokens_mask"]
    np.testing.assert_array_equal(made.features["tokens"], [[3, 1, 9], [7, 9, 9], [4, 1, 5]])
    np.testing.assert_array_equal(made.features["tokens_mask"], [[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    wider = prepared(Prepare(pad="batch"), "tokens", widths={"tokens": 5})
    assert wider.features["tokens"].shape == (3, 5)
    fixed = prepared(Prepare(pad=4, masks=False), "tokens")
    np.testing.assert_array_equal(fixed.features["tokens"], [[3, 1, 0, 0], [7, 0, 0, 0], [4, 1, 5, 0]])
    assert list(fixed.features) == ["tokens"]


def test_labels_are_padded_with_what_losses_ignore() -> None:
    made = prepared(Prepare(pad="batch"), "x", labels=("tokens",))

    np.testing.assert_array_equal(made.labels["tokens"], [[3, 1, -100], [7, -100, -100], [4, 1, 5]])
    chosen = prepared(Prepare(pad="batch", pad_value={"tokens": -1}), "x", labels=("tokens",))
    assert chosen.labels["tokens"][1].tolist() == [7, -1, -1]
    floats = Prepare(transform=lambda row: {**row, "tokens": row["tokens"] / 2}, pad="batch")
    with pytest.raises(ConfigError, match=r"pad_value=\{'tokens': ...\}"):
        prepared(floats, "x", labels=("tokens",))


def test_lists_that_a_transform_makes_are_padded_and_arrays_of_the_data_are_not() -> None:
    given = Prepare(transform=lambda row: {**row, "ids": [1] * len(row["tokens"])}, pad="batch")
    made = prepared(given, "tokens", "x")

    assert list(made.features) == ["tokens", "x", "ids", "tokens_mask", "ids_mask"]
    same = Prepare(transform=lambda row: {"ids": [1, 2]}, pad="batch")
    assert list(prepared(same, "x").features) == ["ids", "ids_mask"], "of one length or not"
    chosen = Prepare(transform=lambda row: {**row, "ids": [1, 2]}, pad={"tokens": 4})
    assert list(prepared(chosen, "tokens").features) == ["tokens", "ids", "tokens_mask"]


def test_collate_sees_ragged_rows_and_makes_the_batch() -> None:
    def joined(rows: list[Any]) -> Any:
        return {"flat": np.array([row["tokens"].sum() for row in rows]), "y": [row["y"] + 1 for row in rows]}

    made = prepared(Prepare(transform=lambda row: {**row}, collate=joined), "tokens")

    np.testing.assert_array_equal(made.features["flat"], [4, 7, 10])
    np.testing.assert_array_equal(made.labels["y"], [1, 2, 3])
    kept = prepared(Prepare(collate=lambda rows: {"n": [len(r["tokens"]) for r in rows]}), "tokens")
    np.testing.assert_array_equal(kept.labels["y"], [0, 1, 2])


def test_rows_that_are_judged_take_the_other_transform() -> None:
    given = Prepare(transform=lambda row: {"x": 1.0}, eval_transform=lambda row: {"x": 2.0})

    assert prepared(given, "x", trains=False).features["x"].tolist() == [2.0] * 3
    assert prepared(given, "x").features["x"].tolist() == [1.0] * 3


def fails(row: Any) -> Any:
    if row["x"][0] > 1:
        raise LookupError("no such word")
    return row


class Mute(Exception):
    def __str__(self) -> str:
        return "mute"


def mutters(row: Any) -> Any:
    raise Mute


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (
            Prepare(transform=fails),
            LookupError,
            "no such word .in transform, row 101, columns 'x', 'y', worker 3",
        ),
        (Prepare(transform=mutters), DataError, "Mute: mute .in transform, row 100"),
        (
            Prepare(transform=batched(lambda given: 1 / 0)),
            ZeroDivisionError,
            "in transform, row 100 to 102",
        ),
        (Prepare(collate=lambda rows: 1 / 0), ZeroDivisionError, "in collate, row 100 to 102"),
        (
            Prepare(transform=lambda row: [1]),
            ConfigError,
            "returned a list for row 100; .*dict of columns",
        ),
        (Prepare(transform=lambda row: {}), ConfigError, "an empty dict"),
        (Prepare(transform=lambda row: {"y": 1}), ConfigError, "returned no features"),
        (
            Prepare(transform=lambda row: {"a" if row["y"] else "b": 1}),
            ConfigError,
            r"\['a'\] for row 101 and \['b'\] for row 100",
        ),
        (
            Prepare(transform=lambda row: {"x": np.zeros(int(row["y"]) + 1)}),
            DataError,
            r"column 'x', row 101: has shape \(2,\) where row 100 of the same batch has \(1,\)",
        ),
        (Prepare(transform=lambda row: {"x": float("nan")}), DataError, "column 'x', row 100: is NaN"),
        (Prepare(transform=lambda row: {"x": "a"}), DataError, "column 'x', row 100: is still text or bytes"),
        (Prepare(collate=lambda rows: {"x": [1.0]}), ConfigError, "1 rows of 'x' for a batch of 3 rows"),
        (Prepare(transform=batched(lambda given: {"x": 1})), ConfigError, "a single value of 'x'"),
    ],
)
def test_what_goes_wrong_is_said_with_row_columns_and_worker(
    given: Prepare, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"(?s){message}"):
        prepared(given, "x")


def test_a_row_that_is_too_long_is_named() -> None:
    with pytest.raises(DataError, match="column 'tokens', row 102: has 3 values, more than pad=2"):
        prepared(Prepare(pad=2), "tokens")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"transform": 3}, "transform must be a function"),
        ({"pad": "row"}, "pad must be 'batch' or a length"),
        ({"pad": {"x": 0}}, r"pad\['x'\] must be"),
        ({"pad": True}, "pad must be"),
        ({"pad": 3, "collate": print}, "pass one of them"),
        ({"length_col": 3}, "must be the name of a column"),
    ],
)
def test_options_that_cannot_work_are_refused(given: Any, message: str) -> None:
    import re

    assert re.search(message, " ".join(Prepare(**given).complaints()))
