"""Routes other than predictions and tasks: health, catalog, datasets, aliases, counters.

FastAPI also writes the OpenAPI document from them. Functions that are not `async` run in its threads. A name
may have slashes, so the more specific path must come first; of several decorators the lowest one is first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

import kindler
from kindler.data.arrow import stream
from kindler.omega import Omega
from kindler.serve.auth import Gate, Resource, covers, needs
from kindler.serve.body_readers import Readers
from kindler.serve.datasets import as_table, read_value
from kindler.serve.http_errors import Problem
from kindler.serve.loaded_models import Resident, Residents
from kindler.serve.name_patterns import page_of
from kindler.serve.protocols.tables import ARROW, PARQUET
from kindler.serve.protocols.values import dumps, plain
from kindler.serve.serializers import (
    metadata_of,
    server_metadata,
    show_model,
    show_resident,
    show_signature,
    show_version,
)
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats
from kindler.store.keys import SCOPES

if TYPE_CHECKING:
    from kindler.serve.tasks import Tasks

_KNOWN = ("orient", "limit", "bucket")
_ORIENTS = ("dict", "list", "records")


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes use: the store, the models, the counters, the runtime's tasks."""

    omega: Omega
    residents: Residents
    gate: Gate
    settings: ServeSettings
    stats: Stats
    tasks: Tasks
    readers: Readers
    looks: Executor

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """Ask the store, beside the requests."""
        return await run_in_threadpool(work)


class AliasMove(BaseModel):
    """The version that an alias points to."""

    version: int


class Shares(BaseModel):
    """How an alias's requests are divided: versions, and the share of each."""

    canary: dict[int, float] = {}
    shadow: dict[int, float] = {}


# `async`, as is `_later` in tasks.py: FastAPI would take a thread for each call of a plain function.
async def _bucket(
    request: Request, bucket: Annotated[str | None, Query(description="Bucket of the store")] = None
) -> str:
    # That of the authorization, and no other.
    found: str = request.scope["kindler.bucket"]
    return found


async def _sees(request: Request) -> Callable[[str, str], bool]:
    key, bucket = request.scope.get("kindler.key"), request.scope["kindler.bucket"]
    return lambda shelf, name: covers(key, Resource(bucket, shelf, name))


Bucket = Annotated[str, Depends(_bucket)]
Sees = Annotated[Callable[[str, str], bool], Depends(_sees)]  # whether the request's key is for a name
Limit = Annotated[
    int | None, Query(ge=1, le=10_000, description="At most so many; `next` is `after` of the next")
]


