"""Runs of `fit` in a simulated world: workers that are replaced in memory, notices, and new starts.

What workers run (`train/run.py`, its loop, the regrouper) and the attempts of the driver are the product's.
Stand-ins are the model, whose weights after each step plain code computes here, the rows, what ranks exchange
gradients through, and the disk.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from kindler import limits
from kindler.collective import GradientExchange
from kindler.config import Checkpoints, RunSettings
from kindler.data.batches import Batch, Rows
from kindler.engine import local
from kindler.engine.gang import Gang, Halted, NotBegun, follow
from kindler.engine.hub import Event
from kindler.engine.job import Job, equal_ranks
from kindler.engine.outcome import Outcome
from kindler.errors import KindlerError, SyncError, SyncTimeoutError
from kindler.estimator import run as driver
from kindler.files import Folder
from kindler.frameworks.base import BaseReplica
from kindler.group import Group
from kindler.sync.allreduce import AllReduce
from kindler.train import checkpoints, goodput, loop, regroup, step_loop
from kindler.train import run as workers
from kindler.train.callbacks import Callback, Run
from kindler.train.checkpoints import StoredCheckpoint, parse
from kindler.train.options import FitOptions, RunConfig, Task
from tests.unit.simulation import world as simulated
from tests.unit.simulation.gangs import SETTINGS, Drawn, GangRun
from tests.unit.simulation.network import End
from tests.unit.simulation.processes import TaskLaunch
from tests.unit.simulation.world import Process, Violation, World, world

_SERVED_S = 25.0  # within which a notice ends the workers, where nothing pauses


def digest(*parts: object) -> str:
    return hashlib.md5("|".join(map(str, parts)).encode()).hexdigest()[:12]


class Toy:
    """What a rank computes: weights that all have alike, and randomness, buffers and rows of its own."""

    def __init__(self, rank: int) -> None:
        self.rank, self.rows = rank, 0
        self.weights, self.buffers, self.own = "new", "empty", ""

    def begin_epoch(self, epoch: int) -> None:
        self.own = digest(epoch, self.rank)

    def computes(self) -> str:
        self.own = digest(self.own, "drawn")
        self.buffers = digest(self.buffers, self.own)
        self.rows += self.rank + 1
        return self.own

    def learns(self, brought: Sequence[str]) -> None:
        self.weights = digest(self.weights, *brought)

    def ends_epoch(self, rows: int) -> None:
        self.weights = digest(self.weights, "schedule", rows)


def undisturbed(size: int, epochs: int, steps: int) -> tuple[list[str], list[str]]:
    """The weights after each step, and those that are then the run's, if it ends there."""
    ranks = [Toy(rank) for rank in range(size)]
    after, ended = ["new"], ["new"]
    for epoch in range(1, epochs + 1):
        for toy in ranks:
            toy.begin_epoch(epoch)
        for _ in range(steps):
            brought = [toy.computes() for toy in ranks]
            for toy in ranks:
                toy.learns(brought)
            after.append(ranks[0].weights)
            ended.append(ranks[0].weights)
        merged, rows = digest(*(toy.buffers for toy in ranks)), sum(toy.rows for toy in ranks)
        for toy in ranks:
            toy.buffers, toy.rows = merged, 0
            toy.ends_epoch(rows)
        ended[-1] = ranks[0].weights
    return after, ended


