"""Large buffers between the driver and workers that cannot reach it, through a shared folder. Without one
they travel with the task and its result rows, which Spark carries up to a limit."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kindler.engine.job import Job
from kindler.engine.outcome import Outcome
from kindler.engine.worker import describe
from kindler.errors import ConfigError, TrainingError

_IN_TASK_BYTES = 1 << 20
MOST_BYTES = 64 << 20  # Connect refuses messages of 128 MiB; a JVM of 1 GiB takes several times this
_HINT = (
    "Hint: give the estimator a model_dir that the driver and the workers share, or, where the workers can"
    ' reach the driver, RunSettings(rendezvous="driver").'
)
NO_WAY_BACK = f"can come back in Spark's result rows from workers that cannot reach the driver.\n{_HINT}"


class SharedFolder(Protocol):
    def read(self, name: str, limit: int | None = None) -> bytes: ...
    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None: ...
    def remove(self, name: str) -> None: ...


@dataclass(frozen=True)
class BufferFiles:
    folder: SharedFolder | None
    run_id: str

    def __enter__(self) -> BufferFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.folder is not None:
            for name in (self._job_file, self._result_file):
                self.folder.remove(name)

    def outgoing(self, job: Job) -> Job:
        """On the driver: the job as it travels with the task."""
        size = sum(map(len, job.buffers))
        if size <= _IN_TASK_BYTES:
            return job
        if self.folder is not None:
            self.folder.write(self._job_file, job.buffers)
            return replace(job, buffers=(), sizes=tuple(map(len, job.buffers)))
        if size > MOST_BYTES:
            raise ConfigError(
                f"the model and its state have {size:,} bytes, and {MOST_BYTES:,} can travel with a Spark"
                f" task to workers that cannot reach the driver.\n{_HINT}"
            )
        return job

    def received(self, job: Job) -> Job:
        """On a worker: the job with its buffers."""
        if not job.sizes or self.folder is None:
            return job
        return replace(job, buffers=tuple(_cut(self.folder.read(self._job_file), job.sizes)), sizes=())

    def sent(self, outcome: Outcome) -> Outcome:
        """On a worker: the outcome as it travels in result rows."""
        sizes = [len(buffer) for buffer in outcome.buffers]
        if sum(sizes) <= _IN_TASK_BYTES:
            return outcome
        if self.folder is not None and outcome.rank == 0:
            self.folder.write(self._result_file, outcome.buffers)
            return replace(outcome, buffers=(), fields={**outcome.fields, "sizes": sizes})
        if sum(sizes) > MOST_BYTES:
            error = TrainingError(
                f"the trained state is lost: it has {sum(sizes):,} bytes, and {MOST_BYTES:,} {NO_WAY_BACK}"
            )
            return Outcome(outcome.rank, "error", {**describe(error), "host": socket.gethostname()})
        return outcome

    def incoming(self, outcome: Outcome) -> Outcome:
        """On the driver: the outcome with its buffers."""
        if self.folder is None or "sizes" not in outcome.fields:
            return outcome
        data = self.folder.read(self._result_file)
        return replace(outcome, buffers=tuple(_cut(data, outcome.fields["sizes"])))

    @property
    def _job_file(self) -> str:
        return f"kindler-{self.run_id}.job"

    @property
    def _result_file(self) -> str:
        return f"kindler-{self.run_id}.result"


def _cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    buffers, start = [], 0
    for size in sizes:
        buffers.append(data[start : start + size])
        start += size
    return buffers
