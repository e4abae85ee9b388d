"""Tasks on the store's runtime: training, scoring, scripts, and asynchronous predictions.

A request with the header `async: true` is answered with 202 and a task id; clients poll for the result. How
and where tasks run is up to the runtime.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Annotated, Any
from urllib.parse import parse_qsl

import numpy as np
from fastapi import APIRouter, Depends, Header, Query, Request

from kindler.errors import KindlerError, NotFoundError, TaskTimeoutError, WorkerError
from kindler.models.signature import Signature, as_text
from kindler.omega import Omega
from kindler.runtime.handles import TaskHandle
from kindler.runtime.runtime import Runtime
from kindler.serve.auth import check_datasets, needs, needs_by_action
from kindler.serve.body_readers import Readers, where_read
from kindler.serve.deadlines import within
from kindler.serve.http_errors import Problem, as_problem, own_status
from kindler.serve.protocols import Sent
from kindler.serve.protocols.omega import OmegaCodec
from kindler.serve.protocols.values import loads, plain
from kindler.serve.requests import METHODS, Target
from kindler.serve.routes import Bucket, Json
from kindler.serve.settings import ServeSettings
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
_SCOPES = {verb: "write" if verb in ("fit", "partial_fit") else "predict" for verb in _VERBS}
WAITS = 16
_YES = ("1", "true", "yes", "on")
_TOLD = ("async", "bucket", "datax", "datay")
_ANY_JSON = {"required": True, "content": {"application/json": {"schema": {}}}}
_MAYBE_JSON = {**_ANY_JSON, "required": False}


@dataclass(slots=True, eq=False)
class Begun:
    """A started task.

    Attributes:
        handle: The runtime's handle.
        head: The first fields of its response: the model, or the script.
        started: When it was sent.
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
        omega: The store, whose runtime runs them.
        settings: How many tasks and bytes, and for how long. `queue_bytes` is also the limit on the request
            bytes of all unfinished tasks together.
    """

    def __init__(self, omega: Omega, settings: ServeSettings) -> None:
        self._omega = omega
        self._settings = settings
        self.held_bytes = 0
        self._begun: OrderedDict[str, Begun] = OrderedDict()
        self._lock = threading.Lock()

    def begin(
        self,
        bucket: str,
        head: Mapping[str, Any],
        call: Callable[[Runtime], TaskHandle],
        size: int = 0,
        key: Key | None = None,
    ) -> Begun:
        """Start a task on the runtime of a bucket.

        Args:
            bucket: The bucket.
            head: The first fields of the response.
            call: Starts the task.
            size: The bytes of its request, which are held until it has finished.
            key: The key of its request.

        Raises:
            Problem: 429 if too many tasks, or too many bytes, are unfinished.
        """
        with self._lock:
            self._forget_old(room=1)
            if self.held_bytes and self.held_bytes + size > self._settings.queue_bytes:
                raise Problem(
                    429,
                    f"unfinished tasks already hold {self.held_bytes} bytes of requests.",
                    {"retry-after": "5"},
                )
            if len(self._begun) >= self._settings.task_results:
                raise Problem(429, f"{len(self._begun)} tasks are unfinished.", {"retry-after": "5"})
            self.held_bytes += size
        try:
            runtime = self._omega[bucket].runtime.options(trusted=self._settings.trusted)
            owner = None if key is None else key.id
            begun = Begun(call(runtime), head, datetime.now(timezone.utc), owner)
        except BaseException:
            self._let_go(size)
            raise
        with self._lock:
            self._begun[begun.handle.id] = begun
        begun.handle.when_ended(lambda _: self._ended(begun, size))
        return begun

    def _let_go(self, size: int) -> None:
        with self._lock:
            self.held_bytes -= size

    def _ended(self, begun: Begun, size: int) -> None:
        begun.ended = time.monotonic()
        with self._lock:
            self.held_bytes -= size
            self._forget_old()

    def _forget_old(self, room: int = 0) -> None:
        """Forget the oldest finished tasks, as the settings say, and to have room for more; under the lock.

        The newest result stays: whoever asked for it has had no time to read it.
        """
        settings, now = self._settings, time.monotonic()
        finished = [(name, begun) for name, begun in self._begun.items() if begun.handle.ready()]
        held = sum(begun.handle.size for _, begun in finished)
        for i, (name, begun) in enumerate(finished, 1):
            late = now - (begun.ended or now) > settings.task_result_s
            heavy = held > settings.task_result_bytes and i < len(finished)
            if late or heavy or len(self._begun) + room > settings.task_results:
                held -= begun.handle.size
                del self._begun[name]

    def find(self, task: str, key: Key | None = None) -> Begun:
        """A task by its id.

        Args:
            task: The id.
            key: The key of the request that asks; one that is not for everything finds only its own tasks.

        Raises:
            NotFoundError: There is none, or it was forgotten.
        """
        with self._lock:
            self._forget_old()
            begun = self._begun.get(task)
        others = key is not None and begun is not None and begun.owner != key.id
        if begun is None or (key is not None and others and (key.is_limited or not key.allows("admin"))):
            raise NotFoundError(what="task", name=task[:100])
        return begun

    async def ended(self, begun: Begun) -> None:
        """Wait until a task has finished or its client times out, without blocking a thread."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def tell(_: TaskHandle) -> None:
            with suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(over.set)

        begun.handle.when_ended(tell)
        with suppress(TimeoutError), within(self._settings.timeout_s):
            await over.wait()

    def answer(self, begun: Begun) -> dict[str, Any]:
        """The response for a client that waited for its task, and has no id to ask for it again.

        Raises:
            Problem: 504 if it took too long and was stopped; others if it failed.
        """
        with self._lock:
            self._begun.pop(begun.handle.id, None)
        try:
            response = _response(begun, begun.handle.get(0))
        except TaskTimeoutError as exc:
            if not exc.goes_on:
                raise _failure(exc) from exc
            begun.handle.cancel()
            hint = "Hint: send the header 'async: true' and poll the task."
            raise Problem(
                504, f"{begun.handle.call} took longer than {self._settings.timeout_s:g} s. {hint}"
            ) from None
        except KindlerError as exc:
            raise as_problem(exc) or _failure(exc) from exc
        ended = datetime.now(timezone.utc)
        runtimes = (ended - begun.started).total_seconds()
        return {**response, "runtimes": runtimes, "ended": ended.isoformat()}

    def load(self) -> dict[str, Any]:
        """The load of the runtime, or why it is unknown."""
        try:
            return asdict(self._omega.runtime.load())
        except KindlerError as exc:
            return {"problem": str(exc).splitlines()[0]}


