"""`store.runtime`: stored models and scripts, whose method calls become tasks of an engine; the handle of a
task, which gets the result when it ends; and groups of tasks.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kindler.errors import ConfigError, KindlerError, TaskTimeoutError, fresh
from kindler.models.registry import MODEL_KINDS
from kindler.runtime import value_codec
from kindler.runtime.engine import Engine, Load
from kindler.runtime.messages import Report, Task, TaskSettings
from kindler.store import Version, VersionStore
from kindler.store.names import parse_selector

if TYPE_CHECKING:
    from typing_extensions import Self

Status = Literal["pending", "running", "done", "failed", "cancelled"]

_log = logging.getLogger("kindler.runtime")
_CANCEL_TIMEOUT_S = 30.0


class TaskHandle:
    """A task and, once it has ended, its result. Thread-safe.

    Attributes:
        id: The task's id.
        call: The call, such as "predict() of 'net'".
        log: The last lines that the task printed; empty until it has ended.
    """

    def __init__(self, call: str, runtime: Runtime) -> None:
        self.id = uuid.uuid4().hex
        self.call = call
        self.log = ""
        self._runtime = runtime
        self._status: Status = "pending"
        self._report: Report | None = None
        self._error: KindlerError | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._then: list[Callable[[TaskHandle], None]] = []

    def __repr__(self) -> str:
        return f"<{self.call}: {self._status}>"

    @property
    def status(self) -> Status:
        """The state: "pending", "running", "done", "failed" or "cancelled"."""
        return self._status

    @property
    def error(self) -> KindlerError | None:
        """The exception that `get` raises, or None."""
        return self._error

    @property
    def size(self) -> int:
        """The size of the result and the log in bytes; 0 until the task has ended."""
        return 0 if self._report is None else sum(map(len, self._report.buffers)) + len(self.log)

    def ready(self) -> bool:
        """Whether the task has ended, successfully or not."""
        return self._ended.is_set()

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it. The result of `fit` is the new version.

        Args:
            timeout: Seconds to wait; None waits until the task ends.

        Raises:
            TaskTimeoutError: The task has not ended yet and continues; or it exceeded its time limit.
            TaskCancelledError: The task was cancelled.
            WorkerLostError: The task's workers were lost, one after the other.
            WorkerError: The code of the task raised; also an instance of the type that was raised.
            KindlerError: Any other error of Kindler.
        """
        if not self._ended.wait(timeout):
            raise TaskTimeoutError(task=self.call, waited_s=timeout or 0.0, goes_on=True)
        if self._error is not None:
            raise fresh(self._error)
        assert self._report is not None
        return self._report.result(self._runtime._version)

    def cancel(self) -> bool:
        """Cancel the task, even if it is running; returns whether that succeeded."""
        if not self._ended.is_set():
            self._runtime._cancel(self)
            self._ended.wait(_CANCEL_TIMEOUT_S)
        return self._status == "cancelled"

    def update(self, report: Report) -> None:
        """Take an engine's report; ignored once the task has ended."""
        with self._lock:
            if self._ended.is_set():
                return
            if report.state in ("failed", "cancelled"):
                self._error = report.exception()
            self._status = report.state  # type: ignore[assignment]  # checked where it was read
            if report.state == "running":
                return
            self._report, self.log = report, report.log
            then, self._then = self._then, []
            self._ended.set()
        if then:  # not on the engine's thread: a callback may wait for another task
            run = threading.Thread(target=self._call_back, args=(then,), name="kindler-callback", daemon=True)
            run.start()

    def when_ended(self, call: Callable[[TaskHandle], None]) -> None:
        """Call a function with this handle when the task has ended; immediately if it already has."""
        with self._lock:
            if not self._ended.is_set():
                self._then.append(call)
                return
        self._call_back([call])

    def _call_back(self, then: list[Callable[[TaskHandle], None]]) -> None:
        for call in then:
            try:
                call(self)
            except Exception:  # noqa: BLE001 - the user's code, and nobody else to raise it to
                _log.exception("the callback of %r failed", self)


@dataclass(frozen=True, slots=True)
class Call:
    """A method call on a model or script."""

    shelf: str
    name: str
    verb: str
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: TaskSettings = field(default_factory=TaskSettings)

    def __str__(self) -> str:
        return f"{self.verb}() of {self.name!r}"


