"""Health, and what the inference protocols have besides predictions: metadata, and Triton's extensions.

A name may have slashes, so the more specific path must come first; of several decorators the lowest is first.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool

import kindler
from kindler.serve.auth import needs
from kindler.serve.endpoints import Asked, Endpoint
from kindler.serve.http_errors import Problem
from kindler.serve.model_registry import ModelRegistry
from kindler.serve.model_views import (
    check_load_parameters,
    model_metadata,
    server_metadata,
    signature_def,
    triton_config,
    triton_index,
    triton_statistics,
)
from kindler.serve.protocols.values import load_object


def health_routes(models: ModelRegistry) -> APIRouter:
    """Liveness, readiness and metrics."""
    routes = APIRouter(tags=["health"], route_class=Endpoint)

    @routes.get("/healthz")
    @needs()
    async def healthz() -> dict[str, str]:
        """Liveness: the server is running."""
        return {"status": "alive"}

    @routes.get(
        "/readyz", responses={503: {"description": "The store is unreachable, or no loaded model answers"}}
    )
    @needs()
    async def readyz() -> dict[str, Any]:
        """Readiness: the store is reachable, and loaded models answer; `stuck` lists those that do not."""
        return {"status": "ready", "stuck": await models.check_ready()}

    @routes.get("/ping", response_class=PlainTextResponse)
    @routes.get("/health", response_class=PlainTextResponse)
    @needs()
    async def ping() -> str:
        """Liveness for MLflow and SageMaker."""
        return "\n"

    @routes.get("/version", response_class=PlainTextResponse)
    @needs()
    async def version() -> str:
        """Kindler's version."""
        return kindler.__version__

    @routes.get("/metrics", response_class=PlainTextResponse)
    @needs("read")
    async def metrics(access: Asked) -> Response:
        """Prometheus metrics."""
        models.stats.waiting = models.rows_waiting
        return Response(models.stats.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def v2_routes(models: ModelRegistry) -> APIRouter:
    """Health and metadata of the Open Inference Protocol, and Triton's extensions."""
    routes = APIRouter(prefix="/v2", tags=["v2"], route_class=Endpoint)

    # Triton's paths fit those of a model's metadata too.
    @routes.get("/models/stats")
    @needs("read", filtered=True)
    async def all_statistics(access: Asked) -> Any:
        """Counters of all models that answered, since the server has started."""
        return await triton_statistics(models, access.bucket, access.covers, "", None)

    @routes.get("/models/{name:path}/stats")
    @routes.get("/models/{name:path}/versions/{version}/stats")
    @needs("predict", "read", on="models")
    async def statistics(name: str, access: Asked, version: str | None = None) -> Any:
        """Counters of a model since the server has started."""
        return await triton_statistics(models, access.bucket, access.covers, name, version)

    @routes.get("/models/{name:path}/config")
    @routes.get("/models/{name:path}/versions/{version}/config")
    @needs("predict", "read", on="models")
    async def config(name: str, access: Asked, version: str | None = None) -> dict[str, Any]:
        """Triton's configuration of a model; loads it if needed."""
        return await triton_config(models, (access.bucket, name, version))

    @routes.post("/repository/index")
    @needs("read", filtered=True)
    async def index(request: Request, access: Asked) -> Any:
        """List the models with their newest versions; `{"ready": true}` leaves out unloaded ones."""
        body = await request.body()
        ready = bool(load_object(body).get("ready")) if body else False
        return await run_in_threadpool(triton_index, models, access.bucket, access.covers, ready=ready)

    @routes.post("/repository/models/{name:path}/load")
    @needs("admin", on="models")
    async def load(request: Request, name: str, access: Asked) -> None:
        """Load a model into memory, also one that was unloaded."""
        body = await request.body()
        check_load_parameters(load_object(body).get("parameters") or {} if body else {})
        await models.load(access.bucket, name)

    @routes.post("/repository/models/{name:path}/unload")
    @needs("admin", on="models")
    async def unload(name: str, access: Asked) -> None:
        """Take a model out of memory; its requests get 503 until it is loaded again."""
        await models.unload(access.bucket, name)

    @routes.get("")
    @needs()
    async def server() -> dict[str, Any]:
        """Server metadata."""
        return server_metadata()

    @routes.get("/health/live")
    @needs()
    async def live() -> dict[str, bool]:
        """Liveness: the server is running."""
        return {"live": True}

    @routes.get("/health/ready")
    @needs()
    async def ready() -> dict[str, bool]:
        """Readiness: the server can answer."""
        await models.check_ready()
        return {"ready": True}

    @routes.get("/models")
    @needs("read", filtered=True)
    def v2_names(access: Asked) -> dict[str, list[str]]:
        """List the models."""
        return _names(models, access)

    @routes.get("/models/{name:path}/ready")
    @routes.get("/models/{name:path}/versions/{version}/ready")
    @needs("predict", "read", on="models")
    async def model_ready(name: str, access: Asked, version: str | None = None) -> dict[str, Any]:
        """Whether a model is ready; loads it if needed."""
        model = await models.find((access.bucket, name, version))
        if model.batcher.is_stuck:
            raise Problem(503, f"{model.version} is unresponsive.")
        return {"name": model.version.name, "ready": True}

    @routes.get("/models/{name:path}")
    @routes.get("/models/{name:path}/versions/{version}")
    @needs("predict", "read", on="models")
    async def metadata(name: str, access: Asked, version: str | None = None) -> dict[str, Any]:
        """Inputs and outputs of a model; loads it if needed."""
        return await model_metadata(models, (access.bucket, name, version))

    return routes


def tensorflow_serving_routes(models: ModelRegistry) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["tfserving"], route_class=Endpoint)

    @routes.get("/models")
    @needs("read", filtered=True)
    def v1_names(access: Asked) -> dict[str, list[str]]:
        """List the models."""
        return _names(models, access)

    @routes.get("/models/{name:path}/metadata")
    @routes.get("/models/{name:path}/labels/{version}/metadata")
    @routes.get("/models/{name:path}/versions/{version}/metadata")
    @needs("predict", "read", on="models")
    async def signatures(name: str, access: Asked, version: str | None = None) -> dict[str, Any]:
        """Inputs and outputs of a model; loads it if needed."""
        return signature_def(await models.find((access.bucket, name, version)))

    @routes.get("/models/{name:path}")
    @routes.get("/models/{name:path}/labels/{version}")
    @routes.get("/models/{name:path}/versions/{version}")
    @needs("predict", "read", on="models")
    def status(name: str, access: Asked, version: str | None = None) -> dict[str, Any]:
        """The versions of a model that can be served."""
        shelf = models.omega[access.bucket].models
        chosen = shelf.metadata(name, version=version)
        bare = version is None and chosen.name == name
        listed = list(reversed(shelf.versions(name))) if bare else [chosen]
        ok = {"error_code": "OK", "error_message": ""}
        return {
            "name": chosen.name,
            "ready": True,
            "model_version_status": [
                {"version": str(v.number), "state": "AVAILABLE", "status": ok} for v in listed
            ],
        }

    return routes


def _names(models: ModelRegistry, access: Asked) -> dict[str, list[str]]:
    names = models.omega[access.bucket].models.list()
    return {"models": [name for name in names if access.covers("models", name)]}