class Json(Response):
    """JSON that may hold arrays."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content, tokens=False)


def health_routes(parts: Parts) -> APIRouter:
    """Liveness, readiness and metrics."""
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz")
    @routes.head("/healthz", include_in_schema=False)
    @needs()
    async def healthz() -> dict[str, str]:
        """Liveness: the server is running."""
        return {"status": "alive"}

    @routes.get(
        "/readyz", responses={503: {"description": "The store is unreachable, or no loaded model answers"}}
    )
    @routes.head("/readyz", include_in_schema=False)
    @needs()
    async def readyz() -> dict[str, Any]:
        """Readiness: the store is reachable, and loaded models answer; `stuck` lists those that do not."""
        return {"status": "ready", "stuck": await check_ready(parts)}

    @routes.get("/ping", response_class=PlainTextResponse)
    @routes.get("/health", response_class=PlainTextResponse)
    @routes.head("/ping", include_in_schema=False)
    @routes.head("/health", include_in_schema=False)
    @needs()
    async def ping() -> str:
        """Liveness for MLflow and SageMaker."""
        return "\n"

    @routes.get("/version", response_class=PlainTextResponse)
    @routes.head("/version", include_in_schema=False)
    @needs()
    async def version() -> str:
        """Kindler's version."""
        return kindler.__version__

    @routes.get("/metrics", response_class=PlainTextResponse)
    @needs("read")
    async def metrics() -> Response:
        """Prometheus metrics."""
        parts.stats.waiting.set(parts.residents.rows_waiting)
        return Response(parts.stats.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def protocol_routes(parts: Parts) -> APIRouter:
    """Health and metadata of the Open Inference Protocol and of TensorFlow Serving."""
    routes = APIRouter()
    v2: dict[str, Any] = {"tags": ["v2"]}
    v1: dict[str, Any] = {"tags": ["tfserving"]}

    @routes.get("/v2", **v2)
    @routes.head("/v2", include_in_schema=False)
    @needs()
    async def server() -> dict[str, Any]:
        """Server metadata."""
        return server_metadata()

    @routes.get("/v2/health/live", **v2)
    @routes.head("/v2/health/live", include_in_schema=False)
    @needs()
    async def live() -> dict[str, bool]:
        """Liveness: the server is running."""
        return {"live": True}

    @routes.get("/v2/health/ready", **v2)
    @routes.head("/v2/health/ready", include_in_schema=False)
    @needs()
    async def ready() -> dict[str, bool]:
        """Readiness: the server can answer."""
        await check_ready(parts)
        return {"ready": True}

    @routes.get("/v2/models", **v2)
    @needs("read", filtered=True)
    def names(bucket: Bucket, sees: Sees) -> dict[str, list[str]]:
        """List the models."""
        return {"models": [name for name in parts.omega[bucket].models.list() if sees("models", name)]}

    @routes.get("/v2/models/{name:path}/ready", **v2)
    @routes.get("/v2/models/{name:path}/versions/{version}/ready", **v2)
    @needs("predict", "read", on="models")
    async def model_ready(name: str, bucket: Bucket, version: str | None = None) -> dict[str, Any]:
        """Whether a model is ready; loads it if needed."""
        resident = await parts.residents.find((bucket, name, version))
        if resident.batcher.is_stuck:
            raise Problem(503, f"{resident.version} does not return from its calls.")
        return {"name": resident.version.name, "ready": True}

    @routes.get("/v2/models/{name:path}", **v2)
    @routes.get("/v2/models/{name:path}/versions/{version}", **v2)
    @needs("predict", "read", on="models")
    async def metadata(name: str, bucket: Bucket, version: str | None = None) -> dict[str, Any]:
        """Inputs and outputs of a model; loads it if needed."""
        resident = await parts.residents.find((bucket, name, version))
        return metadata_of(resident, await parts.residents.numbers(resident.version))

    @routes.get("/v1/models", **v1)
    @needs("read", filtered=True)
    def models(bucket: Bucket, sees: Sees) -> dict[str, list[str]]:
        """List the models."""
        return {"models": [name for name in parts.omega[bucket].models.list() if sees("models", name)]}

    @routes.get("/v1/models/{name:path}/metadata", **v1)
    @routes.get("/v1/models/{name:path}/labels/{version}/metadata", **v1)
    @routes.get("/v1/models/{name:path}/versions/{version}/metadata", **v1)
    @needs("predict", "read", on="models")
    async def signatures(name: str, bucket: Bucket, version: str | None = None) -> dict[str, Any]:
        """Inputs and outputs of a model; loads it if needed."""
        return _signature_def(await parts.residents.find((bucket, name, version)))

    @routes.get("/v1/models/{name:path}", **v1)
    @routes.get("/v1/models/{name:path}/labels/{version}", **v1)
    @routes.get("/v1/models/{name:path}/versions/{version}", **v1)
    @needs("predict", "read", on="models")
    def status(name: str, bucket: Bucket, version: str | None = None) -> dict[str, Any]:
        """The versions of a model that can be served."""
        shelf = parts.omega[bucket].models
        chosen = shelf.metadata(name, version=version)
        bare = version is None and chosen.name == name
        listed = list(reversed(shelf.versions(name))) if bare else [chosen]
        fine = {"error_code": "OK", "error_message": ""}
        return {
            "name": chosen.name,
            "ready": True,
            "model_version_status": [
                {"version": str(v.number), "state": "AVAILABLE", "status": fine} for v in listed
            ],
        }

    return routes


def catalog_routes(parts: Parts) -> APIRouter:
    """The content of the store, for the web page and for programs."""
    routes = APIRouter(prefix="/api/v1")
    _general(routes, parts)
    _models(routes, parts)
    _datasets(routes, parts)
    _scripts(routes, parts)
    return routes


def _general(routes: APIRouter, parts: Parts) -> None:
    tags: dict[str, Any] = {"tags": ["server"]}

    @routes.get("/ping", **tags)
    @routes.head("/ping", include_in_schema=False)
    @needs()
    async def ping() -> dict[str, str]:
        """Liveness: the server is running."""
        return {"ping": datetime.now(timezone.utc).isoformat()}

    @routes.get("/buckets", **tags)
    @needs("read", filtered=True)
    def buckets(request: Request) -> dict[str, list[str]]:
        """List the buckets that are not empty."""
        key = request.scope.get("kindler.key")
        only = key.buckets if key is not None else ()
        return {"buckets": [name for name in parts.omega.buckets if not only or name in only]}

    @routes.get("/key", **tags)
    @needs(*SCOPES, filtered=True)
    async def key(request: Request) -> dict[str, Any]:
        """The scopes and limits of the API key of this request."""
        key = request.scope.get("kindler.key")
        open_to_all = parts.gate.is_open
        return {
            "id": key.id if key else None,
            "scopes": list(key.scopes) if key else ["admin"] if open_to_all else [],
            "buckets": list(key.buckets) if key else [],
            "names": dict(key.names) if key else {},
            "open": open_to_all,
        }

    @routes.get("/stats", **tags)
    @needs("read")
    async def stats() -> dict[str, Any]:
        """Live figures: rates, latencies, queues, loaded models, and the load of the runtime."""
        counted = parts.stats
        versions: dict[str, dict[str, Any]] = {}
        for (name, number), version in counted.versions.items():
            versions.setdefault(name, {})[str(number)] = version.shown()
        return {
            "started": datetime.fromtimestamp(counted.started, timezone.utc).isoformat(),
            "rows_waiting": parts.residents.rows_waiting,
            **counted.live.shown(),
            "latency_ms_per_second": counted.live.latencies(),
            "models": {
                name: {**model.shown(), "versions": versions.get(name, {})}
                for name, model in counted.models.items()
            },
            "loaded": [show_resident(resident) for resident in parts.residents.shown()],
            "memory_bytes": parts.settings.memory_bytes,
            "runtime": await parts.in_thread(parts.tasks.load),
        }


def _listing(
    what: str, entries: list[dict[str, Any]], following: str | None, limit: int | None
) -> dict[str, Any]:
    """The answer to a request for a list; who asks for pages is told where the next one begins."""
    return {what: entries} if limit is None else {what: entries, "next": following}


def _models(routes: APIRouter, parts: Parts) -> None:
    tags: dict[str, Any] = {"tags": ["models"]}

    @routes.get("/models", **tags)
    @needs("read", filtered=True)
    def models(
        bucket: Bucket, sees: Sees, pattern: str = "**", after: str = "", limit: Limit = None
    ) -> dict[str, Any]:
        """List the models of a bucket, each with its newest version and its aliases."""
        shelf = parts.omega[bucket].models
        versions, following = page_of(shelf, pattern, sees, after, limit)
        names = [version.name for version in versions]
        tags = shelf.store.all_tags(bucket, "models", names[0], names[-1]) if names else {}
        shown = [{**show_version(v), "tags": tags.get(v.name, {})} for v in versions]
        return _listing("models", shown, following, limit)

    @routes.get("/model/{name:path}/aliases/{alias}/split", **tags)
    @needs("predict", "read", on="models")
    def split(name: str, alias: str, bucket: Bucket) -> dict[str, Any]:
        """How the requests of an alias are divided among versions."""
        models = parts.omega[bucket].models
        models.metadata(name, version=alias)
        found = models.splits(name).get(alias)
        return {
            "model": name,
            "alias": alias,
            "canary": {} if found is None else dict(found.canary),
            "shadow": {} if found is None else dict(found.shadow),
        }

    @routes.get("/model/{name:path}/signature", **tags)
    @needs("predict", "read", on="models")
    async def signature(name: str, bucket: Bucket) -> dict[str, Any]:
        """Inputs and outputs of a model; loads it if needed."""
        resident = await parts.residents.find((bucket, name, None))
        return {
            "model": resident.version.name,
            "version": resident.version.number,
            "methods": list(resident.servable.methods),
            **show_signature(resident.servable.signature),
        }

    @routes.get("/model/{name:path}", **tags)
    @needs("predict", "read", on="models")
    @routes.get("/model/{name:path}/", **tags)
    @routes.get("/model/{name:path}/metadata", **tags)
    def model(name: str, bucket: Bucket) -> Json:
        """A model, its versions, aliases, signature and training history."""
        shelf = parts.omega[bucket].models
        chosen = shelf.metadata(name)
        shown = show_model(
            shelf.versions(chosen.name), shelf.tags(chosen.name), chosen, _loaded(parts, chosen)
        )
        return Json({"model": chosen.name, "result": shown, "resource_uri": chosen.name})

    @routes.put("/model/{name:path}/aliases/{alias}/split", **tags)
    @needs("admin", on="models")
    def divide(name: str, alias: str, shares: Shares, bucket: Bucket) -> dict[str, Any]:
        """Divide the requests of an alias; servers notice within `--refresh-s` seconds."""
        parts.omega[bucket].models.split(f"{name}@{alias}", canary=shares.canary, shadow=shares.shadow)
        return split(name, alias, bucket)

    @routes.put("/model/{name:path}/aliases/{alias}", **tags)
    @needs("admin", on="models")
    async def move(name: str, alias: str, to: AliasMove, bucket: Bucket) -> dict[str, Any]:
        """Point an alias at a version. Answers once that version is served."""
        await parts.in_thread(lambda: parts.omega[bucket].models.tag(f"{name}@{to.version}", alias))
        await parts.residents.moved(bucket, name)
        return {"model": name, "tags": await parts.in_thread(lambda: parts.omega[bucket].models.tags(name))}

    @routes.delete("/model/{name:path}/aliases/{alias}", **tags)
    @needs("admin", on="models")
    async def remove(name: str, alias: str, bucket: Bucket) -> dict[str, Any]:
        """Remove an alias."""
        await parts.in_thread(lambda: parts.omega[bucket].models.untag(name, alias))
        await parts.residents.moved(bucket, name)
        return {"model": name, "tags": await parts.in_thread(lambda: parts.omega[bucket].models.tags(name))}


def _datasets(routes: APIRouter, parts: Parts) -> None:
    tags: dict[str, Any] = {"tags": ["datasets"]}

    @routes.get("/datasets", **tags)
    @needs("read", filtered=True)
    def datasets(
        bucket: Bucket, sees: Sees, pattern: str = "**", after: str = "", limit: Limit = None
    ) -> dict[str, Any]:
        """List the datasets of a bucket, each with its newest version."""
        entries = []
        versions, following = page_of(parts.omega[bucket].datasets, pattern, sees, after, limit)
        for version in versions:
            rows = version.meta.get("rows")
            entries.append(
                {
                    **show_version(version),
                    "rows": sum(rows) if isinstance(rows, list) and None not in rows else None,
                    "columns": version.meta.get("columns"),
                }
            )
        return _listing("datasets", entries, following, limit)

    @routes.get("/dataset/{name:path}", **tags)
    @needs("read", on="datasets")
    def dataset(
        request: Request,
        name: str,
        bucket: Bucket,
        orient: str = "dict",
        limit: Annotated[int, Query(ge=1, le=1_000_000)] = 1000,
        accept: Annotated[str, Header()] = "",
    ) -> Response:
        """The first rows of a dataset. Other query parameters are conditions, such as `x__gte=90`."""
        if orient not in _ORIENTS:
            raise Problem(400, f"orient={orient[:40]!r}: must be one of {', '.join(_ORIENTS)}.")
        shelf = parts.omega[bucket].datasets
        version = shelf.metadata(name)
        asked = {key: value for key, value in request.query_params.items() if key not in _KNOWN}
        most = parts.settings.body_bytes
        limit = min(limit, parts.settings.rows)
        table = as_table(shelf, version, limit, asked, most_bytes=most)
        head = {"name": version.name, "version": version.number}
        if table is None:
            value = read_value(shelf, version, trusted=parts.settings.trusted, limit=limit, most_bytes=most)
            shape = getattr(value, "shape", None)
            extra = {} if shape is None else {"shape": list(shape), "dtype": value.dtype.name}
            return Json({**head, "data": value if shape is None else plain(value), **extra})
        if ARROW in accept:
            return Response(stream(table), media_type=ARROW)
        rows = table.num_rows
        return Json(
            {
                **head,
                "data": _oriented(table, orient),
                "index": {"values": list(range(rows)), "type": "RangeIndex"},
                "columns": {field.name: str(field.type) for field in table.schema},
            }
        )

    @routes.put("/dataset/{name:path}", **tags, openapi_extra={"requestBody": _DATASET_BODY})
    @needs("write", on="datasets")
    async def put(
        request: Request, name: str, bucket: Bucket, append: bool | None = None, mode: str | None = None
    ) -> dict[str, Any]:
        """Store a table, sent as Arrow, Parquet, or JSON with `data` (columns or rows),"
        " `dtypes` and `append`."""
        kind = request.headers.get("content-type", "")
        table, told_mode = await parts.readers.table(await request.body(), kind)
        by_append = None if append is None else "append" if append else "replace"
        chosen: Any = mode or by_append or told_mode or "fail"
        version = await parts.in_thread(lambda: parts.omega[bucket].datasets.put(table, name, mode=chosen))
        return {"dataset": version.name, "version": version.number}

    @routes.delete("/dataset/{name:path}", **tags)
    @needs("write", on="datasets")
    def drop(name: str, bucket: Bucket) -> dict[str, Any]:
        """Remove a dataset with all its versions, or a single version."""
        return {"dataset": name, "dropped": parts.omega[bucket].datasets.drop(name)}


def _scripts(routes: APIRouter, parts: Parts) -> None:
    tags: dict[str, Any] = {"tags": ["scripts"]}

    @routes.get("/scripts", **tags)
    @needs("read", filtered=True)
    def scripts(
        bucket: Bucket, sees: Sees, pattern: str = "**", after: str = "", limit: Limit = None
    ) -> dict[str, Any]:
        """List the scripts of a bucket."""
        versions, following = page_of(parts.omega[bucket].scripts, pattern, sees, after, limit)
        return _listing("scripts", [show_version(v) for v in versions], following, limit)


_TABLE_SCHEMA = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]},
        "dtypes": {"type": "object", "additionalProperties": {"type": "string"}},
        "append": {"type": "boolean"},
        "mode": {"type": "string", "enum": ["fail", "replace", "append"]},
    },
}
_BYTES = {"schema": {"type": "string", "format": "binary"}}
_DATASET_BODY = {
    "required": True,
    "content": {"application/json": {"schema": _TABLE_SCHEMA}, ARROW: _BYTES, PARQUET: _BYTES},
}