Sender = Callable[[Call], TaskHandle]


class _Proxy:
    shelf: str

    def __init__(self, name: str, send: Sender, settings: TaskSettings) -> None:
        self.name = name
        self._send = send
        self._settings = settings

    def __repr__(self) -> str:
        return f"<{self.shelf.removesuffix('s')} {self.name!r} of the runtime>"

    def require(self, label: str | None) -> Self:
        """The same, on workers with this label; None means any worker."""
        return type(self)(self.name, self._send, replace(self._settings, label=label or "default"))

    def _called(self, verb: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> TaskHandle:
        return self._send(Call(self.shelf, self.name, verb, args, options, self._settings))


class RuntimeModel(_Proxy):
    """A stored model whose methods run on a worker.

    Data is an array, a table, a list or a dict, which is sent to the worker; or the name of a dataset,
    which the worker reads. `"iris[width]"` selects a column of it, `"iris[^kind]"` all columns but one.
    Other arguments are passed to the model's own method.
    """

    shelf = "models"

    def predict(self, data: Any, **options: Any) -> TaskHandle:
        """Compute the model's outputs for each row."""
        return self._called("predict", (data,), options)

    def predict_proba(self, data: Any, **options: Any) -> TaskHandle:
        """Compute the probability of each class for each row; scikit-learn models only."""
        return self._called("predict_proba", (data,), options)

    def decision_function(self, data: Any, **options: Any) -> TaskHandle:
        """Compute the decision function of each row; scikit-learn models only."""
        return self._called("decision_function", (data,), options)

    def transform(self, data: Any, **options: Any) -> TaskHandle:
        """Transform the data; scikit-learn transformers only."""
        return self._called("transform", (data,), options)

    def score(self, data: Any, labels: Any = None, **options: Any) -> TaskHandle:
        """Evaluate the model: its own score, or a dict of loss and metrics."""
        return self._called("score", (data, labels), options)

    def fit(self, data: Any, labels: Any = None, **options: Any) -> TaskHandle:
        """Train the model and store it as its next version, which is the result.

        Args:
            data: The training data.
            labels: The labels, if they are not in the data.
            **options: For Keras and PyTorch models and estimators, the arguments of `Estimator.fit` and of
                `from_keras` or `from_torch`: `epochs`, `batch_size`, `workers`, `engine`. A PyTorch model
                needs `optimizer` and `loss`, by the names of PyTorch's classes, and takes `lr`. With
                `engine="spark"` Spark reads the datasets, and `spark={...}` are the arguments of
                `kindler.init`. For scikit-learn, the arguments of the model's own `fit`.
        """
        return self._called("fit", (data, labels), options)

    def reduce(self, results: Any = None, **options: Any) -> TaskHandle:
        """Combine a list of results; stored functions only. `mapreduce` passes the list itself."""
        return self._called("reduce", (results,), options)

    def partial_fit(self, data: Any, labels: Any = None, **options: Any) -> TaskHandle:
        """Continue training with these rows; the same as `fit` for models whose `fit` always continues."""
        return self._called("partial_fit", (data, labels), options)


class RuntimeScript(_Proxy):
    """A stored function that runs on a worker. Requires a runtime with `trusted=True`, as it is code."""

    shelf = "scripts"

    def run(self, *args: Any, **options: Any) -> TaskHandle:
        """Call the function."""
        return self._called("run", args, options)


Order: TypeAlias = Literal["parallel", "sequence", "mapreduce"]


class TaskGroup:
    """Tasks that are submitted together by `run()`.

    `runtime.parallel()`: all at once, as far as workers are available. `runtime.sequence()`: one after the
    other; names are resolved when a task's turn comes, so `predict` after `fit` uses the new version.
    `runtime.mapreduce()`: in parallel, and a last one, `model(name).reduce()` or `script(name).run()` of a
    stored function, that is called with the list of their results. A task that fails, or is cancelled,
    cancels those that wait for it.
    """

    def __init__(self, runtime: Runtime, order: Order) -> None:
        self._runtime = runtime
        self._order = order
        self._tasks: list[tuple[Call, TaskHandle]] = []
        self._waits_for: list[set[int]] = []
        self._lock = threading.Lock()
        self._ran = False

    def __enter__(self) -> TaskGroup:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __iter__(self) -> Iterator[TaskHandle]:
        return iter(self.handles)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def handles(self) -> list[TaskHandle]:
        """The handles of the tasks, in the order of the calls."""
        return [handle for _, handle in self._tasks]

    def model(self, name: str) -> RuntimeModel:
        """A stored model whose method calls become tasks of this group."""
        return RuntimeModel(name, self._add, self._runtime.settings)

    def script(self, name: str) -> RuntimeScript:
        """A stored function whose calls become tasks of this group."""
        return RuntimeScript(name, self._add, self._runtime.settings)

    def run(self) -> TaskGroup:
        """Submit the tasks and return this group, which gives their results."""
        last = len(self._tasks) - 1
        if self._ran:
            raise ConfigError("run() was called already.\nHint: make another sequence() or parallel().")
        if self._order == "mapreduce" and last < 1:
            raise ConfigError("mapreduce() needs at least one call, and a last one that takes their results.")
        self._ran = True
        for i in range(last + 1):
            waits = self._order == "sequence" or (self._order == "mapreduce" and i == last)
            self._waits_for.append(set(range(i)) if waits else set())
        free = [i for i, waits_for in enumerate(self._waits_for) if not waits_for]
        for i, handle in enumerate(self.handles):
            handle.when_ended(functools.partial(self._ended, i))
        for i in free:
            self._runtime._start(*self._tasks[i])
        return self

    def getall(self, timeout: float | None = None) -> list[Any]:
        """The results of all tasks, in the order of the calls.

        Args:
            timeout: Seconds to wait for all of them together; None waits without a limit.

        Raises:
            KindlerError: The error of the first task that failed.
        """
        self._must_run()
        deadline = None if timeout is None else time.monotonic() + timeout
        return [
            handle.get(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for handle in self.handles
        ]

    def get(self, timeout: float | None = None) -> Any:
        """The result of the last task."""
        results = self.getall(timeout)
        return results[-1] if results else None

    def ready(self) -> bool:
        """Whether all tasks have ended."""
        return all(handle.ready() for handle in self.handles)

    @property
    def status(self) -> list[Status]:
        """The state of each task."""
        return [handle.status for handle in self.handles]

    def cancel(self) -> None:
        """Cancel the tasks that have not ended."""
        self._must_run()
        for handle in reversed(self.handles):
            handle.cancel()

    def _add(self, call: Call) -> TaskHandle:
        if self._ran:
            raise ConfigError(
                "calls cannot be added after run().\nHint: make another sequence() or parallel()."
            )
        handle = self._runtime._handle(call)
        self._tasks.append((call, handle))
        return handle

    def _ended(self, number: int, ended: TaskHandle) -> None:
        # The last first: each of them names the task that failed, and not one that this cancels.
        for (call, handle), waits_for in reversed([*zip(self._tasks, self._waits_for, strict=True)]):
            with self._lock:
                if number not in waits_for:
                    continue
                if ended.status == "done":
                    waits_for.remove(number)
                is_free = not waits_for
            if ended.status != "done":
                ending = "failed" if ended.status == "failed" else "was cancelled"
                handle.update(Report.cancelled(f"not started, because {ended.call} {ending}."))
            elif is_free and self._order == "mapreduce":
                self._runtime._start(replace(call, args=([one.get(0) for one in self.handles[:-1]],)), handle)
            elif is_free:
                self._runtime._start(call, handle)

    def _must_run(self) -> None:
        if not self._ran:
            raise ConfigError("the tasks have not been started.\nHint: call run() first.")


class Runtime:
    """Runs stored models and functions on workers: `store.runtime`.

    Immutable: `require`, `callback` and `options` return a new runtime.

    Args:
        store: The store.
        bucket: The bucket in the store.
        engine: Returns the engine; called when the first task is submitted.
        settings: How to run tasks.
    """

    def __init__(
        self,
        store: VersionStore,
        bucket: str,
        engine: Callable[[], Engine],
        settings: TaskSettings | None = None,
    ) -> None:
        self.settings = settings or TaskSettings()
        self._store = store
        self._bucket = bucket
        self._engine = engine

    def __repr__(self) -> str:
        return f"<the runtime of the bucket {self._bucket!r} in {self._store!r}>"

    def model(self, name: str) -> RuntimeModel:
        """A stored model whose methods run on a worker and return handles."""
        return RuntimeModel(name, self._sent, self.settings)

    def script(self, name: str) -> RuntimeScript:
        """A stored function; `run` calls it on a worker and returns a handle."""
        return RuntimeScript(name, self._sent, self.settings)

    def options(self, **settings: Any) -> Runtime:
        """The same runtime with other settings, such as `timeout_s` or `trusted`; see `TaskSettings`."""
        unknown = sorted(set(settings) - set(TaskSettings.__slots__))
        if unknown:
            known = ", ".join(TaskSettings.__slots__)
            raise ConfigError(
                f"options() received unknown settings: {', '.join(unknown)}; available: {known}."
            )
        return type(self)(self._store, self._bucket, self._engine, replace(self.settings, **settings))

    def require(self, label: str | None) -> Runtime:
        """The same runtime on workers with this label; None means any worker."""
        return self.options(label=label or "default")

    def callback(self, target: str | Callable[[TaskHandle], Any] | None) -> Runtime:
        """The same runtime with a callback for tasks that have ended.

        Args:
            target: The name of a script, which the worker calls with the result of a successful task (it is
                code, so this requires `trusted=True`); or a function, which this process calls with the
                handle, on another thread.
        """
        return self.options(callback=target)

    def sequence(self) -> TaskGroup:
        """Tasks in sequence: call methods of its `model(...)` and `script(...)`, then `run()`."""
        return TaskGroup(self, "sequence")

    def parallel(self) -> TaskGroup:
        """Tasks in parallel: call methods of its `model(...)` and `script(...)`, then `run()`."""
        return TaskGroup(self, "parallel")

    def mapreduce(self) -> TaskGroup:
        """Tasks in parallel, and a last one that is called with the list of their results, then `run()`."""
        return TaskGroup(self, "mapreduce")

    def load(self) -> Load:
        """The number of workers, of busy workers, and of waiting tasks.

        Raises:
            BrokerError: The broker cannot be reached.
        """
        return self._engine().load()

    def _sent(self, call: Call) -> TaskHandle:
        """Submit a call now; its errors are raised here."""
        handle = self._handle(call)
        self._engine().submit(self._task(call, handle), handle.update)
        return handle

    def _start(self, call: Call, handle: TaskHandle) -> None:
        """Submit a call of a task group; its errors go to the handle."""
        if handle.ready():
            return
        try:
            self._engine().submit(self._task(call, handle), handle.update)
        except KindlerError as exc:
            handle.update(Report.failed(exc))

    def _handle(self, call: Call) -> TaskHandle:
        handle = TaskHandle(str(call), self)
        if callable(call.settings.callback):
            handle.when_ended(call.settings.callback)
        return handle

    def _task(self, call: Call, handle: TaskHandle) -> Task:
        version = self._store.find(self._bucket, call.shelf, parse_selector(call.name))
        callback = call.settings.callback if isinstance(call.settings.callback, str) else None
        if callback is not None:
            self._store.find(self._bucket, "scripts", parse_selector(callback))
        # What a task computes with; tasks of one family may share a process.
        family = "function" if call.shelf == "scripts" else MODEL_KINDS.family(version.kind, version.meta)
        return Task(
            **{name: getattr(call.settings, name) for name in TaskSettings.__slots__}
            | {"callback": callback},
            id=handle.id,
            shelf=call.shelf,
            bucket=self._bucket,
            name=str(version),
            verb=call.verb,
            buffers=value_codec.encode([list(call.args), dict(call.options)]),
            family=family,
        )

    def _cancel(self, handle: TaskHandle) -> None:
        # It may not have been submitted: a task of a sequence whose turn has not come.
        waits = handle.status == "pending"
        self._engine().cancel(handle.id)
        if waits:
            handle.update(Report.cancelled(f"{handle.call} was cancelled."))

    def _version(self, fields: Mapping[str, Any]) -> Version:
        selector = parse_selector(f"{fields['name']}@{int(fields['number'])}")
        return self._store.find(str(fields["bucket"]), str(fields["shelf"]), selector)
