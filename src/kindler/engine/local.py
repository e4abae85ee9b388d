"""The local engine: workers are child processes of this machine. No JVM, no Spark."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from kindler.engine import fork_server
from kindler.engine.cores import usable_cores
from kindler.engine.hub import Hub
from kindler.engine.monitor import Listener, verdict, watch
from kindler.engine.outcome import Outcome
from kindler.engine.supervisor import Aborted, Job, Supervisor
from kindler.errors import TrainingError

__all__ = ["run", "slots"]


def slots() -> int:
    """How many workers this machine runs side by side: one for each core that this process may use."""
    return usable_cores()


def run(job: Job, *, listener: Listener, base: Path | None = None) -> list[Outcome]:
    """Run `job` on `job.size` processes of this machine; results in the order of ranks.

    Args:
        job: What to run.
        listener: Called on this thread with what workers print and report.
        base: Where the workers' scratch folders are made.

    Raises:
        KindlerError: The run failed. No process is left then, not even a warm one.
    """
    outcomes: list[Outcome] = []
    try:
        with Hub(size=job.size, secret=job.secret, settings=job.settings) as hub:
            threads = [_supervise(job, rank, hub, outcomes, base) for rank in range(job.size)]
            try:
                heard = watch(
                    hub,
                    running=lambda: any(thread.is_alive() for thread in threads),
                    listener=listener,
                    settings=job.settings,
                )
            finally:
                hub.abort()
                for thread in threads:
                    thread.join(2 * job.settings.stop_timeout_s)
        results = verdict(heard, outcomes)
        if len(results) < job.size or any(o.kind != "result" for o in results):
            raise TrainingError(f"the run ended with {len(results)} results of {job.size} workers.")
        return results
    except BaseException:
        fork_server.retire()
        raise
    finally:
        if job.settings.idle_s == 0:
            fork_server.retire()


def _supervise(job: Job, rank: int, hub: Hub, outcomes: list[Outcome], base: Path | None) -> threading.Thread:
    def work() -> None:
        try:
            with Supervisor(job, rank, hub=hub.address, owner=os.getpid(), base=base) as supervisor:
                supervisor.start()
                outcomes.append(supervisor.run())
        except Aborted:
            pass

    thread = threading.Thread(target=work, name=f"kindler-supervisor-{rank}", daemon=True)
    thread.start()
    return thread