class ToyReplica(BaseReplica):
    def __init__(self, spec: Any, *, rank: int = 0, **_: Any) -> None:
        super().__init__(spec, rank=rank)
        self.toy, self.buffers_then = Toy(rank), "empty"

    @classmethod
    def from_bytes(cls, spec: bytes, **options: Any) -> ToyReplica:
        return cls(None, **options)

    @property
    def regroups(self) -> bool:
        return True

    def _seed(self, *numbers: int) -> None:
        pass

    def begin_epoch(self, epoch: int) -> None:
        self.epoch, self.epoch_rows, self.buffers_then = epoch, 0, self.toy.buffers
        self.toy.begin_epoch(epoch)

    def fuse(self, *_: Any, **__: Any) -> GradientExchange:
        return GradientExchange()

    def train_step(self, batch: Any) -> None:
        run = world().scenario
        run.enters_step(self.rank, self.step)
        mine = self.toy.computes()
        brought = [mine]
        if self._others is not None:
            self._exchange("the first part")
            self.before_exchange()
            brought = self._exchange(mine)
        self.toy.learns(brought)
        self.step += 1
        self.epoch_rows += batch.rows
        run.applied(self.rank, self.step, self.toy.weights)

    def _exchange(self, mine: str) -> list[str]:
        mesh: Any = self._others
        return [part.decode() for part in mesh.exchange(mine.encode())]

    def end_epoch(self, logs: Mapping[str, float] | None = None) -> None:
        assert logs is not None
        self.toy.ends_epoch(int(logs["num_samples"]))

    def merge_buffers(self) -> None:
        mine = self.toy.buffers
        self.toy.buffers = digest(*(self._exchange(mine) if self._others is not None else [mine]))

    def take_tallies(self) -> bytes:
        rows, self.toy.rows = self.toy.rows, 0
        return b"%d" % rows

    def merge_tallies(self, tallies: Sequence[bytes]) -> dict[str, float]:
        return {"num_samples": sum(map(int, tallies))}

    @property
    def buffers_before(self) -> Any:
        return {"buffers": self.buffers_then}

    def variables(self, *groups: str) -> Any:
        return {"parameters": {"weights": np.frombuffer(self.toy.weights.encode(), np.uint8)}}

    def assign(self, variables: Mapping[str, Mapping[str, Any]]) -> None:
        self.toy.buffers = variables["buffers"]["buffers"]

    def freeze(self) -> Any:
        toy = self.toy
        data = json.dumps([toy.weights, toy.buffers, self.epoch, self.step]).encode()
        return lambda: [data]

    def load_state(self, data: bytes, *, weights_only_model: bool = False) -> None:
        self.toy.weights, self.toy.buffers, self.epoch, self.step = json.loads(data)

    def local_state(self) -> bytes:
        toy = self.toy
        return json.dumps([toy.own, toy.buffers, toy.rows, self.epoch_rows]).encode()

    def load_local_state(self, data: bytes) -> None:
        self.toy.own, self.toy.buffers, self.toy.rows, self.epoch_rows = json.loads(data)

    def snapshot(self) -> bytes:
        return json.dumps([self.toy.own, self.toy.buffers, self.toy.rows]).encode()

    def restore(self, snapshot: bytes) -> None:
        self.toy.own, self.toy.buffers, self.toy.rows = json.loads(snapshot)


