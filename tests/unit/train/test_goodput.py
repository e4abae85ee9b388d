"""Every second of a run belongs to one part."""

from __future__ import annotations

from typing import Any

import pytest

from kindler.train.goodput import Goodput, RunClock, Stopwatch


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float) -> float:
        self.now += seconds
        return self.now


def parts(goodput: Goodput) -> dict[str, float]:
    """The parts that took any time."""
    return {part: pytest.approx(s) for part, s in goodput.seconds.items() if abs(s) > 1e-9}


def epoch(**spent: float) -> dict[str, Any]:
    return {"name": "epoch", "row": {}, "step": 1, "spent": spent}


GANG = {"name": "gang", "workers": 2}


def test_the_share_is_that_of_steps_and_the_line_names_what_is_not_next_to_nothing() -> None:
    goodput = Goodput({"steps": 87.0, "start": 5.0, "ingest": 0.01, "sync": 7.99, "recovery": 0.0})

    assert (goodput.share, goodput.wall_s) == (0.87, 100.0)
    assert str(goodput) == "goodput 87% of 01:40 (start 5.0 s, sync 8.0 s)"


def test_a_run_of_no_time_has_a_share_of_zero() -> None:
    assert (Goodput({}).share, str(Goodput({}))) == (0.0, "goodput 0% of 0.0 s")


def test_a_lap_is_divided_by_what_was_waited_for_within_it() -> None:
    clock, waited = Clock(), {"rows": 5.0, "others": 0.0}
    watch = Stopwatch(clock)
    watch.watch("ingest", lambda: waited["rows"])
    watch.watch("sync", lambda: waited["others"])

    clock.after(2.0)
    watch.lap("start")
    clock.after(10.0)
    waited.update(rows=8.0, others=1.0)
    watch.lap("steps")
    clock.after(1.0)
    with watch.timing("validation"):
        clock.after(4.0)
        waited["others"] = 1.5

    expected = {"start": 2.0, "steps": 6.0, "ingest": 3.0, "sync": 1.5, "other": 1.0, "validation": 3.5}
    assert watch.seconds == expected
    assert sum(watch.seconds.values()) == clock.now - 100.0


def test_waiting_that_is_said_to_be_longer_than_its_lap_takes_no_more_than_that() -> None:
    clock, waited = Clock(), [0.0]
    watch = Stopwatch(clock)
    watch.watch("ingest", lambda: waited[0])

    clock.after(1.0)
    waited[0] = 3.0
    watch.lap("steps")
    clock.after(1.0)
    watch.lap("steps")

    assert watch.seconds == {"ingest": 1.0, "steps": 1.0}


def test_a_worker_that_continues_from_a_checkpoint_has_its_time_and_was_recovering_until_then() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    clock.after(3.0)
    watch.lap("start")
    clock.after(1.0)
    watch.resume({"steps": 20.0, "start": 2.0, "recovery": 0.5})
    clock.after(5.0)
    watch.lap("steps")

    assert watch.seconds == {"steps": 25.0, "start": 2.0, "recovery": 4.5}


def test_what_workers_do_not_see_is_the_start_and_after_their_last_report_the_end() -> None:
    clock = Clock()
    run = RunClock(clock)
    run.launch()
    clock.after(4.0)
    run.hear(GANG)
    clock.after(11.0)  # 10 of which the worker saw
    so_far = run.hear(epoch(start=1.0, steps=9.0))["goodput"]
    clock.after(3.0)  # 1 of which the worker saw

    assert parts(so_far) == {"start": 6.0, "steps": 9.0}
    total = run.goodput({"start": 1.0, "steps": 9.0, "other": 1.0})
    assert parts(total) == {"start": 6.0, "steps": 9.0, "other": 3.0}
    assert total.wall_s == pytest.approx(18.0)


def test_without_any_report_what_workers_do_not_see_is_the_start() -> None:
    clock = Clock()
    run = RunClock(clock)
    run.launch()
    clock.after(12.0)

    assert parts(run.goodput({"steps": 9.0, "ingest": 1.0})) == {"start": 2.0, "ingest": 1.0, "steps": 9.0}


def test_rows_that_the_driver_reads_or_spark_computes_before_the_workers_start_are_ingest() -> None:
    clock = Clock()
    run = RunClock(clock)
    with run.ingest():
        clock.after(2.0)
    run.launch()
    clock.after(1.0)
    run.hear({"name": "ingest", "stage": "computed"})
    clock.after(3.0)
    run.hear({"name": "ingest", "stage": "computed"})
    clock.after(4.0)
    run.hear(GANG)
    clock.after(5.0)

    assert parts(run.goodput({"steps": 5.0})) == {"ingest": 9.0, "start": 1.0, "steps": 5.0}


@pytest.mark.parametrize("before_the_loss", [[], [epoch(start=1.0, steps=6.0)]])
def test_what_was_lost_with_a_worker_is_recovery(before_the_loss: list[dict[str, Any]]) -> None:
    clock = Clock()
    run = RunClock(clock)
    run.launch()
    clock.after(2.0)
    run.hear(GANG)
    clock.after(7.0)
    for report in before_the_loss:
        run.hear(report)
    clock.after(20.0)  # a worker is lost; 5 seconds of these are in the checkpoint
    run.launch()
    clock.after(3.0)
    run.hear(GANG)
    clock.after(4.0)

    # The worker's own: 1 of start, 11 of steps when the checkpoint was written; then 1.5 to begin again.
    spent = {"start": 1.0, "steps": 11.0 + 2.5, "recovery": 1.5}
    expected = {"start": 3.0, "steps": 13.5, "recovery": 36.0 - 3.0 - 13.5}
    assert parts(run.goodput(spent)) == expected


def test_a_worker_that_is_replaced_makes_what_nobody_saw_recovery() -> None:
    clock = Clock()
    run = RunClock(clock)
    run.launch()
    clock.after(2.0)
    run.hear(GANG)
    clock.after(8.0)
    run.hear({"name": "replaced", "worker": 0})
    clock.after(5.0)

    assert parts(run.goodput({"steps": 10.0})) == {"start": 2.0, "steps": 10.0, "recovery": 3.0}
