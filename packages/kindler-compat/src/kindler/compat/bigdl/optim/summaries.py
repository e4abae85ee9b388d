"""BigDL's summaries: event files for TensorBoard, and their values as arrays.

`TrainSummary` writes to `<log_dir>/<app_name>/train`, `ValidationSummary` to
`<log_dir>/<app_name>/validation`. `Recorder` translates the reports of a run to BigDL's tags.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kindler.compat.bigdl.optim.triggers import Trigger
from kindler.compat.bigdl.optim.validation import tag_of
from kindler.errors import ConfigError
from kindler.estimator.run import RunObserver
from kindler.train.summaries import BATCH_LOSS, EventFiles, Summaries, log_folder
from kindler.train.triggers import Progress

__all__ = ["Recorder", "Summary", "TrainSummary", "ValidationSummary"]

_TRAIN_TAGS = ("Loss", "LearningRate", "Throughput", "Parameters")
_TAGS = {BATCH_LOSS: "Loss", "lr": "LearningRate"}
_HEAD, _CHECKSUM = struct.Struct("<QI"), 4


class Summary:
    """Values of a run by tag, written to event files in the folder `app_name` of `log_dir` as it trains."""

    part: str

    def __init__(self, log_dir: str, app_name: str, bigdl_type: str = "float") -> None:
        self.log_dir, self.app_name = log_dir, app_name
        self.folder = log_folder(log_dir) / app_name
        self.triggers: dict[str, Trigger] = {}

    def read_scalar(self, tag: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The values of a tag as rows of (step, value, wall time), in the order of steps.

        Args:
            tag: "Loss", "LearningRate" or "Throughput"; for validation, a metric such as "Top1Accuracy".
        """
        points: list[tuple[int, float, float]] = []
        for event in _events(self.folder / self.part):
            if event.HasField("session_log"):  # training went back to this step
                points = [point for point in points if point[0] < event.step]
            for value in event.summary.value:
                if value.tag == tag:
                    points.append((event.step, value.simple_value, event.wall_time))
        return np.array(points, dtype=np.float64).reshape(-1, 3)


class TrainSummary(Summary):
    """Loss, learning rate and throughput (rows per second) of every iteration."""

    part = "train"

    def set_summary_trigger(self, name: str, trigger: Trigger) -> TrainSummary:
        """Write a tag only when a trigger fires.

        Args:
            name: "Loss", "LearningRate" or "Throughput". "Parameters" is accepted, but never written.
            trigger: Such as `SeveralIteration(10)`.
        """
        if name not in _TRAIN_TAGS:
            raise ConfigError(
                f"set_summary_trigger: there is no tag {name!r}; there are {', '.join(_TRAIN_TAGS)}."
            )
        if not isinstance(trigger, Trigger):
            raise ConfigError(f"set_summary_trigger({name!r}, ...) takes a trigger; received {trigger!r}.")
        self.triggers[name] = trigger
        return self


class ValidationSummary(Summary):
    """The metrics of every validation, under BigDL's names: "Top1Accuracy", "Loss" and so on."""

    part = "validation"


class Recorder(RunObserver):
    """Writes what workers report to the summaries of a run, where there are any."""

    def __init__(self, train: Summary | None, validation: Summary | None) -> None:
        self._summaries = {"train": train, "validation": validation}
        self._boards: dict[str, EventFiles] = {}
        self._rows: dict[int, float] = {}
        self._done: list[int] = []
        self._began, self._counted = 0.0, 0.0
        self._epoch = 1

    def __enter__(self) -> None:
        self._began = time.time()
        self._merged = Summaries()
        with ExitStack() as stack:
            for part, summary in self._summaries.items():
                if summary is not None:
                    self._boards[part] = stack.enter_context(EventFiles(summary.folder))
            stack.enter_context(self._merged.writing(self))
            self._open = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self._open.close()
        self._boards.clear()

    def hear(self, fields: Mapping[str, Any]) -> None:
        if fields["name"] == "steps":
            for place, rows in enumerate(fields["rows"]):
                number = fields["first"] + place
                self._rows[number] = self._rows.get(number, 0.0) + rows
        if fields["name"] == "epoch":
            self._epoch = int(fields["row"].get("epoch", self._epoch))
        self._merged.report(fields)
        self._write_throughput()
        if fields["name"] in ("gang", "epoch"):
            self._began, self._counted = time.time(), 0.0

    def finish(self, rows: list[dict[str, Any]]) -> None:
        self._merged.finish(rows)
        self._write_throughput()

    def add(self, part: str, tag: str, value: float, step: int, wall_time: float) -> None:
        """A value of the run, under Kindler's name."""
        if part == "train" and tag == BATCH_LOSS:
            self._done.append(step)
        name = _TAGS.get(tag) if part == "train" else tag_of(tag)
        if name is not None:
            self._write(part, name, value, step, wall_time)

    def rewind(self, step: int) -> None:
        for board in self._boards.values():
            board.rewind(step)

    def flush(self) -> None:
        for board in self._boards.values():
            board.flush()

    def _write(self, part: str, tag: str, value: float, step: int, wall_time: float) -> None:
        summary, board = self._summaries[part], self._boards.get(part)
        if summary is None or board is None:
            return
        trigger = summary.triggers.get(tag) if part == "train" else None
        if trigger is None or trigger(Progress(epoch=self._epoch, step=step)):
            board.add(part, tag, value, step, wall_time)

    def _write_throughput(self) -> None:
        """Rows per second of the epoch so far: steps are reported several at a time, when they are over."""
        now = time.time()
        self._counted += sum(self._rows.pop(step, 0.0) for step in self._done)
        for step in self._done:
            self._write("train", "Throughput", self._counted / max(now - self._began, 1e-9), step, now)
        self._done = []


def _events(folder: Path) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event

    for path in sorted(folder.glob("events.out.tfevents.*")):
        with path.open("rb") as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                (length, _) = _HEAD.unpack(head)
                data = file.read(length)
                if len(data) < length:  # the end is still being written
                    break
                file.read(_CHECKSUM)
                yield Event.FromString(data)
