"""Tasks on the store's runtime: training, scoring, scripts, and asynchronous predictions.

A request with the header `async: true` is answered with 202 and a task id; clients poll for the result. How
and where tasks run is up to the runtime.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Annotated, Any, TypeAlias
from urllib.parse import parse_qsl

from anyio import move_on_after
from fastapi import APIRouter, Depends, Header, Query, Request

from kindler.errors import KindlerError, NotFoundError, TaskTimeoutError, WorkerError
from kindler.models.predictor import METHODS
from kindler.models.signature import Signature, as_text
from kindler.runtime.runtime import Runtime, TaskHandle
from kindler.serve.auth import Access
from kindler.serve.bodies import Bodies
from kindler.serve.endpoints import Authorized, Endpoint, Json, needs
from kindler.serve.http_errors import Problem, as_problem, own_status
from kindler.serve.protocols import RawRequest, Target
from kindler.serve.protocols.omega import OmegaCodec
from kindler.serve.protocols.values import loads, plain
from kindler.serve.settings import ServeSettings
from kindler.storage import Store
from kindler.store.keys import Key

_DATASET_VERBS = ("fit", "partial_fit", "score")
_VERBS = (*METHODS, *_DATASET_VERBS)
_WORDS = {
    "pending": "PENDING",
    "running": "STARTED",
    "done": "SUCCESS",
    "failed": "FAILURE",
    "cancelled": "REVOKED",
}
_YES = ("1", "true", "yes", "on")
_RESERVED = ("async", "bucket", "datax", "datay")
_ANY_JSON = {"required": True, "content": {"application/json": {"schema": {}}}}
_MAYBE_JSON = {**_ANY_JSON, "required": False}
_Start: TypeAlias = Callable[[Runtime], TaskHandle]


@dataclass(slots=True, eq=False)
class StartedTask:
    """A task of a client.

    Attributes:
        head: The first fields of its response: the model, or the script.
        owner: The id of the key that sent it; None without keys.
        ended: When it had finished, by the monotonic clock.
    """

    handle: TaskHandle
    head: Mapping[str, Any]
    started: datetime
    owner: str | None = None
    ended: float | None = None


class Tasks:
    """Starts tasks and remembers them by their ids. Thread-safe.

    Args:
        storage: The store, whose runtime runs them.
        settings: How many tasks and bytes, and for how long. `queue_bytes` is also the limit on the request
            bytes of all unfinished tasks together.
    """

    def __init__(self, storage: Store, settings: ServeSettings) -> None:
        self._storage = storage
        self._settings = settings
        self.held_bytes = 0
        self._tasks: OrderedDict[str, StartedTask] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, access: Access, head: Mapping[str, Any], call: _Start, size: int = 0) -> StartedTask:
        """Start a task on the runtime of a bucket."""
        with self._lock:
            self._forget_old(room=1)
            if self.held_bytes and self.held_bytes + size > self._settings.queue_bytes:
                raise Problem(
                    429,
                    f"unfinished tasks already hold {self.held_bytes} bytes of requests.",
                    {"retry-after": "5"},
                )
            if len(self._tasks) >= self._settings.task_results:
                raise Problem(429, f"{len(self._tasks)} tasks are unfinished.", {"retry-after": "5"})
            self.held_bytes += size
        try:
            runtime = self._storage[access.bucket].runtime.options(trusted=self._settings.trusted)
            task = StartedTask(call(runtime), head, datetime.now(timezone.utc), access.key_id)
        except BaseException:
            with self._lock:
                self.held_bytes -= size
            raise
        with self._lock:
            self._tasks[task.handle.id] = task

        def ended(_: TaskHandle) -> None:
            task.ended = time.monotonic()
            with self._lock:
                self.held_bytes -= size
                self._forget_old()

        task.handle.when_ended(ended)
        return task

    def _forget_old(self, room: int = 0) -> None:
        """Forget the oldest finished tasks, as the settings say, and to have room for more; under the lock.

        The newest result stays: whoever asked for it has had no time to read it.
        """
        settings, now = self._settings, time.monotonic()
        finished = [(name, task) for name, task in self._tasks.items() if task.handle.ready()]
        held = sum(task.handle.size for _, task in finished)
        for i, (name, task) in enumerate(finished, 1):
            late = now - (task.ended or now) > settings.task_result_s
            heavy = held > settings.task_result_bytes and i < len(finished)
            if late or heavy or len(self._tasks) + room > settings.task_results:
                held -= task.handle.size
                del self._tasks[name]

    def find(self, task_id: str, key: Key | None = None) -> StartedTask:
        """A task by its id; a restricted key finds only its own tasks."""
        with self._lock:
            self._forget_old()
            task = self._tasks.get(task_id)
        others = key is not None and task is not None and task.owner != key.id
        if task is None or (key is not None and others and (key.is_limited or not key.allows("admin"))):
            raise NotFoundError(what="task", name=task_id[:100])
        return task

    async def wait(self, task: StartedTask) -> None:
        """Wait until a task has finished or its client times out, without blocking a thread."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def ended(_: TaskHandle) -> None:
            with suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(over.set)

        task.handle.when_ended(ended)
        with move_on_after(self._settings.timeout_s):
            await over.wait()

    def answer(self, task: StartedTask) -> dict[str, Any]:
        """The response for a client that waited for its task and has no id to poll."""
        with self._lock:
            self._tasks.pop(task.handle.id, None)
        try:
            response = _response(task, task.handle.get(0))
        except TaskTimeoutError as exc:
            if not exc.goes_on:
                raise _failure(exc) from exc
            task.handle.cancel()
            hint = "Hint: send the header 'async: true' and poll the task."
            raise Problem(
                504, f"{task.handle.call} took longer than {self._settings.timeout_s:g} s. {hint}"
            ) from None
        except KindlerError as exc:
            raise as_problem(exc) or _failure(exc) from exc
        ended = datetime.now(timezone.utc)
        runtimes = (ended - task.started).total_seconds()
        return {**response, "runtimes": runtimes, "ended": ended.isoformat()}

    def load(self) -> dict[str, Any]:
        """The load of the runtime, or why it is unknown."""
        try:
            return asdict(self._storage.runtime.load())
        except KindlerError as exc:
            return {"problem": str(exc).splitlines()[0]}


