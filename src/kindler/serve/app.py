"""The whole server as one ASGI application: joins the parts, and decides nothing that a part could decide."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

import kindler
from kindler import sandbox
from kindler.errors import KindlerError
from kindler.models.registry import MODEL_KINDS
from kindler.omega import Omega
from kindler.serve.auth import Gate, Scopes
from kindler.serve.body_readers import READERS, Readers
from kindler.serve.cors import Cors
from kindler.serve.http_errors import Problem, as_problem
from kindler.serve.loaded_models import Residents
from kindler.serve.openapi import with_predictions
from kindler.serve.page import page_routes
from kindler.serve.predict_app import Front, codec_of
from kindler.serve.request_log import RequestLog
from kindler.serve.routes import Parts, catalog_routes, health_routes, protocol_routes
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats
from kindler.serve.tasks import WAITS, Tasks, task_routes
from kindler.serve.threads import Threads
from kindler.serve.traffic import Traffic
from kindler.serve.triton import triton_routes
from kindler.store.keys import Keys
from kindler.store.splits import Splits

_log = logging.getLogger("kindler.serve")

_LOOKS, _ASKS, _READS = 2, 2, 2
_LOADS = 32  # most of them of models that never end loading
_FAULTS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request cannot be"},
    401: {"description": "A key is needed"},
    403: {"description": "The key is not for this"},
    404: {"description": "There is no such thing"},
    409: {"description": "There is one already"},
    413: {"description": "Too large"},
    415: {"description": "A content type that is not read"},
    503: {"description": "The server cannot answer now"},
}


def create_app(
    omega: Omega,
    settings: ServeSettings | None = None,
    *,
    local: bool = True,
) -> Front:
    """An ASGI application that serves a store.

    Args:
        omega: The store.
        settings: The limits.
        local: Whether it can be reached from this machine alone; then it needs no keys while there are none.
    """
    settings = settings or ServeSettings()
    stats = Stats()
    # Apart, so that nobody's large model, misspelled name or long script keeps others waiting.
    looks, asks = Threads(_LOOKS, "kindler-look"), Threads(_ASKS, "kindler-ask")
    loads, reads = Threads(_LOADS, "kindler-load"), Threads(_READS, "kindler-read")
    bodies, waits = Threads(READERS, "kindler-body"), Threads(WAITS, "kindler-wait")
    readers = Readers(bodies, settings.timeout_s, settings.rows)
    keys = Keys(omega.store)
    residents = Residents(
        omega, settings, looks=looks, asks=asks, loads=loads, stats=stats, lacking=_no_sandbox(settings)
    )
    gate = Gate(keys, looks, local=local, origins=settings.cors_origins)
    cors = Cors(settings.cors_origins)
    log = RequestLog(settings.access_log, settings.audit_log, settings.log_level)
    traffic = Traffic(Splits(omega.store), residents, stats, looks, settings.refresh_s)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        await traffic.read()
        yield
        traffic.close()
        residents.close()
        for pool in (looks, asks, loads, reads, bodies, waits):
            pool.shutdown(cancel_futures=True)
        readers.close()
        keys.close()
        log.close()

    app = FastAPI(
        title="Kindler",
        version=kindler.__version__,
        description="Predictions, tasks, datasets and metadata of a Kindler store.",
        docs_url=None,  # its page would be fetched from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        responses=_FAULTS,
    )
    tasks = Tasks(omega, settings)
    parts = Parts(omega, residents, gate, settings, stats, tasks, readers, looks)
    # Triton's paths fit those of a model's metadata too, and come first.
    routers = [page_routes(), health_routes(parts), triton_routes(parts), protocol_routes(parts)]
    routers.append(catalog_routes(parts))
    routers.append(task_routes(tasks, readers, waits))  # its paths fit those of aliases too
    for routes in routers:
        app.include_router(routes)
    _say_what_is_wrong(app)
    written = app.openapi
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(with_predictions(written()))
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    return Front(
        app,
        omega=omega,
        residents=residents,
        gate=gate,
        scopes=Scopes([route for routes in routers for route in routes.routes], app.openapi_url),
        settings=settings,
        stats=stats,
        looks=looks,
        reads=reads,
        readers=readers,
        traffic=traffic,
        log=log,
        cors=cors,
        parts=parts,
    )


def _no_sandbox(settings: ServeSettings) -> str | None:
    """Why models cannot be sandboxed here, which is said once; None if they can, or need not be."""
    if settings.trusted or settings.isolation == "none":
        return None
    lacking = sandbox.unavailable_reason()
    if lacking is not None:
        kinds = ", ".join(sorted(row.name for row in MODEL_KINDS.rows if row.needs_sandbox))
        _log.warning(
            "sandboxing is unavailable: %s. Models of the kinds %s are refused.\nHint: --trusted serves"
            " them if you trust everybody who can write to the store; --isolation none serves them in the"
            " server's own process.",
            lacking,
            kinds,
        )
    return lacking


def _say_what_is_wrong(app: FastAPI) -> None:
    def reply(request: Request, problem: Problem) -> Response:
        encoded = codec_of(request.url.path).problem(problem.status, problem.message)
        return Response(encoded.body, problem.status, problem.headers, encoded.content_type)

    @app.exception_handler(Problem)
    async def of_ours(request: Request, exc: Problem) -> Response:
        return reply(request, exc)

    @app.exception_handler(KindlerError)
    async def of_kindler(request: Request, exc: KindlerError) -> Response:
        return reply(request, as_problem(exc) or Problem(500, "the server failed."))

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, exc: HTTPException) -> Response:
        return reply(request, Problem(exc.status_code, f"{exc.detail}.", dict(exc.headers or {})))

    @app.exception_handler(RequestValidationError)
    async def of_arguments(request: Request, exc: RequestValidationError) -> Response:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first.get("loc", ()))
        return reply(request, Problem(422, f"{where}: {first.get('msg', 'is not valid')}."))
