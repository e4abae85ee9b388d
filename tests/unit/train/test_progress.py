"""What the driver shows while a run goes on."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest

from kindler.train.progress import ProgressBar, remaining, shares
from tests.piped import piped_stdout

ROW = {
    "epoch": 1,
    "steps": 40,
    "num_samples": 4000,
    "loss": 0.5,
    "accuracy": 0.875,
    "val_loss": 0.625,
    "val_num_samples": 100,
    "seconds": 20.0,
    "rows_per_s": 200.0,
}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def progress(step: int, **fields: Any) -> dict[str, Any]:
    told = {"name": "progress", "epoch": 1, "epochs": 3, "step": step, "steps": 40, "loss": None}
    return {**told, "metrics": {}, "rows": 100 * step, "seconds": step / 2, **fields}


def shown(stream: io.StringIO) -> list[str]:
    """The states of the line, without the padding that wipes the one before."""
    return [part.rstrip() for part in stream.getvalue().replace("\n", "\r").split("\r") if part.strip()]


def test_a_terminal_shows_figures_speed_shares_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    with ProgressBar(verbose=1, stream=stream, clock=lambda: 0.0) as line:
        line.report(progress(0))
        line.report(progress(10, loss=0.75, metrics={"accuracy": 0.5}, data_s=0.15, sync_s=0.6, rows=1000))

        assert shown(stream)[-1] == (
            "epoch 1 of 3:  25%|███         | 10/40 steps, 5.0 s, 00:15 left (00:55 of the run) · loss 0.75"
            " · accuracy 0.5 · 200 rows/s · data 3% · compute 85% · sync 12%"
        )


@pytest.mark.parametrize("columns", [40, 61, 80, 92, 119, 120])
def test_a_narrow_terminal_shows_whole_parts(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "20")
    stream = Terminal()
    with ProgressBar(verbose=1, stream=stream, clock=lambda: 0.0) as line:
        line.report(progress(0))
        line.report({"name": "epoch", "row": ROW})

    parts = shown(stream)[-1].partition("steps, ")[2].split(" · ")
    whole = ["00:20", "loss 0.5", "accuracy 0.875", "val_loss 0.625", "200 rows/s"]
    assert parts == whole[: len(parts)] or columns == 40  # too narrow even for the first part


def test_the_last_line_of_an_epoch_has_the_figures_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    with ProgressBar(verbose=1, stream=stream, clock=lambda: 0.0) as line:
        line.report(progress(0))
        line.report(progress(20, loss=0.9, data_s=1.0, sync_s=2.0))
        line.report({"name": "epoch", "row": ROW, "step": 40})

    assert shown(stream)[-1] == (
        "epoch 1 of 3: 100%|████████████| 40/40 steps, 00:20 · loss 0.5 · accuracy 0.875 · val_loss 0.625"
        " · 200 rows/s · data 10% · compute 70% · sync 20%"
    )


def test_a_file_gets_one_plain_line_per_epoch() -> None:
    stream = io.StringIO()
    with ProgressBar(verbose=1, stream=stream) as line:
        line.report({"name": "gang", "workers": 2})
        for epoch in (1, 2):
            line.report(progress(0, epoch=epoch))
            line.report(progress(20, epoch=epoch, loss=0.9, data_s=1.0, sync_s=2.0))
            line.report({"name": "epoch", "row": {**ROW, "epoch": epoch}})

    said = "40 steps in 00:20 · loss 0.5 · accuracy 0.875 · val_loss 0.625 · 200 rows/s"
    assert stream.getvalue() == "".join(
        f"epoch {epoch} of 3: {said} · data 10% · compute 70% · sync 20%\n" for epoch in (1, 2)
    )


def test_reports_that_lack_most_fields_are_shown_as_far_as_they_go() -> None:
    stream, terminal = io.StringIO(), Terminal()
    for where in (stream, terminal):
        with ProgressBar(verbose=1, stream=where) as line:
            line.report({"name": "progress", "epoch": 1, "step": 3, "steps": 4})
            line.report({"name": "epoch", "row": {"epoch": 1, "loss": 0.5}})

    assert stream.getvalue() == "epoch 1: 0 steps in 0.0 s · loss 0.5\n"
    assert shown(terminal)[-1].startswith("epoch 1: 100%")


def test_a_pass_of_another_kind_ends_with_a_full_bar() -> None:
    stream = Terminal()
    with ProgressBar(verbose=1, what="evaluate", stream=stream) as line:
        line.report(progress(20, epochs=1))

    assert shown(stream)[-1].startswith("evaluate: 100%|████████████| 40/40 steps")


def test_verbose_0_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for stream in (io.StringIO(), Terminal()):
        with ProgressBar(verbose=0, stream=stream) as line:
            line.log(0, "hello")
            line.report(progress(10, loss=0.5))
            line.report({"name": "epoch", "row": ROW})
        assert stream.getvalue() == ""

    assert "".join(capfd.readouterr()) == ""


def test_what_is_left_of_the_run_counts_later_epochs_by_how_long_the_last_one_took() -> None:
    fields = progress(10)

    assert remaining(fields) == (15.0, 15.0 + 2 * 20.0)
    assert remaining(fields, epoch_s=30.0) == (15.0, 15.0 + 2 * 30.0)


def test_what_is_left_of_an_epoch_that_went_on_counts_from_there() -> None:
    assert remaining(progress(30, seconds=5.0), first_step=20)[0] == 5.0


def test_nothing_is_promised_before_the_first_step() -> None:
    assert remaining(progress(0)) == (None, None)
    assert shares({"seconds": 0.0, "data_s": 0.0, "sync_s": 0.0}) is None


def test_a_pass_that_counts_rows_shows_their_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream, seconds = Terminal(), iter([0.0, 0.0, 0.0, 4.0])
    with ProgressBar(
        verbose=1, what="predict", unit="rows", stream=stream, clock=lambda: next(seconds)
    ) as line:
        for step in (0, 400):
            line.report({"name": "progress", "epoch": 1, "step": step, "steps": 1000})

        assert shown(stream)[-1].endswith("| 400/1000 rows, 4.0 s, 6.0 s left · 100 rows/s")


def test_an_epoch_whose_steps_nobody_knows_is_counted_and_ends_where_it_ends() -> None:
    stream = Terminal()

    with ProgressBar(verbose=1, stream=stream) as bar:
        bar.report(progress(0, steps=None))
        bar.report(progress(10, steps=None))
        bar.report({"name": "epoch", "row": ROW})

    assert any("10/? steps" in line for line in shown(stream))
    assert "40/? steps" in shown(stream)[-1]
    assert remaining(progress(10, steps=None)) == (None, None)


def test_epochs_count_on_after_a_second_fit_and_fits_in_threads_carry_their_names() -> None:
    stream = io.StringIO()

    def fit() -> None:
        with ProgressBar(verbose=1, stream=stream) as line:
            line.report(progress(0, epoch=4, epochs=2003))
            line.report({"name": "epoch", "row": {**ROW, "epoch": 4}, "step": 40})

    thread = threading.Thread(target=fit, name="left")
    thread.start()
    thread.join()
    fit()

    assert [text.partition(":  ")[0].partition(": 40")[0] for text in stream.getvalue().splitlines()] == [
        "left: epoch 4 of 2,003",
        "epoch 4 of 2,003",
    ]


def test_a_pipe_gets_every_line_at_once_and_whole() -> None:
    with piped_stdout() as pieces, ProgressBar(verbose=1) as line:
        line.log(0, "first")
        line.note("second")
        assert pieces == ["[worker 0] first\n", "second\n"]


def test_an_epoch_that_an_interrupt_ended_is_not_shown_as_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    with ProgressBar(verbose=1, stream=stream, clock=lambda: 0.0) as line:
        line.report(progress(10))
        line.report({"name": "epoch", "row": {**ROW, "steps": 12}, "whole": False})

    assert "| 12/40 steps" in shown(stream)[-1]


def test_an_epoch_without_steps_before_an_interrupt_stays_at_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    with ProgressBar(verbose=1, stream=stream, clock=lambda: 0.0) as line:
        line.report(progress(0))

    assert "| 0/40 steps" in shown(stream)[-1]


def test_the_last_line_of_an_evaluation_has_the_figures_of_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    with ProgressBar(verbose=1, what="evaluate", stream=stream, clock=lambda: 0.0) as line:
        line.report(progress(30, loss=9.0))
        line.result({"loss": 0.25, "accuracy": 0.5, "num_samples": 4000})

    assert shown(stream)[-1].endswith("40/40 steps, loss 0.25 · accuracy 0.5")
