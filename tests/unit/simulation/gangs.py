"""Gangs in a simulated world: the hub, supervisors, workers and the driver's watch run as they are.

A seed draws a gang (its launch, what its ranks do and whether they may be lost), what goes wrong, and when.
Not the product's are processes and Spark (`processes.py`), connections (`network.py`), and what ranks do
(`program`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kindler.config import RunSettings
from kindler.engine import local
from kindler.engine.gang import Gang, Halted, follow
from kindler.engine.hub import Event
from kindler.engine.job import Job, RankSpec, equal_ranks
from kindler.engine.outcome import Outcome
from kindler.engine.worker import Worker
from kindler.errors import (
    KindlerError,
    StalledError,
    StartTimeoutError,
    SyncTimeoutError,
    TrainingError,
    WorkerLostError,
)
from kindler.frame import Frame
from tests.unit.simulation.network import Network, Peer
from tests.unit.simulation.processes import TaskLaunch
from tests.unit.simulation.world import Process, Violation, World, world

LONGEST_S = 400.0  # of a run, whatever happens
SETTINGS = RunSettings(
    start_timeout_s=30.0,
    heartbeat_s=2.0,
    heartbeat_timeout_s=8.0,
    sync_timeout_s=40.0,
    stall_timeout_s=24.0,
    stop_timeout_s=3.0,
    max_failures=2,
    executor_wait_s=20.0,
    idle_s=0,
)
_PROGRAM = f"{__name__}:program"
_SHORT_S = 3.0  # a pause or partition that nobody needs to notice


class Drawn:
    """What a seed decides about a gang before it begins."""

    def __init__(self, seed: int, world: World) -> None:
        draw = world.random
        self.on_tasks = draw.random() < 0.5
        self.kind = draw.choice(["fixed", "fixed", "replaceable", "replaceable", "optional", "apart"])
        self.crew = draw.choice([1, 2, 2, 3, 3, 4, 5])
        self.services = draw.choice([0, 0, 0, 1]) if self.kind != "replaceable" else 0
        self.grace_s = draw.choice([0.0, 2.0])
        self.hosts = [f"host-{number}" for number in range(draw.choice([1, 2, self.crew]))]
        self.steps = [
            {
                "op": draw.choice(["all", "all", "some", "sum", "mean", "quiet"]),
                "wants": sorted(draw.sample(range(self.crew), draw.randint(0, self.crew))),
                "seconds": [round(draw.random() ** 4 * 3, 3) for _ in range(self.crew)],
                "keeps": draw.random() < 0.4,
                "reports": draw.random() < 0.4,
            }
            for _ in range(draw.randint(1, 6))
        ]
        self.plan = json.dumps({"kind": self.kind, "steps": self.steps}).encode()

    @property
    def replaceable(self) -> bool:
        return self.kind == "replaceable"

    def job(self) -> Job:
        crew = equal_ranks(_PROGRAM, self.crew)
        service = RankSpec(target=_PROGRAM, role="ps", service=True, beside=True, grace_s=self.grace_s)
        return Job(
            ranks=(*crew, *(service,) * self.services),
            buffers=(self.plan,),
            run_id="simulated",
            secret=b"s" * 32,
            settings=SETTINGS,
            cwd="/",
            sys_path=(),
            together=self.kind in ("fixed",) or (self.kind == "optional" and not self.on_tasks),
            replaceable=self.replaceable,
        )


def brought(rank: int, step: int) -> bytes:
    return b"" if (rank + step) % 7 == 6 else b"%d brings %d" % (rank, step)


def answer_of(step: dict[str, Any], number: int, crew: int, lost: frozenset[int]) -> list[bytes]:
    """What every gather must give, computed here without any of the product."""
    there = [rank for rank in range(crew) if rank not in lost]
    if step["op"] == "sum":
        return [b"%d" % sum(rank + number for rank in there)]
    if step["op"] == "mean":
        weights = sum(rank + 1 for rank in there)
        total = 0.0
        for rank in there:
            total += float(rank * number) * ((rank + 1.0) / weights)
        return [repr(total).encode()]
    ranks = range(crew) if step["op"] == "all" else step["wants"]
    return [b"" if rank in lost else brought(rank, number) for rank in ranks]


def digest_of(before: bytes, answers: Sequence[bytes]) -> bytes:
    return hashlib.md5(before + b"|".join(answers)).hexdigest().encode()


def program(here: Worker, plan: bytes) -> list[bytes]:
    """What a rank does: steps with gathers, of which it keeps a digest."""
    run, drawn = world().scenario, json.loads(plan)
    if here.role == "ps":
        here.others_ended.wait(None)
        return []
    kind, steps = drawn["kind"], drawn["steps"]
    run.enters(here, -1)
    digest, first = b"", 0
    if kind == "replaceable":
        opening = here.all_gather(b"open %d" % here.rank)
        run.answered(here, "opening", opening, [b"open %d" % rank for rank in range(here.size)])
        if kept := here.opened():
            first, digest = json.loads(kept)[0], json.loads(kept)[1].encode()
    elif kind == "optional":
        here.become_optional()
    done = first
    for number in range(first, len(steps)):
        step = steps[number]
        if not here.go_on(number + 1):
            break
        run.enters(here, number)
        world().sleep(step["seconds"][here.rank])
        if step["op"] != "quiet":
            answers = gathers(here, step, number)
            run.answered(here, number, answers, answer_of(step, number, here.size, frozenset(here.lost)))
            digest = digest if here.lost else digest_of(digest, answers)
        done = number + 1
        if step["reports"] and here.rank == 0:
            here.report("step", number=number)
        if kind == "replaceable" and step["keeps"]:
            here.keep(json.dumps([done, digest.decode()]).encode())
    run.says(f"leaves after step {done}")
    return [digest, b"%d" % done]


def gathers(here: Worker, step: dict[str, Any], number: int) -> list[bytes]:
    if step["op"] == "sum":
        return [b"%d" % here.total([here.rank + number])[0]]
    if step["op"] == "mean":
        [mean] = here.mean([np.full(1, float(here.rank * number))], weight=here.rank + 1.0)
        return [repr(float(mean[0])).encode()]
    data = brought(here.rank, number)
    if step["op"] == "all":
        return here.all_gather(data)
    return list(here.gather(data, step["wants"]).values())


class PlannedError(Exception):
    pass


class GangRun:
    """One seed: runs a gang to its end and looks at all that happens."""

    draws: Callable[[int, World], Drawn] = Drawn

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.world = World(seed, longest_s=LONGEST_S)
        self.world.scenario = self
        Network(self.world)
        self.drawn = type(self).draws(seed, self.world)
        self.job = self.drawn.job()
        where = "tasks" if self.drawn.on_tasks else "processes"
        self.world.say(f"{self.drawn.kind} gang of {self.drawn.crew} in {where}")
        self.driver = self.world.process("driver", "driver")
        self.workers: dict[int, list[Process]] = {}
        self.tasks: dict[int, list[Process]] = {}
        self.touched: set[int] = set()  # ranks that may be blamed, as something was done to them
        self.excuses: set[str] = set()  # what else was done
        self.strain = 0.0  # below 1, the run must succeed
        self.answers: dict[tuple[int, Any], Sequence[bytes]] = {}
        self.last: dict[int, int] = {}
        self.steps_reported: list[int] = []
        self.outcome: list[Outcome] | BaseException | None = None
        self.is_over = False
        self._planned: dict[tuple[int, int], Callable[[Process], None]] = {}
        self._holders: dict[int, Peer] = {}
        self._lost: dict[int, frozenset[int]] = {}
        self._launch: Any = None

    def run(self) -> None:
        with self.world:
            self._plan_mishaps()
            driver = self.driver.spawn("main", self._drive)
            self.main = driver
            self.world.run(lambda: self.is_over)
            self._judge()
            # Whatever was started ends soon after the driver has.
            self.world.run(lambda: not any(p.alive and p is not self.driver for p in self.world.processes))

    def says(self, text: str) -> None:
        process = self.world.current.process
        self.world.say(f"{process.name} ({process.host}): {text}")

    def _drive(self) -> None:
        drawn = self.drawn
        self._launch = TaskLaunch(self) if drawn.on_tasks else local._LocalLaunch(self.job, None)
        self.gang = Gang(self.job, self._launch)
        try:
            self.outcome = follow(self.gang, self._hear)
        except (KindlerError, PlannedError, KeyboardInterrupt) as exc:
            self.outcome = exc
        self.world.say(f"the run ended with {self.outcome!r}"[:300])
        self.is_over = True

    def _hear(self, event: Event) -> None:
        self.world.say(f"heard of {event.rank}: {event.kind} {event.fields}"[:200])
        if event.kind == "report" and event.fields["name"] == "step":
            self.steps_reported.append(event.fields["number"])

    # What ranks do.

    def enters(self, here: Worker, number: int) -> None:
        process = self.world.current.process
        self.says(f"begins step {number}")
        mishap = self._planned.pop((here.rank, number), None)
        if mishap is not None:
            mishap(process)
        self.last[here.rank] = number + 1

    def answered(self, here: Worker, key: Any, answers: Sequence[bytes], right: Sequence[bytes]) -> None:
        self.says(f"is answered in {key}: {list(answers)}, lost {sorted(here.lost)}")
        if list(answers) != list(right):
            raise Violation(f"rank {here.rank} got {answers} in {key}, not {right}")
        lost = frozenset(here.lost)
        if self._lost.setdefault(key, lost) != lost:
            raise Violation(f"in {key} ranks hear of different losses: {lost} and {self._lost[key]}")

    def sends(self, peer: Peer, frame: Frame) -> None:
        """The hub sends a frame: a rank that is welcome must be the only one."""
        kind = frame.kind
        if kind == "welcome":
            holder = self._holders.get(peer.id)
            if holder is not None and holder is not peer and holder.end.closed is None:
                raise Violation(f"two processes hold rank {peer.id}")
            self._holders[peer.id] = peer
        elif kind in ("dismiss", "abort") and self._holders.get(peer.id) is peer:
            del self._holders[peer.id]

    # What goes wrong.

    def _plan_mishaps(self) -> None:
        draw, mishaps = self.world.random, self._mishaps()
        for _ in range(draw.choice([0, 1, 1, 1, 2, 2, 3])):
            draw.choice(mishaps)()

    def _mishaps(self) -> list[Callable[[], None]]:
        mishaps = [
            self._worker_dies,
            self._worker_dies,
            self._worker_pauses,
            self._driver_pauses,
            self._slow_network,
            self._user_error,
            self._interrupt,
            self._abort,
            self._slow_start,
        ]
        if self.drawn.on_tasks:
            mishaps += [
                self._task_dies,
                self._task_runs_twice,
                self._stage_again,
                self._machine_dies,
                self._connection_breaks,
                self._connection_breaks,
                self._partition,
            ]
        return mishaps

    def _when(self) -> float:
        return self.world.random.choice([self.world.random.random() * 12, self.world.random.random() * 3])

    def _rank(self) -> int:
        return self.world.random.randrange(self.drawn.crew)

    def _later(self, what: str, call: Callable[[], None]) -> None:
        when = self._when()
        self.world.say(f"planned at {when:.3f}: {what}")

        def happen() -> None:
            if not self.is_over:
                self.world.say(f"NOW {what}")
                call()

        self.world.after(when, happen)

    def _of(self, processes: dict[int, list[Process]], rank: int) -> Process | None:
        return next((p for p in reversed(processes.get(rank, ())) if p.alive), None)

    def _bears(self, strain: float) -> None:
        """A mishap that ranks survive which can be replaced; others end with the run."""
        self.strain += strain if self.drawn.replaceable else 1.0

    def _worker_dies(self) -> None:
        rank, draw = self._rank(), self.world.random

        def die(process: Process | None) -> None:
            if process is not None and process.alive:
                self.touched.add(rank)
                self._bears(0.34)
                self.world.say(f"NOW {process.name} is killed")
                self.world.after(0.0, process.end)

        if draw.random() < 0.7:
            step = draw.randrange(-1, len(self.drawn.steps))
            self._planned[rank, step] = lambda process: self.world.after(draw.random() * 0.02, die, process)
        else:
            self._later(f"the worker of {rank} is killed", lambda: die(self._of(self.workers, rank)))

    def _task_dies(self) -> None:
        rank = self._rank()

        def die() -> None:
            if (process := self._of(self.tasks, rank)) is not None:
                self.touched.add(rank)
                self._bears(0.34 if self._launch.retries else 1.0)
                process.end()

        self._later(f"the task of {rank} is killed", die)

    def _machine_dies(self) -> None:
        host = self.world.random.choice(self.drawn.hosts)

        def die() -> None:
            self._touch_host(host)
            self._bears(0.5 if self._launch.retries else 1.0)
            for other in ["driver", *self.drawn.hosts]:
                self.world.network.cut(host, other, None)
            for process in self.world.processes:
                if process.host == host:
                    process.end(silently=True)
            self.drawn.hosts[:] = [other for other in self.drawn.hosts if other != host] or ["spare"]

        self._later(f"{host} dies", die)

    def _touch_host(self, host: str) -> None:
        for rank, processes in self.tasks.items():
            if any(p.host == host and p.alive for p in processes):
                self.touched.add(rank)

    def _connection_breaks(self) -> None:
        rank, draw = self._rank(), self.world.random
        notices = draw.choice([(True, True), (True, False), (False, True), (False, False)])

        def break_down() -> None:
            process = self._of(self.tasks, rank)
            for end in process.ends if process is not None else ():
                if end.other.process is self.driver and not end.is_shut:
                    self.touched.add(rank)
                    # A task that sees nothing ends when its system gives up, which may be too late.
                    hub = self.gang._hub
                    self._bears(1.0 if not notices[0] or hub is None or rank in hub.missing() else 0.5)
                    for one, sees in zip((end, end.other), notices, strict=True):
                        one.is_broken = True
                        self.world.after(draw.random(), one.break_down, sees)

        self._later(f"the connection of {rank} breaks, noticed by {notices}", break_down)

    def _partition(self) -> None:
        host = self.world.random.choice(self.drawn.hosts)
        seconds = self.world.random.choice([1.0, _SHORT_S, 15.0, 100.0])

        def cut() -> None:
            if seconds > _SHORT_S:
                self._touch_host(host)
                self.excuses.add("partition")
                self._bears(0.5 if seconds < 20 else 1.0)
            else:
                self.strain += 0.5
            self.world.network.cut("driver", host, seconds)

        self._later(f"{host} is cut off for {seconds} s", cut)

    def _worker_pauses(self) -> None:
        rank, draw = self._rank(), self.world.random
        seconds, stopped = draw.choice([1.0, _SHORT_S, 15.0, 100.0]), draw.random() < 0.5

        def pause() -> None:
            if (process := self._of(self.workers, rank)) is not None:
                if stopped or seconds > _SHORT_S:  # who ends the run meanwhile finds it stopped
                    self.touched.add(rank)
                if seconds > _SHORT_S:
                    self._bears(0.5 if seconds < 20 else 1.0)
                else:
                    self.strain += 0.5
                process.pause(seconds, stopped=stopped)

        self._later(f"the worker of {rank} pauses for {seconds} s, stopped={stopped}", pause)

    def _driver_pauses(self) -> None:
        seconds = self.world.random.choice([1.0, _SHORT_S, 15.0])

        def pause() -> None:
            if seconds > _SHORT_S:
                self.excuses.add("driver")
            early = not self.gang._hub or self.gang._hub.missing()
            self.strain += 1.0 if early and seconds > _SHORT_S else 0.5
            self.driver.pause(seconds, stopped=False)

        self._later(f"the driver pauses for {seconds} s", pause)

    def _task_runs_twice(self) -> None:
        rank = self._rank()
        if not self.job.together:
            self._later(f"Spark runs {rank} twice", lambda: self._launch.run_twice(rank))

    def _stage_again(self) -> None:
        if not self.job.together:
            self._later("Spark begins the stage again", self._again)

    def _again(self) -> None:
        self._launch.stage_again()

    def _slow_network(self) -> None:
        self.world.network.slowness = 2.0

    def _slow_start(self) -> None:
        self.slow_starts = True
        self.excuses.add("start")
        self.strain += 1.0

    slow_starts = False

    def _user_error(self) -> None:
        rank = self._rank()

        def fail(process: Process) -> None:
            self.excuses.add("error")
            self.strain += 1.0
            raise PlannedError(f"rank {rank} fails")

        self._planned[rank, self.world.random.randrange(-1, len(self.drawn.steps))] = fail

    def _interrupt(self) -> None:
        def interrupt() -> None:
            self.excuses.add("interrupt")
            self.strain += 1.0
            self.main.throw(KeyboardInterrupt())

        for _ in range(self.world.random.choice([1, 1, 1, 2])):
            self._later("Ctrl-C", interrupt)

    def _abort(self) -> None:
        def abort() -> None:
            self.excuses.add("abort")
            self.strain += 1.0
            self.driver.spawn("a thread that aborts", lambda: self.gang.abort("somebody wants it"))

        self._later("the gang is aborted", abort)

    # What must hold.

    def _judge(self) -> None:
        outcome = self.outcome
        if isinstance(outcome, Halted):
            self._judge_results(outcome.outcomes, halted=True)
        elif isinstance(outcome, BaseException):
            self._judge_error(outcome)
        elif outcome is not None:
            self._judge_results(outcome, halted=False)
        if self.steps_reported != sorted(set(self.steps_reported)):
            raise Violation(f"steps were reported out of order or twice: {self.steps_reported}")

    def _judge_results(self, outcomes: list[Outcome], *, halted: bool) -> None:
        drawn = self.drawn
        results = {o.rank: o.buffers for o in outcomes if o.kind == "result" and o.rank < drawn.crew}
        left = {o.rank for o in outcomes if o.kind == "left"}
        missing = set(range(drawn.crew)) - results.keys()
        if missing and (drawn.kind != "optional" or not missing <= self.touched or not results):
            raise Violation(f"the ranks {sorted(missing)} have no result, {sorted(left)} left")
        ends = {int(done) for _, done in results.values()}
        if len(ends) > 1:
            raise Violation(f"ranks end after different steps: {ends}")
        [end] = ends
        if end < len(drawn.steps) and not halted:
            raise Violation(f"ranks ended after {end} of {len(drawn.steps)} steps, and nobody asked them to")
        digest = b""
        for number, step in enumerate(drawn.steps[:end]):
            if step["op"] != "quiet":
                digest = digest_of(digest, answer_of(step, number, drawn.crew, frozenset()))
        wrong = {rank for rank, (mine, _) in results.items() if mine != digest}
        if wrong and not any(self._lost.values()):
            raise Violation(f"the ranks {sorted(wrong)} have another result than an undisturbed run")

    def _judge_error(self, error: BaseException) -> None:
        excuses, touched = self.excuses, self.touched
        if isinstance(error, KeyboardInterrupt):
            fair = "interrupt" in excuses
        elif "PlannedError" in str(type(error).__mro__) or "rank %" in str(error) or "fails" in str(error):
            fair = "error" in excuses
        elif isinstance(error, WorkerLostError):
            fair = error.rank in touched if error.rank is not None else bool(touched)
            fair = fair or bool(excuses & {"driver"})
        elif isinstance(error, SyncTimeoutError):
            fair = bool(touched & set(error.missing)) or "driver" in excuses
        elif isinstance(error, StalledError):
            fair = bool(touched & set(error.ranks)) or "driver" in excuses
        elif isinstance(error, StartTimeoutError):
            fair = bool(touched) or bool(excuses & {"start", "driver", "partition"})
        elif isinstance(error, TrainingError) and "aborted" in str(error):
            fair = "abort" in excuses
        else:
            fair = "connecting to" in str(error) and bool(touched or excuses & {"driver", "partition"})
        if not fair or self.strain < 0.99:
            raise Violation(
                f"nothing explains {error!r}; touched {sorted(touched)}, {sorted(excuses)}, {self.strain:g}"
            )