class Mesh:
    """A connection between every two ranks, which breaks when one of them dies."""

    def __init__(self, worker: Group, timeout_s: float) -> None:
        self.rank, self.size, self.waited_s = worker.rank, worker.size, 0.0
        self.process, self.ends = world().current.process, dict[int, End]()
        self._worker, self._timeout_s, self._heard = worker, timeout_s, 0.0
        self._arrivals: list[Any] = []
        meshes = world().scenario.meshes
        meshes.append(self)
        others = [meshes[int(number)] for number in worker.all_gather(b"%d" % (len(meshes) - 1))]
        for rank, other in enumerate(others[: self.rank]):
            self.ends[rank], other.ends[self.rank] = world().network.pair(self.process, other.process)
            for task in list(other._arrivals):
                task.wake()
            if not other.process.alive:
                raise SyncError(f"worker {rank} cannot be reached")
        self._until(range(self.size), lambda rank: rank in self.ends or rank == self.rank, self._arrivals)

    def _until(self, ranks: Sequence[int], has: Callable[[int], bool], waiters: list[Any] | None) -> None:
        here, began = world(), world().now
        self._worker.waiting = True
        try:
            while late := [rank for rank in ranks if not has(rank)]:
                for rank in late:
                    if rank in self.ends and self.ends[rank].closed is not None:
                        raise SyncError(f"the connection to worker {rank} broke")
                absent = self._worker.absent
                self._heard = (self._heard or here.now) if absent else 0.0
                if absent and (absent & set(late) or here.now - self._heard > limits.STRAGGLERS_S):
                    raise SyncError(f"workers {sorted(absent)} died")
                if here.now - began > self._timeout_s:
                    raise SyncTimeoutError(op="mesh", missing=late, size=self.size, waited_s=self._timeout_s)
                here.block(self.ends[late[0]].waiters if waiters is None else waiters, 0.25)
        finally:
            self._worker.waiting = False

    def exchange(self, data: bytes) -> list[bytes]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            self.ends[rank].send(b"." + data)
        return self._received(others, data)

    def _received(self, ranks: Sequence[int], mine: bytes) -> list[bytes]:
        self._until(ranks, lambda rank: bool(self.ends[rank].inbox), None)
        parts = {rank: self.ends[rank].inbox.popleft()[1:] for rank in ranks} | {self.rank: mine}
        return [parts[rank] for rank in sorted(parts)]

    def broadcast(self, arrays: Sequence[Any], src: int = 0) -> list[Any]:
        if self.rank == src:
            for end in self.ends.values():
                end.send(b"." + arrays[0].tobytes())
            return list(arrays)
        data = self._received([src], b"")[int(src > self.rank)]
        return [np.frombuffer(data, arrays[0].dtype).copy()]

    def sum(self, arrays: Sequence[Any]) -> list[Any]:
        [mine] = arrays
        return [np.sum([np.frombuffer(p, mine.dtype) for p in self.exchange(mine.tobytes())], axis=0)]

    def close(self) -> None:
        for end in self.ends.values():
            end.shut()


class ToySync(AllReduce):
    def connect(self, worker: Group) -> Any:
        return Mesh(worker, self.settings.sync_timeout_s)


class ToyRows(Rows):
    counts, marks = (1,), ("toy",)

    def __init__(self, worker: Group, steps: int) -> None:
        self.steps = self.expected = steps
        self._rank, self._size = worker.rank, worker.size

    @property
    def layout(self) -> dict[str, Any]:
        return {}

    features = labels = ()

    def stretch(self, epoch: int, *, done: int = 0, steps: int | None = None) -> Generator[Batch, None, None]:
        for _ in range(done, self.steps or 0):
            yield Batch((), (), self._rank + 1, self._size)


def open_rows(worker: Group, task: Task, source: Any, what: str, **_: Any) -> ToyRows:
    worker.all_gather(b"rows of %d" % worker.rank)
    return ToyRows(worker, world().scenario.drawn.steps_per_epoch)


