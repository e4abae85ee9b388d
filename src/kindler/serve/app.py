"""The whole server as one ASGI application.

FastAPI has every route, and writes the OpenAPI document. Predictions are answered in front of it, by the same
functions and with the same authorization: its router alone would take a fifth of the time of a small one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

from anyio import move_on_after
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import kindler
from kindler import sandbox
from kindler.errors import KindlerError
from kindler.models.registry import MODEL_KINDS
from kindler.serve.auth import Authorizer
from kindler.serve.bodies import READERS, Bodies, ClientGoneError, Receive
from kindler.serve.catalog_routes import dataset_routes, list_routes, model_routes, server_routes
from kindler.serve.drift import DriftWatch, DriftWindow
from kindler.serve.endpoints import ENTRY, Requirement, authorize
from kindler.serve.http_errors import STATUS_TEXTS, Problem
from kindler.serve.inference_routes import (
    health_routes,
    prediction_routes,
    tensorflow_serving_routes,
    v2_routes,
)
from kindler.serve.model_registry import ModelRegistry
from kindler.serve.openai_routes import openai_routes
from kindler.serve.page import page_routes
from kindler.serve.payloads import PayloadLog
from kindler.serve.predictions import OMEGA, Predictions, codec_of, problem_of
from kindler.serve.protocols import Codec, Reply
from kindler.serve.request_log import REQUEST_ID, Entry, RequestLog
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats, shown_name
from kindler.serve.tasks import Tasks, task_routes, wants_task
from kindler.serve.threads import Threads
from kindler.serve.traffic import Traffic
from kindler.storage import Store
from kindler.store.keys import Keys
from kindler.store.splits import Splits

Scope: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_log = logging.getLogger("kindler.serve")
_LOAD_THREADS = 32  # most of them of models that never end loading
_LINGER_S = 5.0  # for a client that goes on sending what was refused, and would not hear why
_CLOSES = ("connection", "close")
_STOPPING = Problem(
    503,
    "the server is being stopped, and the request did not finish in time.",
    {"connection": "close", "retry-after": "5"},
)
_CORS: dict[str, Any] = {
    "allow_methods": ("GET", "HEAD", "POST", "PUT", "DELETE"),
    "allow_headers": (
        "accept", "async", "authorization", "bucket", "content-encoding", "content-type",
        "inference-header-content-length", "traceparent", "x-api-key", "x-request-id", "x-session-id",
    ),
    "expose_headers": (
        "inference-header-content-length", "location", "retry-after", "x-dtype", "x-model-version",
        "x-request-id", "x-shape", "x-version",
    ),
}  # fmt: skip


def create_app(
    storage: Store,
    settings: ServeSettings | None = None,
    *,
    local: bool = True,
) -> ServeApp:
    """An ASGI application that serves a store.

    Args:
        storage: The store.
        settings: The limits.
        local: Whether only this machine can reach it; it then requires no key until one exists.
    """
    settings = settings or ServeSettings()
    stats, keys = Stats(), Keys(storage.store)
    # Apart, so that nobody's large model, misspelled name or long script keeps others waiting.
    sizes = {
        "catalog": 2,
        "lookup": 2,
        "load": _LOAD_THREADS,
        "dataset": 2,
        "body": READERS,
        "wait": 16,
        "drift": 1,
        "payload": 1,
    }
    threads = {name: Threads(most, f"kindler-{name}") for name, most in sizes.items()}
    bodies = Bodies(settings, threads["body"])
    payloads = PayloadLog(storage, settings, threads["payload"]) if settings.log_payloads else None
    models = ModelRegistry(
        storage,
        settings,
        catalog_threads=threads["catalog"],
        lookup_threads=threads["lookup"],
        load_threads=threads["load"],
        stats=stats,
        unsandboxed=_unsandboxed(settings),
        payloads=payloads,
    )
    traffic = Traffic(Splits(storage.store), models, stats, threads["catalog"], settings.refresh_s)
    log = RequestLog(settings.access_log, settings.audit_log, settings.log_level)
    authorizer = Authorizer(keys, threads["catalog"], local=local, origins=settings.cors_origins)
    predictions = Predictions(
        models,
        traffic=traffic,
        authorizer=authorizer,
        bodies=bodies,
        log=log,
        dataset_threads=threads["dataset"],
    )

    def windows() -> list[tuple[str, int, DriftWindow]]:
        known = [(shown_name(m.version), m.version.number, m.drift) for m in models.loaded()]
        return [(name, number, window) for name, number, window in known if window is not None]

    stats.drift = lambda: [(name, n, window.report) for name, n, window in windows() if window.report]
    watch = DriftWatch(windows, threads["drift"])

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        await traffic.read()
        beside = [asyncio.create_task(watch.run(settings.drift_s))]
        if payloads is not None:
            beside.append(asyncio.create_task(payloads.run()))
        yield
        for task in beside:
            task.cancel()
        traffic.close()
        if payloads is not None:
            await payloads.close()
        models.close()
        for pool in threads.values():
            pool.shutdown(cancel_futures=True)
        bodies.close()
        keys.close()
        log.close()

    api = FastAPI(
        title="Kindler",
        version=kindler.__version__,
        description="Predictions, tasks, datasets and metadata of a Kindler store.",
        docs_url=None,  # its page would be fetched from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        responses={status: {"description": text} for status, text in STATUS_TEXTS.items()},
    )
    api.state.predictions = predictions
    tasks = Tasks(storage, settings)
    for routes in (
        page_routes(),
        openai_routes(predictions),
        health_routes(models),
        v2_routes(models),
        tensorflow_serving_routes(models),
        server_routes(models, authorizer, tasks),
        model_routes(models, watch),
        dataset_routes(models, bodies),
        list_routes(models),
        task_routes(tasks, bodies, threads["wait"]),  # its paths fit those of tags too
        prediction_routes(),
    ):
        api.include_router(routes)
    for kind in (Problem, KindlerError, HTTPException, RequestValidationError):
        api.add_exception_handler(kind, _on_error)
    return ServeApp(api, predictions)


class ServeApp:
    """The application: gives each request its id, answers predictions, and passes the rest on to FastAPI."""

    def __init__(self, api: FastAPI, predictions: Predictions) -> None:
        self._api = api
        self.predictions = predictions
        self._http: Callable[[Any, Any, Any], Awaitable[None]] = self._answer
        origins = predictions.settings.cors_origins
        if origins:
            self._http = CORSMiddleware(self._answer, allow_origins=origins, **_CORS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._api(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        method, path, query = scope["method"], scope["path"], scope["query_string"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        codec = codec_of(path)
        client = (scope.get("client") or ("",))[0]
        entry = Entry.of(headers, method, path, codec.name, client)
        reply: Reply | None = None

        async def record(message: MutableMapping[str, Any]) -> None:
            """Send a response with the request's id, and note what was sent."""
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                own = (REQUEST_ID.encode(), entry.id.encode())
                message["headers"] = [*message.get("headers", ()), own]
            elif method != "HEAD":
                entry.bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            try:
                target = codec.target(method, path)
                if (
                    target is None
                    or (codec is OMEGA and wants_task(headers, query))
                    or not isinstance(codec, Codec)
                ):
                    entry.changes = isinstance(codec, Codec) and method not in ("GET", "HEAD", "OPTIONS")
                    # What answers GET answers HEAD; whoever sends the response leaves its body out.
                    scope = {**scope, ENTRY: entry, "method": "GET" if method == "HEAD" else method}
                    await self._api(scope, receive, record)
                else:
                    pairs = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True)) if query else {}
                    reply = await self.predictions.predict(codec, target, headers, pairs, receive, entry)
            except ClientGoneError:
                raise
            except Exception as exc:  # noqa: BLE001 - the HTTP edge: whatever happened, the client is told
                if entry.status:  # FastAPI has answered with 500
                    _log.exception("%s failed (request %s)", path[:200], entry.id)
                else:
                    reply = codec.problem(problem_of(exc, entry))
                    seconds = time.perf_counter() - started
                    await asyncio.sleep(self.predictions.bodies.pause_after(exc, entry.bytes_in, seconds))
            if reply is not None:
                entry.counted = True
                await _send(reply, receive, record)
        except ClientGoneError:
            entry.status = 499
        except asyncio.CancelledError:  # the server stops, and waits no longer
            if not entry.status:
                await _send(codec.problem(_STOPPING), None, record)
        self.predictions.note(entry, time.perf_counter() - started)


