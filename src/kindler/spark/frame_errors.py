"""What went wrong inside the user's frame, in a line instead of pages of a JVM's stack."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import dropwhile

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from kindler.errors import DataError
from kindler.spark.row_packing import does_not_fit
from kindler.spark.sent_tasks import TASK_ERROR
from kindler.spark.versions import condition_of

_TRACEBACK = "Traceback (most recent call last):"
_END = re.compile(r"\n\s*(JVM stacktrace:|Driver stacktrace:|at [\w.$]+\(|SQLSTATE: )")
_CLASS = re.compile(r"^[\w.$]+(Exception|Error)\S*: ")
_BEGINNING = re.compile(r"thrown from the Python worker(?::|\. Please see the stack trace below\.)")
_NOT_THE_FRAMES = ("SPARK_JOB_CANCELLED", "OPERATION_CANCELED", "INTERNAL_ERROR")
_MOST = 500


def frame_error(error: BaseException, frames: Sequence[tuple[DataFrame, Sequence[str]]]) -> BaseException:
    """A DataError that says why Spark could not compute a frame; `error` itself where that is not the matter.

    Args:
        error: What Spark raised.
        frames: The frames that were computed, and which columns of each.
    """
    if not isinstance(error, PySparkException | Py4JJavaError):
        return error
    text = str(error)
    if (unfit := does_not_fit(text, frames)) is not None:
        return unfit
    if (told := of_task(text)) is not None:
        return DataError(told)
    if _TRACEBACK in text:
        return DataError(_of_python(text))
    condition = condition_of(error) if isinstance(error, PySparkException) else None
    known = condition is not None and condition not in _NOT_THE_FRAMES
    if not known and "\nCaused by: " not in text:
        return error
    column = _assembled(frames) if "VectorAssembler" in text else None
    what = "Spark cannot compute the frame" if column is None else "Spark cannot compute it"
    return DataError(f"{what}: {_reason(text)}", column=column)


def of_task(text: str) -> str | None:
    """What a task of ours says in an error of Spark's; None where none does."""
    before, marker, after = text.partition(f"\n\n{TASK_ERROR}")
    if not marker:
        return None
    before = _BEGINNING.split(before)[-1].lstrip()
    lines = before.rpartition(_TRACEBACK)[2].splitlines()  # Spark 3.5 has one before
    said = dropwhile(lambda line: not line or line.startswith(" "), lines)
    return "\n".join(said) + marker + _END.split(after, maxsplit=1)[0].rstrip()


def _of_python(text: str) -> str:
    """The exception of a Python function of the user's, and the places in the user's own code."""
    lines = text.rpartition(_TRACEBACK)[2].splitlines()
    last = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    places: list[str] = []
    for line in lines[:last]:
        if line.startswith("  File "):
            places.append(line)
        elif places and line.strip(" ^~"):
            places[-1] += f"\n{line}"
    own = [place for place in places if "/pyspark/" not in place.partition("\n")[0]]
    raised = lines[last] if last < len(lines) else "an exception without a name"
    return "\n".join([raised, "", "raised by code of the frame, while Spark computed it:", *own])


def _reason(text: str) -> str:
    told = _END.split(text.rpartition("\nCaused by: ")[2], maxsplit=1)[0]
    told = told.rpartition("failed due to: ")[2]
    told = _CLASS.sub("", re.sub(r"\s+", " ", told).strip())
    return re.sub(r"[. ]*SQLSTATE: \w+.*$", ".", told)[:_MOST]


def _assembled(frames: Sequence[tuple[DataFrame, Sequence[str]]]) -> str | None:
    """The one column of vectors; None where there are several, and any of them may be the one."""
    errors = {
        name
        for frame, names in frames
        for name in names
        if type(frame.schema[name].dataType).__name__ == "VectorUDT"
    }
    return errors.pop() if len(errors) == 1 else None