def wants_task(headers: Mapping[str, str], query: bytes) -> bool:
    """Whether a request asks for a task id, by a header or in its URL.

    >>> wants_task({"async": "true"}, b""), wants_task({}, b"x=1&async=1"), wants_task({}, b"")
    (True, True, False)
    """
    value = headers.get("async")
    if value is None and b"async" in query:
        value = dict(parse_qsl(query.decode("latin-1"))).get("async")
    return value is not None and value.strip().lower() in _YES


# `async`: FastAPI would take a thread for each call of a plain function.
async def _later(
    by_header: Annotated[
        bool, Header(alias="async", description="Return 202 with a task id instead of waiting")
    ] = False,
    by_query: Annotated[bool, Query(alias="async", description="Same as the `async` header")] = False,
) -> bool:
    return by_header or by_query


Later = Annotated[bool, Depends(_later)]


def task_routes(tasks: Tasks, bodies: Bodies, executor: Executor) -> APIRouter:
    """Routes that start, poll and cancel tasks; runtime calls run in the executor."""

    async def run(
        request: Request, later: bool, access: Access, head: Mapping[str, Any], call: _Start, size: int
    ) -> Json:
        loop = asyncio.get_running_loop()
        task = await loop.run_in_executor(executor, tasks.start, access, head, call, size)
        if later:
            task_id, path = task.handle.id, request.url.path
            content = {**head, "task_id": task_id, "status": "PENDING", "resource_uri": path}
            return Json(content, 202, {"location": f"/api/v1/task/{task_id}/result"})
        await tasks.wait(task)
        return await loop.run_in_executor(executor, lambda: Json(tasks.answer(task)))

    routes = APIRouter(prefix="/api/v1", route_class=Endpoint)
    accepted: dict[int | str, dict[str, Any]] = {202: {"description": "Accepted: the task id"}}

    @routes.put(
        "/model/{name:path}/{action}",
        tags=["models"],
        openapi_extra={"requestBody": _MAYBE_JSON},
        responses=accepted,
    )
    @needs("predict", "write", on="models")
    async def model(
        request: Request,
        name: str,
        action: str,
        access: Authorized,
        later: Later,
        datax: str | None = None,
        datay: str | None = None,
    ) -> Json:
        """Train or score a stored model on stored datasets, or predict asynchronously."""
        data = await _data(request, bodies, access, Target(name, action=action), datax, datay)
        # What a task holds until it has finished: its body, or its decoded data if larger.
        sizes = [size for item in data if isinstance(size := getattr(item, "nbytes", 0), int)]
        size = max(len(await request.body()), sum(sizes))
        call = lambda runtime: getattr(runtime.model(name), action)(*data)  # noqa: E731
        return await run(request, later, access, {"model": name}, call, size)

    @routes.post(
        "/script/{name:path}/run",
        tags=["scripts"],
        openapi_extra={"requestBody": _ANY_JSON},
        responses=accepted,
    )
    @needs("predict", on="scripts")
    async def script(request: Request, name: str, access: Authorized, later: Later) -> Json:
        """Run a stored function with the body as its argument; the server must run with `--trusted`."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Problem(415, "unsupported content type; the argument of a script must be application/json.")
        body = await request.body()
        arguments = () if not body else (await asyncio.to_thread(loads, body),)
        named = {key: value for key, value in request.query_params.items() if key not in _RESERVED}
        call = lambda runtime: runtime.script(name).run(*arguments, **named)  # noqa: E731
        return await run(request, later, access, {"script": name}, call, len(body))

    @routes.get("/task/{task}/status", tags=["tasks"])
    @needs("predict", filtered=True)
    def status(task: str, access: Authorized) -> dict[str, Any]:
        """State of a task: PENDING, STARTED, SUCCESS, FAILURE or REVOKED."""
        return {"task_id": task, "status": _WORDS[tasks.find(task, access.key).handle.status]}

    @routes.get("/task/{task}/result", tags=["tasks"])
    @needs("predict", filtered=True)
    def result(task: str, access: Authorized) -> Json:
        """Result of a task; the status of its error, with the reason, if it failed."""
        started = tasks.find(task, access.key)
        handle = started.handle
        if handle.error is not None:
            raise as_problem(handle.error) or _failure(handle.error)
        response = _response(started, handle.get(0) if handle.ready() else None)
        return Json({"task_id": task, "status": _WORDS[handle.status], "response": response})

    @routes.delete("/task/{task}", tags=["tasks"])
    @needs("predict", filtered=True)
    def cancel(task: str, access: Authorized) -> dict[str, Any]:
        """Cancel a task, or stop it if it is running; a finished task stays as it is."""
        handle = tasks.find(task, access.key).handle
        handle.cancel()
        return {"task_id": task, "status": _WORDS[handle.status]}

    return routes


async def _data(
    request: Request, bodies: Bodies, access: Access, target: Target, datax: str | None, datay: str | None
) -> tuple[Any, ...]:
    """The arguments of an action: names of datasets, or the request's data."""
    action = target.action
    scope = "predict" if action in (*METHODS, "score") else "write" if action in _VERBS else "admin"
    access.require(scope)
    if action not in _VERBS:
        raise Problem(404, f"unknown action {action[:40]!r}; expected one of {', '.join(_VERBS)}.")
    if datax is not None:
        access.check_datasets(datax, datay)
        return (datax,) if datay is None or action in METHODS else (datax, datay)
    if action in _DATASET_VERBS:
        raise Problem(400, f"{action} needs ?datax=, the name of a dataset, and ?datay= for its labels.")
    sent = RawRequest(await request.body(), dict(request.headers), dict(request.query_params))
    decoded = await bodies.decode(OmegaCodec(), sent, target, Signature((), ()))
    inputs = {name: as_text(array, name) for name, array in decoded.inputs.items()}
    if not decoded.columns:
        (array,) = inputs.values()
        return (array,)
    import pandas as pd

    return (pd.DataFrame({name: list(column) for name, column in inputs.items()}),)


def _response(task: StartedTask, result: Any) -> dict[str, Any]:
    name, started = next(iter(task.head.values())), task.started.isoformat()
    return {**task.head, "result": plain(result), "resource_uri": name, "started": started}


def _failure(error: KindlerError) -> Problem:
    """Why there is no result. Tracebacks and output are not shown to clients."""
    end = "\n\nraised as " if isinstance(error, WorkerError) else "\n"
    status, text = own_status(error, str(error).partition(end)[0])
    return Problem(status or 400, f"the task failed: {type(error).__name__}: {text[:500]}")