def wants_later(headers: Mapping[str, str], query: bytes) -> bool:
    """Whether a request asks for a task id, by a header or in its URL.

    >>> wants_later({"async": "true"}, b""), wants_later({}, b"x=1&async=1"), wants_later({}, b"")
    (True, True, False)
    """
    said = headers.get("async")
    if said is None and b"async" in query:
        said = dict(parse_qsl(query.decode("latin-1"))).get("async")
    return said is not None and said.strip().lower() in _YES


async def _later(
    by_header: Annotated[
        bool, Header(alias="async", description="Answer 202 with a task id instead of waiting")
    ] = False,
    by_query: Annotated[bool, Query(alias="async", description="Same as the `async` header")] = False,
) -> bool:
    return by_header or by_query


Later = Annotated[bool, Depends(_later)]


def task_routes(tasks: Tasks, readers: Readers, executor: Executor) -> APIRouter:
    """Routes that start, poll and cancel tasks.

    Args:
        tasks: The tasks.
        readers: Read large bodies.
        executor: Where the runtime is called.
    """

    async def begun(request: Request, begin: Callable[[], Begun], *, later: bool) -> Json:
        loop = asyncio.get_running_loop()
        task = await loop.run_in_executor(executor, begin)
        if later:
            return _later_reply(task, request)
        await tasks.ended(task)
        return await loop.run_in_executor(executor, lambda: Json(tasks.answer(task)))

    routes = APIRouter(prefix="/api/v1")
    answers: dict[str, Any] = {
        "responses": {
            202: {"description": "Accepted: the task id"},
            429: {"description": "Too many unfinished tasks"},
            504: {"description": "The task took too long"},
        }
    }

    @routes.put(
        "/model/{name:path}/{action}", tags=["models"], openapi_extra={"requestBody": _MAYBE_JSON}, **answers
    )
    @needs_by_action(_SCOPES, on="models")
    async def model(
        request: Request,
        name: str,
        action: str,
        bucket: Bucket,
        later: Later,
        datax: str | None = None,
        datay: str | None = None,
    ) -> Json:
        """Train or score a stored model on stored datasets, or predict asynchronously."""
        data = await _data(request, readers, name, action, datax, datay)
        size = _held_bytes(data, len(await request.body()))

        def begin() -> Begun:
            return tasks.begin(
                bucket,
                {"model": name},
                lambda r: getattr(r.model(name), action)(*data),
                size,
                request.scope.get("kindler.key"),
            )

        return await begun(request, begin, later=later)

    @routes.post(
        "/script/{name:path}/run", tags=["scripts"], openapi_extra={"requestBody": _ANY_JSON}, **answers
    )
    @needs("predict", on="scripts")
    async def script(request: Request, name: str, bucket: Bucket, later: Later) -> Json:
        """Run a stored function with the body as its argument; the server must run with `--trusted`."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Problem(415, "unsupported content type; the argument of a script must be application/json.")
        body = await request.body()
        arguments = () if not body else (await asyncio.to_thread(loads, body),)
        named = {key: value for key, value in request.query_params.items() if key not in _TOLD}

        def begin() -> Begun:
            return tasks.begin(
                bucket,
                {"script": name},
                lambda r: r.script(name).run(*arguments, **named),
                len(body),
                request.scope.get("kindler.key"),
            )

        return await begun(request, begin, later=later)

    @routes.get("/task/{task}/status", tags=["tasks"])
    @needs("predict", filtered=True)
    def status(request: Request, task: str) -> dict[str, Any]:
        """State of a task: PENDING, STARTED, SUCCESS, FAILURE or REVOKED."""
        begun = tasks.find(task, request.scope.get("kindler.key"))
        return {"task_id": task, "status": _WORDS[begun.handle.status]}

    @routes.get("/task/{task}/result", tags=["tasks"])
    @needs("predict", filtered=True)
    def result(request: Request, task: str) -> Json:
        """Result of a task; the status of its error, with the reason, if it failed."""
        begun = tasks.find(task, request.scope.get("kindler.key"))
        handle = begun.handle
        if handle.error is not None:
            raise as_problem(handle.error) or _failure(handle.error)
        done = handle.ready()
        response = _response(begun, handle.get(0) if done else None)
        return Json({"task_id": task, "status": _WORDS[handle.status], "response": response})

    @routes.delete("/task/{task}", tags=["tasks"])
    @needs("predict", filtered=True)
    def cancel(request: Request, task: str) -> dict[str, Any]:
        """Cancel a task, or stop it if it is running; a finished task stays as it is."""
        handle = tasks.find(task, request.scope.get("kindler.key")).handle
        handle.cancel()
        return {"task_id": task, "status": _WORDS[handle.status]}

    return routes


async def _data(
    request: Request, readers: Readers, name: str, action: str, datax: str | None, datay: str | None
) -> tuple[Any, ...]:
    """The arguments of a verb: names of datasets, or the request's data."""
    if action not in _VERBS:
        raise Problem(404, f"unknown action {action[:40]!r}; expected one of {', '.join(_VERBS)}.")
    if datax is not None:
        check_datasets(request.scope.get("kindler.key"), request.scope["kindler.bucket"], datax, datay)
        return (datax,) if datay is None or action in METHODS else (datax, datay)
    if action in _DATASET_VERBS:
        raise Problem(400, f"{action} needs ?datax=, the name of a dataset, and ?datay= for its labels.")
    sent = Sent(await request.body(), dict(request.headers), dict(request.query_params))
    asked = (sent, Signature((), ()), Target(name, action=action))
    if where_read(sent) == "process":
        decoded = await readers.request(OmegaCodec(), *asked)
    else:
        decoded = await asyncio.to_thread(OmegaCodec().decode, *asked)
    inputs = {name: as_text(array, name) for name, array in decoded.inputs.items()}
    if not decoded.columns:
        (array,) = inputs.values()
        return (array,)
    import pandas as pd

    return (pd.DataFrame({name: list(column) for name, column in inputs.items()}),)


