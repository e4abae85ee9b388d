"""The runtime in a simulated world: clients and workers run as they are, over a simulated broker.

A seed draws the kind of broker, the tasks, how long each takes, and what goes wrong meanwhile: workers die,
stop for a while or are stopped, connections break, the broker is away, a client cancels.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kindler.errors import BrokerError, KindlerError, TaskCancelledError, WorkerLostError
from kindler.runtime.broker import BrokerEngine
from kindler.runtime.broker_worker import Worker, _Slot
from kindler.runtime.engine import Listener
from kindler.runtime.messages import Report, Task
from tests.unit.simulation import brokers
from tests.unit.simulation.network import Network
from tests.unit.simulation.world import Process, Violation, World, world

LONGEST_S = 1_500.0
LEASE_S = 6.0
WAIT_S, TIMEOUT_S = 60.0, 40.0


class TaskEngine:
    """Stands in for `LocalEngine`: a task takes its time, and says so."""

    def __init__(self, store: str, *, workers: int | None, **_: Any) -> None:
        self.workers = workers or 1

    def submit(self, task: Task, listen: Listener) -> None:
        run = world().scenario
        process = world().current.process
        run.begins(task.id, process)
        listen(Report("running"))
        world().sleep(run.seconds[task.id])
        run.ends(task.id, process)
        cancelled = task.id in run.cancelled_here.get(process.pid, ())
        listen(Report.cancelled("asked to") if cancelled else Report("done", (result_of(task.id),)))

    def cancel(self, task_id: str) -> None:
        world().scenario.cancelled_here.setdefault(world().current.process.pid, set()).add(task_id)

    def load(self) -> Any:
        return SimpleNamespace(workers=self.workers, busy=0)


def result_of(task_id: str) -> bytes:
    return f"the result of {task_id}".encode()


class TaskRun:
    """One seed: tasks from a client to workers, and all that is seen of them."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed, longest_s=LONGEST_S)
        self.world.scenario = self
        Network(self.world)
        draw = self.world.random
        self.broker = brokers.Broker(draw.choice(["redis", "redis", "amqp"]), LEASE_S)
        self.client = self.world.process("client", "client")
        self.retries = draw.choice([0, 1, 2, 3])
        self.names = [f"task-{number}" for number in range(draw.randint(1, 5))]
        self.seconds = {name: draw.random() ** 3 * 25 for name in self.names}
        self.workers: dict[Process, Worker] = {}
        self.reports: dict[str, list[Report]] = {name: [] for name in self.names}
        self.runs: dict[str, int] = dict.fromkeys(self.names, 0)
        self.running: dict[str, list[Process]] = {name: [] for name in self.names}
        self.done: set[str] = set()  # acknowledged, and its client has the result
        self.cancelled: set[str] = set()
        self.cancelled_here: dict[int, set[str]] = {}
        self.kills: dict[str, int] = dict.fromkeys(self.names, 0)
        self.mishaps: set[str] = set()
        self.ends_worker: set[str] = set()
        self.is_over = False

    def run(self) -> None:
        with self.world:
            self.world.say(f"{self.broker.kind}, {len(self.names)} tasks, {self.retries} retries")
            for _ in range(self.world.random.randint(1, 3)):
                self._start_worker()
            self._plan_mishaps()
            self.client.spawn("main", self._submit)
            self.world.run(lambda: self.is_over)
            self._judge()

    # What workers and the broker do.

    def begins(self, name: str, process: Process) -> None:
        self.world.say(f"{process.name} begins {name}")
        self.runs[name] += 1
        others = [one for one in self.running[name] if one.alive]
        if others and not self.mishaps & {"pause", "break", "broker", "stop"}:
            raise Violation(f"{name} is begun by {process.name} while {others[0].name} runs it")
        if name in self.done and not self.mishaps:
            raise Violation(f"{name} is begun again after its result was acknowledged")
        self.running[name].append(process)

    def ends(self, name: str, process: Process) -> None:
        self.world.say(f"{process.name} has done {name}")
        self.running[name].remove(process)
        if name in self.ends_worker:
            self.ends_worker.remove(name)
            self.world.after(self.world.random.random() ** 2 * 0.3, self._die, process)

    def acknowledged(self, name: str) -> None:
        if any(report.state != "running" for report in self.reports.get(name, ())):
            self.done.add(name)

    # What the client does.

    def _submit(self) -> None:
        engine = BrokerEngine("memory", f"{self.broker.kind}://broker?lease_s={LEASE_S}")
        for name in self.names:
            task = Task(
                id=name,
                shelf="models",
                bucket="default",
                name="net@1",
                verb="predict",
                buffers=(b"", b""),
                timeout_s=TIMEOUT_S,
                wait_s=WAIT_S,
                max_retries=self.retries,
            )
            try:
                engine.submit(task, self._listener(name))
            except KindlerError as exc:
                self.reports[name].append(Report.failed(exc))
            self.world.sleep(self.world.random.random() * 2)
        for name in sorted(self.cancelled):
            self.world.say(f"the client cancels {name}")
            engine.cancel(name)
            self.world.sleep(self.world.random.random() * 5)
        while any(not self._last(name) for name in self.names):
            self.world.sleep(1.0)
        self.world.sleep(3 * LEASE_S)  # for what must not come any more
        engine.close()
        self.is_over = True

    def _listener(self, name: str) -> Callable[[Report], None]:
        def listen(report: Report) -> None:
            self.world.say(f"the client hears that {name} is {report.state}")
            self.reports[name].append(report)

        return listen

    def _last(self, name: str) -> list[Report]:
        return [report for report in self.reports[name] if report.state != "running"]

    # What goes wrong.

    def _start_worker(self) -> None:
        process = self.world.process(f"worker {len(self.workers)}", f"host-{len(self.workers)}")
        process.spawn("main", lambda: self._work(process))

    def _work(self, process: Process) -> None:
        url = f"{self.broker.kind}://broker?lease_s={LEASE_S}"
        worker = Worker("memory", url, labels=["default"], workers=1, trusted=True)
        self.workers[process] = worker
        slots = [_Slot(worker) for _ in range(self.world.random.choice([1, 1, 2]))]
        for slot in slots:
            process.spawn("slot", slot.run)
        process.spawn("commands", worker._listen)

    def _plan_mishaps(self) -> None:
        draw = self.world.random
        mishaps = [self._worker_dies, self._worker_dies, self._worker_pauses, self._connection_breaks]
        mishaps += [self._broker_is_away, self._worker_stops, self._cancel]
        for _ in range(draw.choice([0, 1, 1, 2, 2, 3])):
            mishap = draw.choice(mishaps)
            self.world.after(draw.random() * 25, mishap)

    def _worker(self) -> Process | None:
        alive = [process for process in self.workers if process.alive]
        return self.world.random.choice(alive) if alive else None

    def _worker_dies(self) -> None:
        if self.world.chance(0.5):  # when it has the next result of a task
            self.ends_worker.add(self.world.random.choice(self.names))
        elif (process := self._worker()) is not None:
            self._die(process)

    def _die(self, process: Process) -> None:
        self.world.say(f"NOW {process.name} dies")
        self.mishaps.add("death")
        for name in self.names:
            # Also one that it has not begun: it may have been given to it.
            self.kills[name] += 1
        process.end()
        self.world.after(self.world.random.random(), self.broker.process_ended, process)
        self.world.after(self.world.random.random() * 5, self._start_worker)

    def _worker_pauses(self) -> None:
        if (process := self._worker()) is None:
            return
        seconds = self.world.random.choice([1.0, 15.0, 60.0])
        self.world.say(f"NOW {process.name} pauses for {seconds} s")
        self.mishaps.add("pause")
        process.pause(seconds, stopped=True)
        if self.broker.kind == "amqp" and seconds > brokers.NOTICES_S:
            self.world.after(brokers.NOTICES_S, self.broker.process_ended, process)

    def _worker_stops(self) -> None:
        if (process := self._worker()) is not None:
            self.world.say(f"NOW {process.name} is asked to stop")
            self.mishaps.add("stop")
            self.workers[process].stopping.set()
            self._start_worker()

    def _connection_breaks(self) -> None:
        if self.broker.connections:
            connection = self.world.random.choice(self.broker.connections)
            self.world.say(f"NOW a connection of {connection.process.name} breaks")
            self.mishaps.add("break")
            self.broker.lost(connection)

    def _broker_is_away(self) -> None:
        self.world.say("NOW the broker is away")
        self.mishaps.add("broker")
        self.broker.is_down = True
        for connection in list(self.broker.connections):
            self.broker.lost(connection)

        def back() -> None:
            self.world.say("NOW the broker is back")
            self.broker.is_down = False

        self.world.after(self.world.random.choice([1.0, 10.0]), back)

    def _cancel(self) -> None:
        self.cancelled.add(self.world.random.choice(self.names))

    # What must hold.

    def _judge(self) -> None:
        for name in self.names:
            last = self._last(name)
            if len(last) != 1:
                raise Violation(f"{name} has {len(last)} last reports")
            most = (1 + self.retries) ** 2  # the client sends it again as often, too
            if self.runs[name] > most:
                raise Violation(f"{name} ran {self.runs[name]} times, with {self.retries} retries")
            report = last[0]
            if report.state == "done":
                if report.buffers != (result_of(name),):
                    raise Violation(f"{name} got {report.buffers}")
                if self.runs[name] > 1 and not self.mishaps:
                    raise Violation(f"{name} ran {self.runs[name]} times, and nothing went wrong")
            else:
                self._judge_error(name, report.exception())

    def _judge_error(self, name: str, error: KindlerError) -> None:
        if isinstance(error, TaskCancelledError):
            fair = name in self.cancelled
        elif isinstance(error, WorkerLostError | BrokerError):
            fair = self.kills[name] > self.retries or bool(self.mishaps - {"death"})
        else:
            fair = False
        if not fair:
            raise Violation(f"nothing explains {error!r} of {name}; {sorted(self.mishaps)}")
