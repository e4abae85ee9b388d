"""A row of figures per epoch, as a list, a table and a picture."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kindler.errors import ConfigError
from kindler.train.history import History

ROWS = [
    {"epoch": 1, "steps": 3, "loss": 0.5, "accuracy": 0.7, "val_loss": 0.6, "seconds": 1.0},
    {"epoch": 2, "steps": 3, "loss": 0.25, "accuracy": 0.8, "val_loss": 0.5, "seconds": 1.0},
]


def test_rows_by_number_and_figures_by_name() -> None:
    history = History(ROWS)

    assert (len(history), history[-1], history["loss"], history[0:1]) == (2, ROWS[1], [0.5, 0.25], ROWS[:1])
    assert list(history) == ROWS


def test_an_unknown_figure_is_answered_with_those_there_are() -> None:
    with pytest.raises(KeyError, match="no metric 'auc'.*accuracy"):
        History(ROWS)["auc"]


def test_the_table_has_a_row_per_epoch_and_a_column_per_figure() -> None:
    table = History(ROWS).to_pandas()

    assert table.to_dict("records") == ROWS


def test_the_picture_has_a_panel_per_figure_with_validation_beside_training(tmp_path: Path) -> None:
    figure = History(ROWS).plot(tmp_path / "history.png")

    drawn = {axes.get_title(): [line.get_label() for line in axes.get_lines()] for axes in figure.axes}
    assert drawn == {"loss": ["loss", "val_loss"], "accuracy": ["accuracy"]}
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")


def drawn(history: History) -> dict[str, list[tuple[float, float]]]:
    """The points of each line that are drawn."""
    lines = [line for axes in history.plot().axes for line in axes.get_lines()]
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in line.get_xydata() if not math.isnan(y)]
        for line in lines
    }


def test_a_figure_that_only_some_epochs_have_is_tabulated_and_drawn_through_those() -> None:
    history = History(
        [{"epoch": e, "loss": 1 / e, **({"val_loss": 2.0} if e % 2 == 0 else {})} for e in range(1, 5)]
    )

    assert history["val_loss"] == [None, 2.0, None, 2.0]
    assert history.to_pandas()["val_loss"].isna().tolist() == [True, False, True, False]
    assert drawn(history)["val_loss"] == [(2.0, 2.0), (4.0, 2.0)]


def test_nan_is_tabulated_and_leaves_a_gap() -> None:
    history = History([{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": math.nan}, {"epoch": 3, "loss": 0.25}])

    assert math.isnan(history.to_pandas()["loss"][1])
    assert drawn(history)["loss"] == [(1.0, 0.5), (3.0, 0.25)]


def test_several_fits_are_one_line_over_epochs() -> None:
    history = History([*ROWS, {"epoch": 3, "steps": 3, "loss": 0.1}])

    assert drawn(history)["loss"] == [(1.0, 0.5), (2.0, 0.25), (3.0, 0.1)]


def test_a_new_line_begins_where_training_went_back() -> None:
    history = History([{"epoch": e, "loss": v} for e, v in [(1, 0.5), (2, 0.4), (2, 0.3), (3, 0.2)]])
    (line,) = history.plot().axes[0].get_lines()

    assert [math.isnan(x) for x in line.get_xdata()] == [False, False, True, False, False]


def test_many_figures_are_drawn_in_rows_and_text_is_not() -> None:
    row = {"epoch": 1, "note": "text", **{f"metric_{i}": float(i) for i in range(6)}}

    axes = History([row]).plot().axes

    assert [a.get_title() for a in axes] == [f"metric_{i}" for i in range(6)]


def test_an_empty_history_has_an_empty_table_and_no_picture() -> None:
    assert len(History().to_pandas()) == 0
    with pytest.raises(ConfigError, match="nothing to plot"):
        History().plot()