class Hook(Callback):
    """Sees each epoch end once, whatever happens to the workers."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_epoch_end(self, run: Run, logs: dict[str, Any]) -> None:
        if run.epoch in self.seen:
            raise Violation(f"the callbacks of rank {run.rank} see the end of epoch {run.epoch} twice")
        self.seen.append(run.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class StepHook(Hook):
    def on_step_end(self, run: Run) -> None:
        world().perhaps_yield()


class Disk(Folder):
    """The folder of checkpoints, and the files of ranks' own states."""

    def __init__(self) -> None:
        self.checkpoints: dict[str, bytes] = {}
        self._files: dict[str, dict[int, bytes]] = {}  # what was written where
        self._open: dict[int, dict[int, bytes]] = {}
        self._numbers = itertools.count(3)
        self.O_RDONLY, self.O_RDWR = os.O_RDONLY, os.O_RDWR
        self.O_CREAT, self.O_CLOEXEC = os.O_CREAT, os.O_CLOEXEC

    def names(self) -> list[str]:
        return sorted(self.checkpoints)

    def read(self, name: str, limit: int | None = None) -> bytes:
        return self.checkpoints[name][:limit]

    def write(self, name: str, pieces: Sequence[Any]) -> None:
        data = b"".join(pieces)
        world().sleep(world().random.random() ** 4)
        self.checkpoints[name] = data

    def remove(self, name: str) -> None:
        self.checkpoints.pop(name, None)

    def sweep(self) -> None:
        pass

    def path(self, name: str) -> str:
        return f"memory/{name}"

    def open(self, path: str | bytes, flags: int, mode: int = 0) -> int:
        number = next(self._numbers)
        # Each attempt has folders of its own.
        name = f"{world().scenario.attempt} {os.fsdecode(path)}"
        if flags & os.O_CREAT:
            self._files.setdefault(name, {})
        if name not in self._files:
            raise FileNotFoundError(path)
        self._open[number] = self._files[name]
        return number

    def memfd_create(self, name: str) -> int:
        number = next(self._numbers)
        file = self._files[f"{world().scenario.attempt} /proc/{self.getpid()}/fd/{number}"] = {}
        self._open[number] = file
        return number

    def getpid(self) -> int:
        return world().current.process.pid

    def pwrite(self, number: int, data: bytes, start: int) -> int:
        world().perhaps_yield()
        self._open[number][start] = data
        return len(data)

    def pread(self, number: int, length: int, start: int) -> bytes:
        return self._open[number].get(start, b"")[:length]

    def close(self, number: int) -> None:
        del self._open[number]


class _Own(SimpleNamespace):
    """Stands in for `os` where ranks keep their own states, on the disk of the world."""

    def __getattr__(self, name: str) -> Any:
        return getattr(world().scenario.disk, name)


class FitDrawn(Drawn):
    """What a seed decides about a run of `fit` before it begins."""

    def __init__(self, seed: int, world: World) -> None:
        draw = world.random
        self.kind = "fit"
        self.on_tasks = draw.random() < 0.3
        self.crew = draw.choice([1, 2, 2, 3, 3, 4])
        self.hosts = [f"host-{number}" for number in range(draw.choice([1, self.crew]))]
        self.in_memory = not self.on_tasks and self.crew > 1
        self.has_folder = draw.random() < 0.5
        self.every = draw.choice([None, 1, 2, 3])
        self.hooks = draw.choice([(), (Hook,), (StepHook,)])
        self.epochs, self.steps_per_epoch = draw.randint(1, 3), draw.randint(1, 5)
        scale = draw.choice([0.05, 1.0, 10.0])
        self.steps = [
            {"seconds": [round(draw.random() ** 4 * scale, 3) for _ in range(self.crew)]}
            for _ in range(self.epochs * self.steps_per_epoch)
        ]

    @property
    def replaceable(self) -> bool:
        return self.in_memory or self.has_folder

    def task(self) -> Task:
        checkpoint = Checkpoints("memory", every=self.every) if self.has_folder else None
        hooks = tuple(hook() for hook in self.hooks)
        options = FitOptions(epochs=self.epochs, callbacks=hooks, checkpoint=checkpoint, verbose=0)
        config = RunConfig(settings=SETTINGS)
        return Task(framework="toy", options=options, data=None, config=config, run_id="fit")  # type: ignore[arg-type]

    def job(self, *buffers: bytes, regroups: int = 0, settings: RunSettings = SETTINGS) -> Job:
        return Job(
            ranks=equal_ranks(workers.ENTRY, self.crew),
            buffers=buffers,
            run_id="simulated",
            secret=b"s" * 32,
            settings=settings,
            cwd="/",
            sys_path=(),
            movable=True,
            regroups=regroups if self.in_memory else 0,
        )


