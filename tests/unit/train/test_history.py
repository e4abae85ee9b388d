"""A row of figures per epoch, as a list, a table and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    with pytest.raises(KeyError, match="no figure 'auc'.*accuracy"):
        History(ROWS)["auc"]


def test_the_table_has_a_row_per_epoch_and_a_column_per_figure() -> None:
    table = History(ROWS).to_pandas()

    assert table.to_dict("records") == ROWS


def test_the_picture_has_a_panel_per_figure_with_validation_beside_training(tmp_path: Path) -> None:
    figure = History(ROWS).plot(tmp_path / "history.png")

    drawn = {axes.get_title(): [line.get_label() for line in axes.get_lines()] for axes in figure.axes}
    assert drawn == {"loss": ["loss", "val_loss"], "accuracy": ["accuracy"]}
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")
