"""`om.runtime`: turns calls into tasks and submits them to an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kindler.errors import ConfigError, KindlerError
from kindler.models.registry import MODEL_KINDS
from kindler.runtime import value_codec
from kindler.runtime.calls import Call, MapReduce, Parallel, RuntimeModel, RuntimeScript, Sequence, TaskHandle
from kindler.runtime.engine import Engine, Load
from kindler.runtime.messages import Report, Task, TaskSettings
from kindler.store import Store, Version
from kindler.store.names import parse_selector


class Runtime:
    """Runs stored models and functions on workers: `om.runtime`.

    Immutable: `require`, `callback` and `options` return a new runtime.

    Args:
        store: The store.
        bucket: The bucket in the store.
        engine: Returns the engine; called when the first task is submitted.
        settings: How to run tasks.
    """

    def __init__(
        self, store: Store, bucket: str, engine: Callable[[], Engine], settings: TaskSettings | None = None
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

    def sequence(self) -> Sequence:
        """Tasks in sequence: call methods of its `model(...)` and `script(...)`, then `run()`."""
        return Sequence(self._handle, self._started, self.settings)

    def parallel(self) -> Parallel:
        """Tasks in parallel: call methods of its `model(...)` and `script(...)`, then `run()`."""
        return Parallel(self._handle, self._started, self.settings)

    def mapreduce(self) -> MapReduce:
        """Tasks in parallel, and a last one that is called with the list of their results, then `run()`."""
        return MapReduce(self._handle, self._started, self.settings)

    def load(self) -> Load:
        """The number of workers, of busy ones, and of tasks that wait for one.

        Raises:
            BrokerError: The broker cannot be reached.
        """
        return self._engine().load()

    def _sent(self, call: Call) -> TaskHandle:
        """Submit a call now; its errors are raised here."""
        handle = self._handle(call)
        self._engine().submit(self._task(call, handle), handle.update)
        return handle

    def _started(self, call: Call, handle: TaskHandle) -> None:
        """Submit a call of a task group; its errors go to the handle."""
        if handle.ready():
            return
        try:
            self._engine().submit(self._task(call, handle), handle.update)
        except KindlerError as exc:
            handle.update(Report.failed(exc))

    def _handle(self, call: Call) -> TaskHandle:
        handle = TaskHandle(str(call), resolve=self._version, cancel=self._cancel)
        if callable(call.settings.callback):
            handle.when_ended(call.settings.callback)
        return handle

    def _task(self, call: Call, handle: TaskHandle) -> Task:
        version = self._store.find(self._bucket, call.shelf, parse_selector(call.name))
        callback = call.settings.callback if isinstance(call.settings.callback, str) else None
        if callback is not None:
            self._store.find(self._bucket, "scripts", parse_selector(callback))
        arguments, buffers = value_codec.encode([list(call.args), dict(call.options)])
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
            arguments=arguments,
            buffers=tuple(buffers),
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