class FitRun(GangRun):
    """One seed: a call of `fit`, with all its attempts."""

    draws = FitDrawn
    drawn: FitDrawn

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.disk, self.meshes = Disk(), list[Mesh]()
        self.after, self.ended = undisturbed(self.drawn.crew, self.drawn.epochs, self.drawn.steps_per_epoch)
        self.attempt = 0
        self._newest = 0  # the newest step that the attempt has made
        self._made: dict[Process, int] = {}  # the last step of each process
        self._follows: int | None = None  # the step that an attempt after a notice goes on from
        self._noticed: float | None = None  # when the attempt's driver heard of a notice
        self._paused = False
        self._report: dict[str, Any] = {}
        self._state = b""

    def _drive(self) -> None:
        task, replaced = self.drawn.task(), driver.ReplacedWorkers(SETTINGS)
        self._replaced = replaced
        notices: list[Mapping[str, Any]] = []

        def hear(event: Event) -> None:
            self._hear(event)
            if event.kind == "report":
                replaced.hear(event.fields)
                if event.fields["name"] == "notice":
                    notices.append(event.fields)
                    if self._noticed is None:
                        self._noticed = self.world.now

        def launch(stored: Sequence[StoredCheckpoint]) -> list[Outcome]:
            self._begins_attempt([each.header.step for each in stored])
            packed = workers.cloudpickle.dumps(task)
            data = (each.data for each in stored)
            self.job = self.drawn.job(packed, b"", b"", *data, regroups=replaced.left)
            self._launch = TaskLaunch(self) if self.drawn.on_tasks else local._LocalLaunch(self.job, None)
            self.gang = Gang(self.job, self._launch)
            try:
                outcomes = follow(self.gang, hear)
            except NotBegun:
                self._moves(self._began_at)
                raise driver.RunMoves(notices, step=None) from None
            report, data_ = driver._first_result(outcomes)
            if report["moved"]:
                self._moves(report["step"])
                raise driver.RunMoves(notices, step=report["step"], checkpoint=data_)
            return outcomes

        try:
            outcomes = driver.attempts(task, launch, self.world.say, replaced)
            self.outcome = outcomes
        except (KindlerError, KeyboardInterrupt) as exc:
            self.outcome = exc
        self.world.say(f"the run ended with {self.outcome!r}"[:300])
        self.is_over = True

    def _begins_attempt(self, stored: Sequence[int]) -> None:
        self.attempt += 1
        self._began_at = self._newest = max(stored, default=0)
        self.world.say(f"attempt {self.attempt} goes on after step {self._newest}")
        if self._follows is not None and self._follows != self._newest:
            raise Violation(f"after a notice at step {self._follows} the run goes on after {self._newest}")
        self._follows = self._noticed = None

    def _moves(self, step: int) -> None:
        self.world.say(f"the run moves after step {step}")
        if step != self._newest:
            raise Violation(f"the run moves after step {step}, and {self._newest} steps were made")
        self._follows = step

    # What ranks do.

    def enters_step(self, rank: int, number: int) -> None:
        here = self.world.current.process
        self.says(f"begins step {number + 1}")
        if self._noticed is not None and self.world.now - self._noticed > _SERVED_S and not self._paused:
            raise Violation(f"step {number + 1} begins long after a notice")
        mishap = self._planned.pop((rank, number), None)
        if mishap is not None:
            mishap(here)
        self.last[rank] = number + 1
        self.world.sleep(self.drawn.steps[number]["seconds"][rank])

    def applied(self, rank: int, step: int, weights: str) -> None:
        here = self.world.current.process
        self.says(f"has made step {step}")
        if weights != self.after[step]:
            raise Violation(f"rank {rank} has other weights after step {step} than an undisturbed run")
        if step <= self._made.get(here, 0):
            raise Violation(f"rank {rank} makes step {step} again")
        if step < self._newest:
            raise Violation(f"rank {rank} makes step {step}, and others have made {self._newest}")
        self._made[here] = step
        self._newest = max(self._newest, step)

    # What goes wrong.

    def _mishaps(self) -> list[Callable[[], None]]:
        replaced = [self._worker_dies] * 3 + [self._several_die, self._another_dies, self._first_dies]
        noticed = [self._notice] * 3 + [self._notice_and_loss] * 2 + [self._notice_and_interrupt]
        of_spark = [self._task_dies, self._machine_dies, self._connection_breaks, self._partition]
        return [
            *replaced,
            *noticed,
            *(of_spark if self.drawn.on_tasks else []),
            self._worker_pauses,
            self._driver_pauses,
            self._slow_network,
            self._interrupt,
            self._abort,
        ]

    def _bears(self, strain: float) -> None:
        """Where nothing is in a folder, ranks must be there to hand on what they have."""
        drawn, hub = self.drawn, self.gang._hub
        trains = hub is not None and all(
            process in self._made for process in (self._of(self.workers, rank) for rank in range(drawn.crew))
        )
        in_memory = drawn.in_memory and trains and self._newest < len(drawn.steps) - 1
        if self.excuses & {"notice", "interrupt"}:  # a loss in a vote ends the workers
            in_memory = False
        lasts = drawn.on_tasks and strain > 0.4  # the next attempt may meet it as well
        self.strain += strain if (drawn.has_folder and not lasts) or in_memory else 1.0

    def _kill(self, rank: int) -> None:
        if (process := self._of(self.workers, rank)) is not None:
            self.touched.add(rank)
            self._bears(0.34)
            self.world.say(f"NOW {process.name} is killed")
            process.end()

    def _several_die(self) -> None:
        draw, crew = self.world.random, self.drawn.crew
        ranks = draw.sample(range(crew), draw.randint(1, crew))
        gaps = [draw.choice([0.0, draw.random() * 0.05]) for _ in ranks]

        def die() -> None:
            for rank, gap in zip(ranks, gaps, strict=True):
                self.world.after(gap, self._kill, rank)

        self._later(f"the workers {ranks} are killed", die)

    def _another_dies(self) -> None:
        draw = self.world.random
        ranks = [self._rank(), draw.choice([self._rank(), self._rank()])]
        gap = draw.random() ** 2 * 4

        def die() -> None:
            self._kill(ranks[0])
            self.world.after(gap, self._kill, ranks[1])

        self._later(f"the worker of {ranks[0]} is killed, and {gap:.2f} s later that of {ranks[1]}", die)

    def _first_dies(self) -> None:
        self._later("the worker of 0 is killed", lambda: self._kill(0))

    def _is_noticed(self, rank: int | None, number: int) -> None:
        if self.is_over:
            return
        self.excuses.add("notice")
        hub = self.gang._hub
        known = hub._regrouping.absent if hub is not None and hub._regrouping is not None else {}
        crew = {number: self._of(self.workers, number) for number in range(self.drawn.crew)}
        gone = {number for number, process in crew.items() if process is None or process.paused}
        if gone - known.keys() and not self.drawn.has_folder:
            self.strain += 0.66  # whoever is lost before the driver knows it is lost in the vote
        if rank is None:
            if hub is not None:
                self.world.say("NOW the driver hears of a notice")
                key = f"executor {number}"
                self.driver.spawn("a watch", lambda: hub.notice("a machine", "decommissioned", key=key))
        elif (process := self._of(self.workers, rank)) is not None and hasattr(process, "sigterm"):
            self.world.say(f"NOW {process.name} gets SIGTERM")
            process.spawn("kindler-sigterm", process.sigterm)

    def _drawn_notice(self) -> Callable[[], None]:
        draw = self.world.random
        return partial(self._is_noticed, draw.choice([None, self._rank()]), draw.randrange(1000))

    def _notice(self) -> None:
        first, second = self._drawn_notice(), self._drawn_notice()
        again = self.world.random.choice([None, None, self.world.random.random() ** 2 * 2])

        def notice() -> None:
            first()
            if again is not None:
                self.world.after(again, second)

        self._later(f"a notice, and again after {again}", notice)

    def _notice_and_loss(self) -> None:
        draw, notice, rank = self.world.random, self._drawn_notice(), self._rank()
        gap = draw.random() ** 2 * draw.choice([-4, -4, 1])

        def happen() -> None:
            self.world.after(max(0.0, gap), self._kill, rank)
            self.world.after(max(0.0, -gap), notice)

        self._later(f"a notice, and {gap:.2f} s later the worker of {rank} is killed", happen)

    def _notice_and_interrupt(self) -> None:
        notice, gap = self._drawn_notice(), self.world.random.random() ** 2

        def interrupt() -> None:
            if not self.is_over:
                self.excuses.add("interrupt")
                self.strain += 1.0
                self.main.throw(KeyboardInterrupt())

        def happen() -> None:
            notice()
            self.world.after(gap, interrupt)

        self._later(f"a notice, and Ctrl-C {gap:.2f} s later", happen)

    def _worker_pauses(self) -> None:
        self._paused = True
        super()._worker_pauses()

    def _driver_pauses(self) -> None:
        self._paused = True
        super()._driver_pauses()

    # What must hold.

    def _judge(self) -> None:
        outcome = self.outcome
        if isinstance(outcome, Halted):
            self._judge_fit(outcome.outcomes, halted=True)
        elif isinstance(outcome, SyncError) and not isinstance(outcome, SyncTimeoutError):
            if not self.touched or self.strain < 0.99:
                raise Violation(f"nothing explains {outcome!r}; {sorted(self.touched)}, {self.strain:g}")
        elif isinstance(outcome, BaseException):
            self._judge_error(outcome)
        elif outcome is not None:
            self._judge_fit(outcome, halted=False)

    def _judge_fit(self, outcomes: list[Outcome], *, halted: bool) -> None:
        report, state = driver._first_result(outcomes)
        step, right = report["step"], self.ended
        if step != self._newest:
            raise Violation(f"the run says that it ended after step {step}, and made {self._newest}")
        if report["moved"]:
            saved = state or max(self.disk.checkpoints.items(), default=("", b""))[1]
            if not saved:
                if step:
                    raise Violation(f"nothing is left of the run after step {step}")
                return
            state = parse(saved).state
        elif step < len(self.drawn.steps) and not halted:
            raise Violation(f"the run ended after {step} of {len(self.drawn.steps)} steps")
        weights, _, _, made = json.loads(state)
        if made != step or weights not in (right[step], self.after[step]):
            raise Violation(f"the result after step {step} is that of {made}, or another one")
        rows = [row["num_samples"] for row in report["rows"] if row["steps"] == self.drawn.steps_per_epoch]
        all_rows = self.drawn.steps_per_epoch * sum(range(1, self.drawn.crew + 1))
        if any(count != all_rows for count in rows):
            raise Violation(f"epochs have counted {rows} rows instead of {all_rows}")


def substitutes() -> list[tuple[Any, dict[str, Any]]]:
    """What training's modules use instead, for `installed`."""
    clock, own = simulated.clock, _Own()
    return [
        (checkpoints, {"threading": simulated.threads, "folder_at": lambda _: world().scenario.disk}),
        (driver, {"time": clock}),
        (loop, {"time": clock}),
        (step_loop, {"time": clock}),
        (regroup, {"os": own}),
        (
            workers,
            {
                "Stopwatch": partial(goodput.Stopwatch, clock.perf_counter),
                "FRAMEWORKS": SimpleNamespace(
                    spec=lambda name: SimpleNamespace(loop="step"), load=lambda name: ToyReplica
                ),
                "SYNCS": SimpleNamespace(load=lambda name: ToySync),
                "open_rows": open_rows,
            },
        ),
    ]
