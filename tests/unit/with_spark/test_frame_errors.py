"""What a task of ours says, out of the texts that versions of Spark make of it."""

from __future__ import annotations

import pytest

from kindler.spark.frames import lost_prepared_rows, of_task, was_cancelled

pytestmark = pytest.mark.spark

SAID = (
    "ValueError: bad\nrow\n\nraised in a task of Spark (partition 1) on host h:\n"
    '  File "/proj/helper.py", line 7, in transform\n    raise ValueError'
)
OURS = 'Traceback (most recent call last):\n  File "/k/sent_tasks.py", line 9, in __call__\n    raise\n'


@pytest.mark.parametrize(
    "text",
    [
        f"An exception was thrown from the Python worker:\n{SAID}",
        f"[PYTHON_EXCEPTION] An exception was thrown from the Python worker: {SAID}\n SQLSTATE: 38000",
        f"An exception was thrown from the Python worker. Please see the stack trace below.\n{OURS}{SAID}\n",
        f"Job aborted: org.apache.PythonException: {OURS}{SAID}\n\n\tat org.apache.spark.api.R(R.scala:5)\n",
    ],
    ids=["4.1", "4.0", "3.5", "Java"],
)
def test_the_users_exception_and_its_place_are_all_that_is_left(text: str) -> None:
    assert of_task(text) == SAID


def test_errors_of_others_are_not_ours() -> None:
    assert of_task("An exception was thrown from the Python worker:\nValueError: bad") is None


@pytest.mark.parametrize(
    ("reason", "lost"),
    [
        ("org.apache.spark.shuffle.MetadataFetchFailedException: Missing an output location for 0", True),
        ("org.apache.spark.shuffle.FetchFailedException", True),
        ("Stage failed because barrier task ResultTask(3, 0) finished unsuccessfully.\nValueError: 3", False),
    ],
)
def test_rows_that_went_with_a_machine_can_be_computed_again_and_what_a_task_raised_cannot(
    reason: str, lost: bool
) -> None:
    said = "Job aborted due to stage failure: Could not recover from a failed barrier ResultStage."

    assert lost_prepared_rows(RuntimeError(f"{said} Most recent failure reason: {reason}")) is lost


def test_a_job_that_somebody_cancelled_is_told_from_one_that_failed() -> None:
    assert was_cancelled(RuntimeError("[SPARK_JOB_CANCELLED] Job 3 cancelled part of cancelled job group a"))
    assert was_cancelled(RuntimeError("Job 3 cancelled as part of cancellation of all jobs"))
    assert not was_cancelled(RuntimeError("Job aborted due to stage failure: Task 0 in stage 3.0 failed"))
