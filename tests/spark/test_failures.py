"""What happens when a run goes wrong on Spark: the user's error, no JVM stack, and nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kindler import Estimator, RunSettings
from kindler.callbacks import Callback
from kindler.errors import ConfigError, DataError, WorkerError, WorkerLostError
from tests.conftest import eventually_none, fork_servers, workers
from tests.whole import whole_only

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]

SCHEMA = "features array<float>, label float"


def frame(partitioned: Callable[..., Any], rows: int = 64) -> Any:
    values = [([i / rows, 1.0], i / rows) for i in range(rows)]
    return partitioned([values[: rows // 3], values[rows // 3 :]], SCHEMA)


def regression(**options: Any) -> Estimator:
    model = nn.Linear(2, 1)
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        loss=nn.MSELoss(),
        **{"workers": 2, **options},
    )


class AtStepThree(Callback):
    """Fails on rank 1 after its third step."""

    def __init__(self, *, die: bool = False) -> None:
        self.die = die

    def on_step_end(self, run: Any) -> None:
        if run.rank == 1 and run.step == 3:
            print("rank one is at step three", flush=True)  # noqa: T201
            if self.die:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("boom")


def test_the_users_own_exception_comes_first_and_no_jvm_stack(
    partitioned: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    est = regression()
    data = frame(partitioned)
    capfd.readouterr()

    with pytest.raises(ValueError, match="^boom") as caught:
        est.fit(data, epochs=2, batch_size=8, callbacks=[AtStepThree()], verbose=0)

    assert isinstance(caught.value, WorkerError)
    assert (caught.value.rank, caught.value.host) == (1, os.uname().nodename)
    assert 'raise ValueError("boom")' in str(caught.value)
    assert not eventually_none(workers)
    warm = {process.pid for process in fork_servers()}
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""

    assert est.fit(data, epochs=1, batch_size=8, verbose=0)["num_samples"] == [64], "the next fit works"
    assert {process.pid for process in fork_servers()} == warm, "and starts as fast as after a good one"


def test_a_killed_worker_is_reported_lost_with_its_last_lines(partitioned: Callable[..., Any]) -> None:
    with pytest.raises(WorkerLostError, match="worker 1 .*SIGKILL") as caught:
        regression(settings=RunSettings(max_failures=0)).fit(
            frame(partitioned), epochs=2, batch_size=8, callbacks=[AtStepThree(die=True)], verbose=0
        )

    assert (caught.value.rank, caught.value.exit_code) == (1, -9)
    assert "rank one is at step three" in str(caught.value)


def test_more_workers_than_slots_is_answered_with_both_numbers(partitioned: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="workers=9 but .* 4 tasks side by side"):
        regression(workers=9).fit(frame(partitioned))


def test_workers_default_to_the_slots_of_the_application(
    tmp_path: Path, partitioned: Callable[..., Any]
) -> None:
    class Size(Callback):
        def on_run_begin(self, run: Any) -> None:
            Path(str(tmp_path), "size").write_text(str(run.size))

    regression(workers=None).fit(frame(partitioned), batch_size=16, callbacks=[Size()], verbose=0)

    assert (tmp_path / "size").read_text() == "4"


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        # Without Spark, tests/unit/data/test_columns.py has all of them.
        pytest.param((None, 1.0), "null", marks=whole_only),
        pytest.param(([1.0, None], 1.0), "null", marks=whole_only),
        (([1.0, float("nan")], 1.0), "NaN"),
        pytest.param(([1.0, 2.0, 3.0], 1.0), "3", marks=whole_only),
        (([1.0, 2.0], None), "null"),
    ],
)
def test_a_bad_row_is_named_by_column_row_and_partition(
    partitioned: Callable[..., Any], bad: tuple[Any, ...], problem: str
) -> None:
    good = ([0.5, 0.5], 1.0)
    column = "label" if bad[1] is None else "features"

    with pytest.raises(DataError, match=f"^column '{column}', row 2 of partition 1: .*{problem}") as caught:
        regression().fit(partitioned([[good] * 5, [good, good, bad, good]], SCHEMA), verbose=0)

    assert (caught.value.column, caught.value.row) == (column, "2 of partition 1")


def test_a_string_column_is_refused_before_anything_starts(spark: Any) -> None:
    words = spark.createDataFrame([("a", 1.0)], "features string, label float")

    with pytest.raises(DataError, match=r"column 'features'.*string"):
        regression().fit(words)


def test_an_error_of_the_frame_itself_is_told_in_sparks_own_words(spark: Any) -> None:
    broken = spark.range(4).selectExpr(
        "array(cast(raise_error('bad source') as float)) AS features", "1.0f AS label"
    )

    with pytest.raises(DataError, match=r"Spark cannot compute the frame: .*bad source"):
        regression().fit(broken, verbose=0)


def test_the_sessions_own_settings_come_back_after_a_fit(spark: Any, partitioned: Callable[..., Any]) -> None:
    key = "spark.sql.execution.arrow.maxBytesPerBatch"
    before = spark.conf.get(key)

    regression().fit(frame(partitioned), batch_size=16, verbose=0)

    assert spark.conf.get(key) == before


def test_an_empty_frame_is_a_data_error(spark: Any) -> None:
    empty = spark.createDataFrame([], SCHEMA)

    with pytest.raises(DataError, match="no rows"):
        regression().fit(empty, verbose=0)


def test_a_column_with_a_dot_in_its_name_is_found(partitioned: Callable[..., Any]) -> None:
    data = frame(partitioned).withColumnRenamed("features", "a.b")

    history = regression().fit(data, batch_size=16, feature_cols="a.b", verbose=0)

    assert history["num_samples"] == [64]
