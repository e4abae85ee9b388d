"""The ranks that run beside the others: a thread of the process where ranks meet supervises each of them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

from kindler.engine.channel import Address, ChannelClosed
from kindler.engine.job import Job
from kindler.engine.outcome import Outcome
from kindler.engine.supervisor import Aborted, Supervisor


class BesideRanks:
    """Starts those ranks at the beginning of a `with` block, and waits at its end until they are stopped.

    Args:
        job: What the gang does.
        hub: The meeting point.
        base: Where scratch folders are made.
        owner: The process that their fork server must not outlive; None is this one.
        far: As for `Supervisor`.

    Attributes:
        outcomes: How they ended, of those that have.
    """

    def __init__(
        self,
        job: Job,
        hub: Address,
        *,
        base: Path | None = None,
        owner: int | None = None,
        far: bool = False,
    ) -> None:
        self._job, self._hub, self._base = job, hub, base
        self._owner, self._far = owner or os.getpid(), far
        self._threads = [
            threading.Thread(
                target=self._supervise, args=(rank,), name=f"kindler-supervisor-{rank}", daemon=True
            )
            for rank in range(job.crew, job.size)
        ]
        self.outcomes: list[Outcome] = []

    def __enter__(self) -> BesideRanks:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.join(2 * self._job.settings.stop_timeout_s)

    def _supervise(self, rank: int) -> None:
        try:
            with Supervisor(
                self._job,
                rank,
                hub=self._hub,
                owner=self._owner,
                base=self._base,
                far=self._far,
            ) as supervisor:
                supervisor.start()
                self.outcomes.append(supervisor.run())
        except (Aborted, ChannelClosed):
            pass  # the run was over before it came
