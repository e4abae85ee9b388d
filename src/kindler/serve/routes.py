"""Everything that is no prediction and no task: health, what there is, datasets, aliases, counters.

On FastAPI, which also writes the OpenAPI document. Functions that are not `async` run in its threads. A name
may have slashes, so a path comes before those that it fits too; of several decorators the lowest is first.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel

import kindler
from kindler.data.arrow import stream
from kindler.omega import Omega
from kindler.serve.auth import Gate, needs
from kindler.serve.body_readers import Readers
from kindler.serve.datasets import as_table, read_value
from kindler.serve.http_errors import Problem
from kindler.serve.loaded_models import Resident, Residents
from kindler.serve.name_patterns import newest
from kindler.serve.protocols.tables import ARROW, PARQUET
from kindler.serve.protocols.v2 import described
from kindler.serve.protocols.values import dumps, plain
from kindler.serve.serializers import show_model, show_resident, show_signature, show_version
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats
from kindler.store.keys import SCOPES

if TYPE_CHECKING:
    from kindler.serve.tasks import Tasks

__all__ = ["Bucket", "Json", "Parts", "catalog_routes", "health_routes", "protocol_routes"]

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


class AliasMove(BaseModel):
    """Where an alias is to stand."""

    version: int


# `async`, as is `_later` in tasks.py: FastAPI would take a thread for each call of a plain function.
async def _bucket(
    request: Request, bucket: Annotated[str | None, Query(description="The bucket")] = None
) -> str:
    return bucket or request.headers.get("bucket") or "default"


Bucket = Annotated[str, Depends(_bucket)]


class Json(Response):
    """JSON that may hold arrays."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes."""
        return dumps(content, tokens=False)


