"""A world of one seed: its clock, threads, processes, machines and network, and all that goes wrong there.

Threads are greenlets. One runs at a time, until it waits; which one goes on, and how long anything takes, is
drawn from the seed. `threads`, `clock` and `queues` stand in for the modules `threading`, `time` and `queue`
(`installed`), so code of the product runs here as it is, and time passes only where all wait.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from greenlet import GreenletExit, getcurrent, greenlet

_MOST_TURNS = 200_000
_PREEMPTED = 0.02  # how often a thread loses its turn where it takes a lock
_world: World | None = None


def world() -> World:
    """The world of the seed that runs now."""
    assert _world is not None, "no world is installed"
    return _world


class Violation(AssertionError):
    """What must always hold did not."""


class World:
    def __init__(self, seed: int, *, longest_s: float) -> None:
        self.random = random.Random(seed)
        self.now = 1_000.0
        self.trace: list[str] = []
        self.scenario: Any = None  # what happens in it
        self.network: Any = None
        self.processes: list[Process] = []
        self._ends_at = self.now + longest_s
        self.main = getcurrent()
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._ready: list[Task] = []
        self._turns = 0
        self._current: Task | None = None

    def __enter__(self) -> World:
        global _world
        assert _world is None, "worlds do not meet"
        _world = self
        return self

    def __exit__(self, *_: object) -> None:
        global _world
        for process in self.processes:
            process.end()
        _world = None

    @property
    def current(self) -> Task:
        assert self._current is not None, "only a thread of the world can wait"
        return self._current

    def say(self, text: str) -> None:
        self.trace.append(f"{self.now - 1_000:9.3f}  {text}")

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def process(self, name: str, host: str, parent: Process | None = None) -> Process:
        process = Process(self, name, host, parent, next(self._numbers))
        self.processes.append(process)
        return process

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call a function, which must not wait, at that time."""
        heapq.heappush(self._timers, (when, next(self._numbers), call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, call, *args)

    def sleep(self, seconds: float) -> None:
        self.block([], seconds)

    def block(self, waiters: list[Task], timeout_s: float | None) -> bool:
        """Wait until somebody wakes one of `waiters`; whether that happened in time."""
        task = self.current
        if not task.process.alive:
            raise GreenletExit
        task.turn += 1
        task.woken, task.is_blocked = False, True
        waiters.append(task)
        if timeout_s is not None:
            self.after(max(0.0, timeout_s), task.time_is_over, task.turn)
        try:
            self.main.switch()
        finally:
            if task in waiters:
                waiters.remove(task)
        if task.interrupt is not None:
            interrupt, task.interrupt = task.interrupt, None
            raise interrupt
        return task.woken

    def perhaps_yield(self) -> None:
        """Another thread may come first, as anywhere in Python."""
        if self._current is not None and self._current.process.alive and self.chance(_PREEMPTED):
            self.sleep(0.0)

    def wake(self, task: Task) -> None:
        self._ready.append(task)

    def run(self, until: Callable[[], bool]) -> None:
        """Let the world go on until then; raise Violation if it never comes."""
        while not until():
            if self._ready:
                self._resume(self._pick())
            elif self._timers:
                when, _, call, args = heapq.heappop(self._timers)
                self.now = max(self.now, when)
                if self.now > self._ends_at:
                    raise Violation(f"it is not over in time; {self._waiting()}")
                call(*args)
            else:
                raise Violation(f"all wait for ever: {self._waiting()}")

    def _pick(self) -> Task:
        ready = self._ready
        index = self.random.randrange(len(ready)) if len(ready) > 1 else 0
        ready[index], ready[-1] = ready[-1], ready[index]
        return ready.pop()

    def _resume(self, task: Task) -> None:
        self._turns += 1
        if self._turns > _MOST_TURNS:
            raise Violation(f"it goes round in circles; {self._waiting()}")
        self.now += 1e-5
        if task.process.paused:
            task.process.parked.append(task)
        elif task.process.alive:
            self.switch(task, task.greenlet.switch)

    def switch(self, task: Task, switch: Callable[..., Any], *args: Any) -> None:
        before, self._current = self._current, task
        try:
            switch(*args)
        finally:
            self._current = before

    def _waiting(self) -> str:
        return ", ".join(
            f"{task.name} of {task.process.name}"
            for process in self.processes
            if process.alive
            for task in process.tasks
        )


class Task:
    """A thread of the world."""

    def __init__(self, process: Process, name: str, run: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self.greenlet = greenlet(self._run, process.world.main)
        self.turn = 0  # of waiting
        self.is_blocked = self.woken = False
        self.interrupt: BaseException | None = None
        self.is_over = False
        self.joining: list[Task] = []
        self._run_it = run
        process.tasks[self] = None
        process.world.wake(self)

    def _run(self) -> None:
        try:
            self._run_it()
        except GreenletExit:
            pass
        except SystemExit as end:
            self.process.world.after(0.0, self.process.end, int(str(end)))
        except Exception as exc:
            self.process.world.say(f"{self.name} of {self.process.name} raised {exc!r}")
            raise Violation(f"the thread {self.name} of {self.process.name} ended with {exc!r}") from exc
        finally:
            self.is_over = True
            self.process.tasks.pop(self, None)
            for other in list(self.joining):
                other.wake()

    def wake(self) -> None:
        self.woken = self.woken or self.is_blocked
        self._go_on()

    def throw(self, interrupt: BaseException) -> None:
        """Raise where it waits, now or the next time."""
        self.interrupt = interrupt
        self._go_on()

    def time_is_over(self, turn: int) -> None:
        if self.turn == turn:
            self._go_on()

    def _go_on(self) -> None:
        if self.is_blocked:
            self.is_blocked = False
            self.process.world.wake(self)

    def kill(self) -> None:
        self.is_blocked = False
        if self.greenlet:  # it has begun, and not ended
            self.process.world.switch(self, self.greenlet.throw, GreenletExit)
        self.is_over = True
        self.process.tasks.pop(self, None)


class Process:
    """Threads that end together. Its children end with it, as they hold its leash."""

    def __init__(self, world: World, name: str, host: str, parent: Process | None, pid: int) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.parent = parent
        self.pid = pid
        self.alive = True
        self.paused = False
        self.stopped = False  # paused by a signal: everybody can see it
        self.code: int | None = None
        self.parked: list[Task] = []
        self.tasks: dict[Task, None] = {}
        self.ends: list[Any] = []  # of its connections
        self.ended: list[Task] = []

    def spawn(self, name: str, run: Callable[[], object]) -> Task:
        return Task(self, name, run)

    def end(self, code: int = -9, *, silently: bool = False) -> None:
        """End it now; `silently` as with its machine, of which nobody hears. Not for its own threads."""
        if not self.alive:
            return
        self.alive, self.code = False, code
        for other in self.world.processes:
            if other.parent is self:
                other.end(silently=silently)
        for end in self.ends:
            end.vanish(silently=silently)
        for task in list(self.tasks):
            task.kill()
        for waiting in list(self.ended):
            waiting.wake()

    def pause(self, seconds: float, *, stopped: bool) -> None:
        if self.alive and not self.paused:
            self.paused, self.stopped = True, stopped
            self.world.after(seconds, self.go_on)

    def go_on(self) -> None:
        self.paused = self.stopped = False
        parked, self.parked = self.parked, []
        for task in parked:
            self.world.wake(task)


def join(task: Task, timeout_s: float | None) -> None:
    if not task.is_over:
        world().block(task.joining, timeout_s)


class _Thread:
    def __init__(
        self, target: Callable[..., object], name: str = "", args: tuple[Any, ...] = (), daemon: bool = False
    ) -> None:
        self.name = name
        self._call = lambda: target(*args)
        self._task: Task | None = None

    def start(self) -> None:
        self._task = world().current.process.spawn(self.name, self._call)

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        join(self._task, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_over


class _Lock:
    """Reentrant: nothing here relies on a lock that its own thread would wait for."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._waiters: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world().perhaps_yield()
        task = world()._current
        deadline = None if timeout < 0 else world().now + timeout
        while self._owner is not None and self._owner is not task and not self._owner.is_over:
            if not blocking or (deadline is not None and world().now >= deadline):
                return False
            world().block(self._waiters, None if deadline is None else deadline - world().now)
        self._owner = task
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiters:
                self._waiters[0].wake()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Condition:
    def __init__(self, lock: _Lock | None = None) -> None:
        self._lock = lock or _Lock()
        self._waiters: list[Task] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        depth, self._lock._depth = self._lock._depth, 1
        self._lock.release()
        try:
            return world().block(self._waiters, timeout)
        finally:
            if world().current.process.alive:
                self._lock.acquire()
                self._lock._depth = depth

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else world().now + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - world().now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for task in self._waiters[:n]:
            self._waiters.remove(task)
            task.wake()

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class _Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        for task in list(self._waiters):
            self._waiters.remove(task)
            task.wake()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            world().block(self._waiters, timeout)
        return self._is_set


class _Queue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiters: list[Task] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiters:
            self._waiters.pop(0).wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        deadline = None if timeout is None else world().now + timeout
        while not self._items:
            left = None if deadline is None else deadline - world().now
            if not block or (left is not None and left <= 0):
                raise _Empty
            world().block(self._waiters, left)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def __class_getitem__(cls, _: Any) -> type[_Queue]:
        return cls


class _Empty(Exception):
    pass


threads = SimpleNamespace(
    Thread=_Thread,
    Lock=_Lock,
    RLock=_Lock,
    Condition=_Condition,
    Event=_Event,
    current_thread=lambda: world().current,
)
clock = SimpleNamespace(
    monotonic=lambda: world().now,
    perf_counter=lambda: world().now,
    time=lambda: 1.8e9 + world().now,
    sleep=lambda seconds: world().sleep(seconds),
)
queues = SimpleNamespace(Queue=_Queue, SimpleQueue=_Queue, Empty=_Empty)


@contextmanager
def installed(*substitutes: tuple[Any, dict[str, Any]]) -> Iterator[None]:
    """Replace names of modules, while the block runs."""
    patches = [patch.multiple(module, **names) for module, names in substitutes]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