async def check_ready(parts: Parts) -> list[str]:
    """The models that hang, if others still answer.

    Raises:
        StoreError: The store cannot be reached.
        Problem: 503 if no loaded model returns from its calls, or if the server's own model does not.
    """
    await asyncio.get_running_loop().run_in_executor(parts.looks, lambda: parts.omega.buckets)
    shown = parts.residents.shown()
    stuck = [str(resident.version) for resident in shown if resident.batcher.is_stuck]
    own = (parts.settings.model or "").partition("@")[0].rstrip("^")
    of_own = [r for r in shown if r.version.name == own and r.version.bucket == "default"]
    for asked in (shown, of_own):
        if asked and all(resident.batcher.is_stuck for resident in asked):
            raise Problem(503, f"models that do not return from their calls: {', '.join(stuck)}.")
    return stuck


def _loaded(parts: Parts, version: Any) -> Resident | None:
    for resident in parts.residents.shown():
        if (resident.version.address, resident.version.number) == (version.address, version.number):
            return resident
    return None


def _signature_def(resident: Resident) -> dict[str, Any]:
    names = {
        "float16": "DT_HALF",
        "float32": "DT_FLOAT",
        "float64": "DT_DOUBLE",
        "bool": "DT_BOOL",
        "object": "DT_STRING",
    }

    def side(specs: Any) -> dict[str, Any]:
        tensors = {}
        for spec in specs:
            dims = [{"size": str(-1 if n is None else n), "name": ""} for n in spec.shape or ()]
            dtype = spec.dtype or "float64"
            tensors[spec.name] = {
                "dtype": names.get(dtype, f"DT_{dtype.upper()}"),
                "tensor_shape": {"dim": dims, "unknown_rank": spec.shape is None},
                "name": spec.name,
            }
        return tensors

    functions = {
        name: {
            "inputs": side(signature.inputs),
            "outputs": side(signature.outputs),
            "method_name": "tensorflow/serving/predict",
            "defaults": {},
        }
        for name, signature in resident.servable.signatures.items()
    }
    version = str(resident.version.number)
    return {
        "model_spec": {"name": resident.version.name, "signature_name": "", "version": version},
        "metadata": {"signature_def": {"signature_def": functions}},
    }


def _oriented(table: pa.Table, orient: str) -> Any:
    if orient == "records":
        return table.to_pylist()
    columns = table.to_pydict()
    if orient == "list":
        return columns
    return {name: {str(i): value for i, value in enumerate(values)} for name, values in columns.items()}