def _held_bytes(data: Sequence[Any], body: int) -> int:
    """The bytes that a task holds until it has finished: its body, or its decoded data if larger."""
    sizes = (getattr(item, "nbytes", 0) for item in data)
    return max(body, sum(size for size in sizes if isinstance(size, int)))


def _later_reply(begun: Begun, request: Request) -> Json:
    task = begun.handle.id
    content = {**begun.head, "task_id": task, "status": "PENDING", "resource_uri": request.url.path}
    return Json(content, 202, {"location": f"/api/v1/task/{task}/result"})


def _response(begun: Begun, result: Any) -> dict[str, Any]:
    name, started = next(iter(begun.head.values())), begun.started.isoformat()
    return {**begun.head, "result": _plain(result), "resource_uri": name, "started": started}


def _failure(error: KindlerError) -> Problem:
    """Why there is no result. Tracebacks and output are not shown to clients."""
    end = "\n\nraised as " if isinstance(error, WorkerError) else "\n"
    said = str(error).partition(end)[0]
    status, said = own_status(error, said)
    return Problem(status or 400, f"the task failed: {type(error).__name__}: {said[:500]}")


def _plain(value: Any) -> Any:
    """A result as JSON values; anything else as text."""
    if isinstance(value, np.ndarray):
        return plain(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inside) for inside in value]
    for form, arguments in (("tolist", ()), ("to_pydict", ()), ("to_dict", ("list",))):  # of pandas and Arrow
        if hasattr(value, form):
            return _plain(getattr(value, form)(*arguments))
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    fits = isinstance(value, float | str | None) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63)
    return value if fits else str(value)