def health_routes(parts: Parts) -> APIRouter:
    """Whether the server lives, is ready, and what it counts."""
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz")
    @routes.head("/healthz", include_in_schema=False)
    @needs()
    async def healthz() -> dict[str, str]:
        """The server lives."""
        return {"status": "alive"}

    @routes.get("/readyz", responses={503: {"description": "The store cannot be reached"}})
    @routes.head("/readyz", include_in_schema=False)
    @needs()
    async def readyz() -> dict[str, Any]:
        """The server can answer: its store can be reached, and its models, or some of them, come back."""
        return {"status": "ready", "stuck": await _check_ready(parts)}

    @routes.get("/ping", response_class=PlainTextResponse)
    @routes.get("/health", response_class=PlainTextResponse)
    @routes.head("/ping", include_in_schema=False)
    @routes.head("/health", include_in_schema=False)
    @needs()
    async def ping() -> str:
        """MLflow's and SageMaker's question whether the server lives."""
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
        """Counters for Prometheus."""
        parts.stats.waiting.set(parts.residents.rows_waiting)
        return Response(parts.stats.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def protocol_routes(parts: Parts) -> APIRouter:
    """What clients of the Open Inference Protocol and of TensorFlow Serving ask beside predictions."""
    routes = APIRouter()
    v2: dict[str, Any] = {"tags": ["v2"]}
    v1: dict[str, Any] = {"tags": ["tfserving"]}

    @routes.get("/v2", **v2)
    @routes.head("/v2", include_in_schema=False)
    @needs()
    async def server() -> dict[str, Any]:
        """The server."""
        return {"name": "kindler", "version": kindler.__version__, "extensions": ["binary_tensor_data"]}

    @routes.get("/v2/health/live", **v2)
    @routes.head("/v2/health/live", include_in_schema=False)
    @needs()
    async def live() -> dict[str, bool]:
        """The server lives."""
        return {"live": True}

    @routes.get("/v2/health/ready", **v2)
    @routes.head("/v2/health/ready", include_in_schema=False)
    @needs()
    async def ready() -> dict[str, bool]:
        """The server can answer."""
        await _check_ready(parts)
        return {"ready": True}

    @routes.get("/v2/models", **v2)
    @needs("read")
    def names(bucket: Bucket) -> dict[str, list[str]]:
        """The models there are."""
        return {"models": parts.omega[bucket].models.list()}

    @routes.post("/v2/repository/index", **v2)
    @needs("read")
    def index(bucket: Bucket) -> list[dict[str, str]]:
        """The models there are, with their newest versions."""
        return [
            {"name": version.name, "version": str(version.number), "state": "READY", "reason": ""}
            for version in parts.omega[bucket].models.newest()
        ]

    @routes.get("/v2/models/{name:path}/ready", **v2)
    @routes.get("/v2/models/{name:path}/versions/{version}/ready", **v2)
    @needs("predict", "read")
    async def model_ready(name: str, bucket: Bucket, version: str | None = None) -> dict[str, Any]:
        """Whether a model can answer; loads it."""
        resident = await parts.residents.find((bucket, name, version))
        if resident.batcher.is_stuck:
            raise Problem(503, f"{resident.version} does not come back from its calls.")
        return {"name": resident.version.name, "ready": True}

    @routes.get("/v2/models/{name:path}", **v2)
    @routes.get("/v2/models/{name:path}/versions/{version}", **v2)
    @needs("predict", "read")
    async def metadata(name: str, bucket: Bucket, version: str | None = None) -> dict[str, Any]:
        """What a model takes and gives; loads it."""
        resident = await parts.residents.find((bucket, name, version))
        signature = resident.servable.signature
        return {
            "name": resident.version.name,
            "versions": [str(resident.version.number)],
            "platform": f"kindler_{resident.version.kind}",
            "inputs": [described(spec) for spec in signature.inputs],
            "outputs": [described(spec) for spec in signature.outputs],
        }

    @routes.get("/v1/models", **v1)
    @needs("read")
    def models(bucket: Bucket) -> dict[str, list[str]]:
        """The models there are."""
        return {"models": parts.omega[bucket].models.list()}

    @routes.get("/v1/models/{name:path}/metadata", **v1)
    @routes.get("/v1/models/{name:path}/labels/{version}/metadata", **v1)
    @routes.get("/v1/models/{name:path}/versions/{version}/metadata", **v1)
    @needs("predict", "read")
    async def signatures(name: str, bucket: Bucket, version: str | None = None) -> dict[str, Any]:
        """What a model takes and gives; loads it."""
        return _signature_def(await parts.residents.find((bucket, name, version)))

    @routes.get("/v1/models/{name:path}", **v1)
    @routes.get("/v1/models/{name:path}/labels/{version}", **v1)
    @routes.get("/v1/models/{name:path}/versions/{version}", **v1)
    @needs("predict", "read")
    def status(name: str, bucket: Bucket, version: str | None = None) -> dict[str, Any]:
        """The versions of a model that can be asked."""
        shelf = parts.omega[bucket].models
        found = shelf.metadata(name, version=version)
        bare = version is None and found.name == name
        listed = list(reversed(shelf.versions(name))) if bare else [found]
        fine = {"error_code": "OK", "error_message": ""}
        return {
            "name": found.name,
            "ready": True,
            "model_version_status": [
                {"version": str(v.number), "state": "AVAILABLE", "status": fine} for v in listed
            ],
        }

    return routes


def catalog_routes(parts: Parts) -> APIRouter:
    """What there is in the store, for the web page and for programs."""
    routes = APIRouter(prefix="/api/v1")
    _general(routes, parts)
    _models(routes, parts)
    _datasets(routes, parts)
    _scripts(routes, parts)
    return routes


def _general(routes: APIRouter, parts: Parts) -> None:
    told: dict[str, Any] = {"tags": ["server"]}

    @routes.get("/ping", **told)
    @routes.head("/ping", include_in_schema=False)
    @needs()
    async def ping() -> dict[str, str]:
        """The server lives."""
        return {"ping": datetime.now(timezone.utc).isoformat()}

    @routes.get("/buckets", **told)
    @needs("read")
    def buckets() -> dict[str, list[str]]:
        """The buckets that hold something."""
        return {"buckets": parts.omega.buckets}

    @routes.get("/key", **told)
    @needs(*SCOPES)
    async def key(request: Request) -> dict[str, Any]:
        """What the key of this request allows."""
        found = request.scope.get("kindler.key")
        open_to_all = parts.gate.is_open
        return {
            "id": found.id if found else None,
            "scopes": list(found.scopes) if found else ["admin"] if open_to_all else [],
            "open": open_to_all,
        }

    @routes.get("/stats", **told)
    @needs("read")
    async def stats() -> dict[str, Any]:
        """Live figures: rates, latencies, queues, the models in memory, and what the runtime has to do."""
        counted = parts.stats
        return {
            "started": datetime.fromtimestamp(counted.started, timezone.utc).isoformat(),
            "rows_waiting": parts.residents.rows_waiting,
            **counted.live.shown(),
            "latency_ms_per_second": counted.live.latencies(),
            "models": {name: model.shown() for name, model in counted.models.items()},
            "loaded": [show_resident(resident) for resident in parts.residents.shown()],
            "memory_bytes": parts.settings.memory_bytes,
            "runtime": await _in_thread(parts.tasks.load),
        }


def _models(routes: APIRouter, parts: Parts) -> None:
    told: dict[str, Any] = {"tags": ["models"]}

    @routes.get("/models", **told)
    @needs("read")
    def models(bucket: Bucket, pattern: str = "**") -> dict[str, Any]:
        """The models of a bucket, each with its newest version and its aliases."""
        shelf = parts.omega[bucket].models
        found = []
        for version in newest(shelf, pattern):
            tags = shelf.tags(version.name)
            found.append({**show_version(version), "tags": tags})
        return {"models": found}

    @routes.get("/model/{name:path}/signature", **told)
    @needs("predict", "read")
    async def signature(name: str, bucket: Bucket) -> dict[str, Any]:
        """What a model takes and gives; loads it."""
        resident = await parts.residents.find((bucket, name, None))
        return {
            "model": resident.version.name,
            "version": resident.version.number,
            "methods": list(resident.servable.methods),
            **show_signature(resident.servable.signature),
        }

    @routes.get("/model/{name:path}", **told)
    @needs("predict", "read")
    @routes.get("/model/{name:path}/", **told)
    @routes.get("/model/{name:path}/metadata", **told)
    def model(name: str, bucket: Bucket) -> Json:
        """A model, its versions, aliases, signature and training history."""
        shelf = parts.omega[bucket].models
        chosen = shelf.metadata(name)
        shown = show_model(
            shelf.versions(chosen.name), shelf.tags(chosen.name), chosen, _loaded(parts, chosen)
        )
        return Json({"model": chosen.name, "result": shown, "resource_uri": chosen.name})

    @routes.put("/model/{name:path}/aliases/{alias}", **told)
    @needs("admin")
    async def move(name: str, alias: str, to: AliasMove, bucket: Bucket) -> dict[str, Any]:
        """Make an alias stand at a version. Answers when the version serves."""
        await _in_thread(lambda: parts.omega[bucket].models.tag(f"{name}@{to.version}", alias))
        await parts.residents.moved(bucket, name)
        return {"model": name, "tags": await _in_thread(lambda: parts.omega[bucket].models.tags(name))}

    @routes.delete("/model/{name:path}/aliases/{alias}", **told)
    @needs("admin")
    async def remove(name: str, alias: str, bucket: Bucket) -> dict[str, Any]:
        """Take an alias away."""
        await _in_thread(lambda: parts.omega[bucket].models.untag(name, alias))
        await parts.residents.moved(bucket, name)
        return {"model": name, "tags": await _in_thread(lambda: parts.omega[bucket].models.tags(name))}


def _datasets(routes: APIRouter, parts: Parts) -> None:
    told: dict[str, Any] = {"tags": ["datasets"]}

    @routes.get("/datasets", **told)
    @needs("read")
    def datasets(bucket: Bucket, pattern: str = "**") -> dict[str, Any]:
        """The datasets of a bucket, each with its newest version."""
        shelf = parts.omega[bucket].datasets
        found = []
        for version in newest(shelf, pattern):
            rows = version.meta.get("rows")
            found.append(
                {
                    **show_version(version),
                    "rows": sum(rows) if isinstance(rows, list) and None not in rows else None,
                    "columns": version.meta.get("columns"),
                }
            )
        return {"datasets": found}

    @routes.get("/dataset/{name:path}", **told)
    @needs("read")
    def dataset(
        request: Request,
        name: str,
        bucket: Bucket,
        orient: str = "dict",
        limit: Annotated[int, Query(ge=1, le=1_000_000)] = 1000,
        accept: Annotated[str, Header()] = "",
    ) -> Response:
        """The first rows of a dataset. Other arguments are conditions, such as `x__gte=90`."""
        if orient not in _ORIENTS:
            raise Problem(400, f"orient={orient[:40]!r}: there are {', '.join(_ORIENTS)}.")
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

    @routes.put("/dataset/{name:path}", **told, openapi_extra={"requestBody": _DATASET_BODY})
    @needs("write")
    async def put(
        request: Request, name: str, bucket: Bucket, append: bool = False, mode: str | None = None
    ) -> dict[str, Any]:
        """Store a table: JSON with `data` (columns or rows), `dtypes` and `append`, or Arrow, or Parquet."""
        kind = request.headers.get("content-type", "")
        table, told_mode = await parts.readers.table(await request.body(), kind)
        chosen: Any = mode or told_mode or ("append" if append else "fail")
        version = await _in_thread(lambda: parts.omega[bucket].datasets.put(table, name, mode=chosen))
        return {"dataset": version.name, "version": version.number}

    @routes.delete("/dataset/{name:path}", **told)
    @needs("write")
    def drop(name: str, bucket: Bucket) -> dict[str, Any]:
        """Take a dataset away with all its versions, or the one that is named."""
        return {"dataset": name, "dropped": parts.omega[bucket].datasets.drop(name)}


def _scripts(routes: APIRouter, parts: Parts) -> None:
    told: dict[str, Any] = {"tags": ["scripts"]}

    @routes.get("/scripts", **told)
    @needs("read")
    def scripts(bucket: Bucket, pattern: str = "**") -> dict[str, Any]:
        """The scripts of a bucket."""
        return {"scripts": [show_version(v) for v in newest(parts.omega[bucket].scripts, pattern)]}


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


async def _check_ready(parts: Parts) -> list[str]:
    """The models that hang, if others can still answer.

    Raises:
        StoreError: The store cannot be reached.
        Problem: 503: no model in memory comes back, or not the one that the server is for.
    """
    await asyncio.get_running_loop().run_in_executor(parts.looks, lambda: parts.omega.buckets)
    shown = parts.residents.shown()
    stuck = [str(resident.version) for resident in shown if resident.batcher.is_stuck]
    own = (parts.settings.model or "").partition("@")[0].rstrip("^")
    of_own = [r for r in shown if r.version.name == own and r.version.bucket == "default"]
    for asked in (shown, of_own):
        if asked and all(resident.batcher.is_stuck for resident in asked):
            raise Problem(503, f"{', '.join(stuck)} do not come back from their calls.")
    return stuck


async def _in_thread(work: Any) -> Any:
    from starlette.concurrency import run_in_threadpool

    return await run_in_threadpool(work)


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
        found = {}
        for spec in specs:
            dims = [{"size": str(-1 if n is None else n), "name": ""} for n in spec.shape or ()]
            dtype = spec.dtype or "float64"
            found[spec.name] = {
                "dtype": names.get(dtype, f"DT_{dtype.upper()}"),
                "tensor_shape": {"dim": dims, "unknown_rank": spec.shape is None},
                "name": spec.name,
            }
        return found

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
