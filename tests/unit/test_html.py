"""Tables for notebooks: every text is escaped, and long ones are cut."""

from __future__ import annotations

from kindler.html import card, shown, table
from kindler.train.history import History


def test_texts_of_users_are_escaped() -> None:
    evil = "<script>alert(1)</script>"
    for text in (table([{evil: evil}], caption=evil), card(evil, {evil: evil})):
        assert "<script>" not in text
        assert "&lt;script&gt;" in text


def test_of_many_rows_the_first_and_the_last_are_shown() -> None:
    text = table([{"epoch": number} for number in range(1, 1001)])
    assert "<td>1</td>" in text
    assert "<td>1,000</td>" in text
    assert "… 970 more …" in text
    assert text.count("<tr>") == 32


def test_values_are_short() -> None:
    assert shown("x" * 500).endswith("…")
    assert len(shown("x" * 500)) == 120
    assert shown({"lr": 0.1, "curve": [1, 2]}) == "lr=0.1, curve=[2 values]"


def test_a_history_shows_its_epochs_and_what_some_of_them_lack() -> None:
    text = History([{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25, "val_loss": 1.0}])._repr_html_()
    assert "<th>val_loss</th>" in text
    assert "<td>0.25</td>" in text
    assert "no epochs" in History()._repr_html_()
