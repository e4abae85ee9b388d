"""What a simulated world has of the system: processes that are forked, and Spark, which runs tasks again.

`simulation` puts them, and the world's threads, clock and network, in place of what the engine's modules use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from kindler import limits
from kindler.engine import feeds, fork_server, gang, hub, local, meeting, supervisor, worker
from kindler.engine.hub import Hub
from kindler.engine.outcome import Outcome
from kindler.engine.supervisor import AbortedError, BesideRanks, Supervisor
from kindler.errors import TrainingError, WorkerLostError
from tests.unit.simulation import network
from tests.unit.simulation import world as simulated
from tests.unit.simulation.world import Process, world

_TASK_FAILURES = 4  # of Spark


class _Child:
    """Stands in for `fork_server.Child`."""

    output = None

    def __init__(self, rank_process: Process, name: str) -> None:
        here = world()
        self.process = here.process(name, rank_process.host, rank_process)
        mine, theirs = here.network.pair(rank_process, self.process, near=True)
        self.channel = network.Channel(mine)
        self.pid = self.process.pid
        self._by_itself = True
        self.process.spawn("main", lambda: self._exit(worker.run_child(theirs)))  # type: ignore[arg-type]

    def _exit(self, code: int) -> None:
        world().after(0.0, self.process.end, code)

    def kill(self) -> None:
        world().after(0.0005, self._kill)

    def _kill(self) -> None:
        if self.process.alive:
            self._by_itself = False
            self.process.end()

    def ask_for_stacks(self) -> None:
        pass

    def wait(self, timeout_s: float) -> tuple[int, bool]:
        deadline = world().now + timeout_s
        while self.process.alive:
            if world().now >= deadline:
                raise TimeoutError
            world().block(self.process.ended, deadline - world().now)
        assert self.process.code is not None
        return self.process.code, self._by_itself

    def close(self) -> None:
        world().after(0.0, self.process.end)
        self.channel.close()


class _Printed:
    def __init__(self, output: Any, tell: Any) -> None:
        pass

    def pump(self) -> None:
        pass

    catch_up = close = pump


def _start_child(recipe: Any, *, wanted: Callable[[], bool], **_: Any) -> _Child:
    run, here = world().scenario, world()
    here.sleep(0.01 + here.random.random() ** 4 * (60.0 if run.slow_starts else 2.0))
    if not wanted():
        raise TrainingError("it is not wanted any more")
    # The name of the thread says whose it is: "kindler-supervisor-2" or "task of 2".
    supervisor_name = _rank_of_starter()
    child = _Child(here.current.process, f"worker {supervisor_name}")
    run.workers.setdefault(supervisor_name, []).append(child.process)
    return child


def _rank_of_starter() -> int:
    rank: int = world().current.rank  # type: ignore[attr-defined]
    return rank


class _Supervisor(Supervisor):
    """It alone knows for whom its threads work."""

    def _start(self, run: Callable[[], None], name: str) -> None:
        def named() -> None:
            world().current.rank = self._rank  # type: ignore[attr-defined]
            run()

        super()._start(named, name)


class TaskLaunch:
    """Spark: tasks in processes of executors, which it starts when it has slots, again, or twice."""

    after_first = True

    def __init__(self, run: Any) -> None:
        self._run = run
        self._job = run.job
        never_retries = run.job.replaceable and run.world.chance(0.3)  # as the master local[n] does
        self.retries = not never_retries
        self._again = self._job.settings.max_failures if never_retries else 0
        self._most_failures = 1 if never_retries else _TASK_FAILURES
        self._failures: dict[int, int] = {}
        self._attempts: dict[int, int] = {}
        self._alive: dict[int, list[Process]] = {rank: [] for rank in range(run.job.crew)}
        self._ends: dict[int, Outcome] = {}
        self._failed = self._cancelled = False
        self._over = simulated.threads.Event()

    def open(self, stack: ExitStack) -> Hub:
        job, here = self._job, self._run.world
        opened = stack.enter_context(Hub(job, host="driver"))
        self._address = opened.address
        for rank in range(job.crew):
            here.after(here.random.random() ** 3 * 5, self.start_task, rank, 0)
        self._beside = stack.enter_context(BesideRanks(job, opened.address, far=True))
        return opened

    def start_task(self, rank: int, attempt: int) -> None:
        if self._failed or self._cancelled or rank in self._ends:
            return
        run, here = self._run, self._run.world
        process = here.process(f"task of {rank}, attempt {attempt}", here.random.choice(run.drawn.hosts))
        here.say(f"Spark starts {process.name} on {process.host}")
        self._attempts[rank] = max(attempt, self._attempts.get(rank, 0))
        self._alive[rank].append(process)
        run.tasks.setdefault(rank, []).append(process)
        process.spawn("main", lambda: self._task(process, rank, attempt))
        self._watch(process, rank)

    def _watch(self, process: Process, rank: int) -> None:
        """The driver of Spark hears of the end of a process, unless it has sent its rows."""

        def ended() -> None:
            here = self._run.world
            while process.alive:
                here.block(process.ended, None)
            here.sleep(here.random.random() * 2)
            self.task_failed(process, rank)

        self._run.driver.spawn(f"Spark's eyes on {process.name}", ended)

    def task_failed(self, process: Process, rank: int) -> None:
        if process not in self._alive[rank]:
            return
        self._alive[rank].remove(process)
        self._failures[rank] = self._failures.get(rank, 0) + 1
        if self._over.is_set():
            return
        if self._failures[rank] >= self._most_failures or self._job.together:
            self._failed = True
            self._run.touched.update(range(self._job.crew))  # their tasks are killed by Spark
            self._kill_all()
        else:
            here = self._run.world
            here.after(here.random.random() * 3, self.start_task, rank, self._attempts[rank] + 1)

    def run_twice(self, rank: int) -> None:
        if rank not in self._ends:
            self.start_task(rank, self._attempts.get(rank, 0) + 1)

    def stage_again(self) -> None:
        for rank in range(self._job.crew):
            if rank not in self._ends:
                self.start_task(rank, 0)

    def _task(self, process: Process, rank: int, attempt: int) -> None:
        outcome = self._supervised(rank, attempt)
        process_ends = self._run.world.after
        if outcome is None:
            process_ends(0.0, process.end, 1)
            return
        self._run.world.say(f"{process.name} ends with {outcome.kind} {outcome.fields}"[:200])
        process_ends(self._run.world.random.random() * 0.5, self._arrive, process, outcome)

    def _supervised(self, rank: int, attempt: int) -> Outcome | None:
        """As `_SupervisorTask` of `spark/engine.py` does."""
        here, last = self._run.world, attempt + self._again
        try:
            while True:
                with supervisor.Supervisor(
                    self._job, rank, hub=self._address, owner=0, far=True, attempt=attempt
                ) as own:
                    own.start()
                    here.sleep(here.random.random())  # its rows
                    outcome = own.run()
                if not own.needs_another(outcome):
                    return outcome
                if attempt == last:
                    return None
                attempt += 1
        except AbortedError:
            return Outcome(rank, "aborted")
        except Exception as exc:
            return Outcome(rank, "error", {**worker.describe(exc), "host": "somewhere"})

    def _arrive(self, process: Process, outcome: Outcome) -> None:
        rank = outcome.rank
        if not process.alive or process not in self._alive[rank]:
            return
        self._alive[rank].remove(process)
        self._ends.setdefault(rank, outcome)
        process.end(0)
        for other in list(self._alive[rank]):  # Spark needs one of them
            self._alive[rank].remove(other)
            other.end()
        if len(self._ends) == self._job.crew:
            self._over.set()

    def _kill_all(self) -> None:
        for processes in self._alive.values():
            for process in list(processes):
                self._run.world.after(self._run.world.random.random(), process.end)
        self._over.set()

    def is_queued(self) -> bool:
        return False

    def is_alive(self) -> bool:
        return not self._over.is_set()

    def end(self) -> None:
        if not self._over.wait(self._job.settings.stop_timeout_s):
            self._cancelled = True
            self._kill_all()

    def outcomes(self, opened: Hub | None) -> list[Outcome]:
        assert opened is not None
        results = [Outcome(rank, "result", {}, buffers) for rank, buffers in opened.results.items()]
        ends = [*self._ends.values(), *self._beside.outcomes]
        return [o for o in ends if o.kind != "result"] + results

    def incomplete(self, outcomes: Sequence[Outcome], *, started: bool) -> BaseException:
        if self._failed or self._cancelled:
            return WorkerLostError("Spark abandoned its task", rank=None, host="the cluster")
        return TrainingError(f"the run ended with {len(outcomes)} results of {self._job.size} workers.")

    def clean_up(self) -> None:
        pass


class _Folder:
    def __init__(self, *_: object) -> None:
        self.path = Path("/nonexistent/kindler")

    def remove(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _place(device: str, **_: Any) -> Any:
    return SimpleNamespace(take=lambda: None, visible=None, device="cpu", index=0, shared=False, problem=None)


@contextmanager
def _telling(tell: Callable[[], None]) -> Iterator[None]:
    """Stands in for `notices.telling`: the process takes SIGTERM."""
    world().current.process.sigterm = tell  # type: ignore[attr-defined]
    yield


def _exit(code: int) -> None:
    raise SystemExit(code)


@contextmanager
def simulation() -> Iterator[None]:
    """The engine's modules use what is simulated while the block runs."""
    threads, clock, queues = simulated.threads, simulated.clock, simulated.queues
    forks = SimpleNamespace(
        Recipe=fork_server.Recipe,
        start_child=_start_child,
        PrintedLines=_Printed,
        retire=lambda owner=None: None,
    )
    names = SimpleNamespace(gethostname=lambda: world().current.process.host, socket=None)
    system = SimpleNamespace(path=SimpleNamespace(isdir=lambda _: False), _exit=_exit)
    with simulated.installed(
        (limits, {"TICK_S": 0.5, "POLL_S": 0.5, "LAST_TICK_S": 0.1, "EXIT_S": 3.0, "GANG_STACKS_S": 5.0}),
        (meeting, {"threading": threads}),
        (feeds, {"threading": threads}),
        (gang, {"threading": threads, "time": clock}),
        (local, {"threading": threads, "fork_server": forks, "Supervisor": _Supervisor, "Folder": _Folder}),
        (
            hub,
            {
                "threading": threads,
                "time": clock,
                "queue": queues,
                "listen": network.listen,
                "Server": network.Server,
                "allow_files": lambda wanted: None,
            },
        ),
        (
            supervisor,
            {
                "threading": threads,
                "time": clock,
                "queue": queues,
                "socket": names,
                "fork_server": forks,
                "connect": network.connect,
                "Folder": _Folder,
                "Supervisor": _Supervisor,
                "can_run": _can_run,
            },
        ),
        (
            worker,
            {
                "threading": threads,
                "queue": queues,
                "os": system,
                "faulthandler": MagicMock(),
                "Channel": network.Channel,
                "_answer_with_stacks": lambda path: None,
                "enter_program_path": lambda paths: None,
                "flush_output": lambda: None,
                "usable_cores": lambda: 1,
                "place": _place,
                "set_current_worker": lambda info: None,
                "telling": _telling,
            },
        ),
    ):
        yield


def _can_run(pid: int) -> bool:
    process = next(p for p in world().processes if p.pid == pid)
    return process.alive and not process.stopped
