from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kindler.engine import fork_server
from kindler.engine.gang import Gang, Listener, follow
from kindler.engine.hub import Hub
from kindler.engine.job import Job
from kindler.engine.outcome import Outcome
from kindler.engine.placement import usable_cores
from kindler.engine.supervisor import AbortedError, Supervisor
from kindler.errors import TrainingError
from kindler.frame import ChannelClosed
from kindler.temporary import Folder


def slots() -> int:
    return usable_cores()


def start(job: Job, *, base: Path | None = None) -> Gang:
    gang = Gang(job, _LocalLaunch(job, base))
    gang.start()
    return gang


def run(job: Job, *, listener: Listener, base: Path | None = None) -> list[Outcome]:
    """Run `job` on this machine; `listener` is called on this thread."""
    return follow(Gang(job, _LocalLaunch(job, base)), listener)


class _LocalLaunch:
    after_first = False

    def __init__(self, job: Job, base: Path | None) -> None:
        self._job = job
        self._base = base
        self._threads: list[threading.Thread] = []
        self._outcomes: list[Outcome] = []

    def open(self, stack: ExitStack) -> Hub:
        job = self._job
        hub = stack.enter_context(Hub(job))
        for rank in range(job.size):
            thread = threading.Thread(
                target=self._supervise, args=(rank, hub), name=f"kindler-supervisor-{rank}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return hub

    def _supervise(self, rank: int, hub: Hub) -> None:
        job = self._job
        attempt, last = 0, job.settings.max_failures
        with ExitStack() as stack:
            # A process that takes another's place finds the files of the one before.
            regroups = job.regroups > 0 and rank < job.crew
            folder = Folder(f"kindler-{job.run_id}-{rank}-", self._base) if regroups else None
            if folder is not None:
                stack.enter_context(folder)
            while True:
                try:
                    with Supervisor(
                        job,
                        rank,
                        hub=hub.address,
                        owner=os.getpid(),
                        base=self._base,
                        attempt=attempt,
                        folder=folder,
                    ) as supervisor:
                        supervisor.start()
                        outcome = supervisor.run()
                        died = supervisor.needs_another(outcome)
                except (AbortedError, ChannelClosed):
                    return  # the run is over
                if not died or attempt == last:
                    break
                attempt += 1
        self._outcomes.append(outcome)
        if died:
            hub.give_up(rank, {"host": "this machine", "reason": "it gave no sign of life", **outcome.fields})

    def is_queued(self) -> bool:
        return False

    def is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def end(self) -> None:
        for thread in self._threads:
            thread.join(2 * self._job.settings.stop_timeout_s)

    def outcomes(self, hub: Hub | None) -> list[Outcome]:
        return self._outcomes

    def incomplete(self, outcomes: Sequence[Outcome], *, started: bool) -> BaseException:
        return TrainingError(f"the run ended with {len(outcomes)} results of {self._job.size} workers.")

    def clean_up(self) -> None:
        if self._job.settings.idle_s == 0:
            fork_server.retire()