async def _on_error(request: Request, error: Exception) -> Any:
    """What FastAPI answers if an endpoint, or the way to one, raised."""
    entry: Entry = request.scope[ENTRY]
    if isinstance(error, HTTPException):
        problem = Problem(error.status_code, f"{error.detail}.", dict(error.headers or {}))
        if error.status_code in (404, 405):  # there is no such route, which is for those with a key to know
            scope = "read" if request.method in ("GET", "HEAD") else "admin"
            try:
                await authorize(request, Requirement((scope,)))
            except (Problem, KindlerError) as exc:
                entry.counted = True
                problem = problem_of(exc, entry)
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first.get("loc", ()))
        unknown = first.get("type") == "extra_forbidden"
        text = first.get("msg", "is not valid").removeprefix("Value error, ")
        text = "is not supported by this server" if unknown else text
        problem = Problem(422, f"{where[:200]}: {text}.")
    else:
        problem = problem_of(error, entry)
    reply = codec_of(request.url.path).problem(problem)
    return lambda scope, receive, send: _send(reply, receive, send)


async def _send(reply: Reply, receive: Receive | None, send: Send) -> None:
    headers = [
        (b"content-type", reply.content_type.encode("latin-1")),
        (b"content-length", str(len(reply.body)).encode("latin-1")),
        *((name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers),
    ]
    closes = receive is not None and _CLOSES in reply.headers
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body, "more_body": closes})
    if receive is not None and closes:
        # Drop what still comes: a client in the middle of its body would see a reset only.
        with move_on_after(_LINGER_S):
            while (await receive()).get("more_body"):
                pass
        await send({"type": "http.response.body", "body": b""})


def _unsandboxed(settings: ServeSettings) -> str | None:
    """Why models cannot be sandboxed here, which is said once; None if they can, or need not be."""
    if settings.trusted or settings.isolation == "none":
        return None
    reason = sandbox.unavailable_reason()
    if reason is not None:
        kinds = ", ".join(sorted(row.name for row in MODEL_KINDS.rows if row.needs_sandbox))
        _log.warning(
            "sandboxing is unavailable: %s. Models of kinds %s are rejected.\nHint: --trusted serves"
            " them if you trust everyone who can write to the store; --isolation none serves them in the"
            " server's own process.",
            reason,
            kinds,
        )
    return reason
