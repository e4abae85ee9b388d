"""Routes for the content of the store and the server's own figures, for the web page and for programs.

Functions that are not `async` run in FastAPI's threads. A name may have slashes, so the more specific path
must come first; of several decorators the lowest one is first.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

import pyarrow as pa
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from kindler.data.arrow import stream
from kindler.serve.auth import Access, Authorizer
from kindler.serve.bodies import Bodies
from kindler.serve.datasets import as_table, read_value
from kindler.serve.drift import DriftWatch
from kindler.serve.endpoints import Authorized, Endpoint, Json, needs
from kindler.serve.http_errors import Problem
from kindler.serve.model_registry import ModelRegistry, shown_name
from kindler.serve.model_views import lineage_view, loaded_view, model_view, signature_view, version_view
from kindler.serve.protocols.tables import ARROW, PARQUET
from kindler.serve.protocols.values import plain
from kindler.serve.tasks import Tasks
from kindler.shelves.shelf import Shelf
from kindler.store import Version
from kindler.store.keys import SCOPES
from kindler.store.names import check_glob, literal_prefix, matches

_KNOWN = ("orient", "limit", "bucket")
_ORIENTS = ("dict", "list", "records")
Limit = Annotated[
    int | None,
    Query(ge=1, le=10_000, description="Page size. Pass `next` as `after` to get the next page."),
]


class TagMove(BaseModel):
    """The version that a tag points to."""

    version: int


class Shares(BaseModel):
    """How a tag's requests are divided: versions, and the share of each."""

    canary: dict[int, float] = {}
    shadow: dict[int, float] = {}


class StoredTable(BaseModel):
    """A table: columns by name, or rows."""

    data: dict[str, Any] | list[dict[str, Any]]
    dtypes: dict[str, str] | None = None
    append: bool | None = None
    mode: Literal["fail", "replace", "append"] | None = None


_TABLE_BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": StoredTable.model_json_schema()},
        **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in (ARROW, PARQUET)},
    },
}


def server_routes(models: ModelRegistry, authorizer: Authorizer, tasks: Tasks) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["server"], route_class=Endpoint)

    @routes.get("/ping")
    @needs()
    async def ping() -> dict[str, str]:
        """Liveness: the server is running."""
        return {"ping": datetime.now(timezone.utc).isoformat()}

    @routes.get("/buckets")
    @needs("read", filtered=True)
    def buckets(access: Authorized) -> dict[str, list[str]]:
        """List the buckets that are not empty."""
        only = access.key.buckets if access.key is not None else ()
        return {"buckets": [name for name in models.storage.buckets if not only or name in only]}

    @routes.get("/key")
    @needs(*SCOPES, filtered=True)
    async def key(access: Authorized) -> dict[str, Any]:
        """The scopes and limits of the API key of this request."""
        key, is_open = access.key, authorizer.is_open
        return {
            "id": access.key_id,
            "scopes": list(key.scopes) if key else ["admin"] if is_open else [],
            "buckets": list(key.buckets) if key else [],
            "names": dict(key.names) if key else {},
            "open": is_open,
        }

    @routes.get("/stats")
    @needs("read")
    async def stats(access: Authorized) -> dict[str, Any]:
        """Live figures: rates, latencies, queues, loaded models, and the load of the runtime."""
        counted = models.stats
        versions: dict[str, dict[str, Any]] = {}
        for (name, number), version in counted.versions.items():
            versions.setdefault(name, {})[str(number)] = version.view()
        return {
            "started": datetime.fromtimestamp(counted.started, timezone.utc).isoformat(),
            "rows_waiting": models.rows_waiting,
            **counted.live.view(),
            "models": {
                name: {**model.view(), "versions": versions.get(name, {})}
                for name, model in counted.models.items()
            },
            "loaded": [loaded_view(model) for model in models.loaded()],
            "memory_bytes": models.settings.memory_bytes,
            "runtime": await run_in_threadpool(tasks.load),
        }

    return routes


def model_routes(models: ModelRegistry, watch: DriftWatch) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["models"], route_class=Endpoint)

    @routes.get("/model/{name:path}/tags/{tag}/split")
    @needs("predict", "read", on="models")
    def split(name: str, tag: str, access: Authorized) -> dict[str, Any]:
        """How the requests of a tag are divided among versions."""
        shelf = models.storage[access.bucket].models
        shelf.metadata(name, version=tag)
        chosen = shelf.splits(name).get(tag)
        shares = {"canary": dict(chosen.canary), "shadow": dict(chosen.shadow)} if chosen else {}
        return {"model": name, "tag": tag, "canary": {}, "shadow": {}, **shares}

    @routes.get("/model/{name:path}/signature")
    @needs("predict", "read", on="models")
    async def signature(name: str, access: Authorized) -> dict[str, Any]:
        """Inputs and outputs of a model; loads it if needed."""
        model = await models.find((access.bucket, name, None))
        return {
            "model": model.version.name,
            "version": model.version.number,
            "methods": list(model.predictor.methods),
            "text": model.predictor.text,
            **signature_view(model.predictor.signature),
        }

    @routes.get("/model/{name:path}/drift")
    @needs("predict", "read", on="models")
    async def drift(name: str, access: Authorized) -> dict[str, Any]:
        """How the rows a model was asked lately differ from its training data; loads it if needed."""
        model = await models.find((access.bucket, name, None))
        if model.drift is None:
            raise Problem(
                404,
                f"{model.version} has no statistics of its training data, or --drift-rows is 0.\n"
                "Hint: they are stored with an Estimator that was trained on rows of known columns.",
            )
        head = {"model": model.version.name, "version": model.version.number}
        return {**head, **await watch.report(model.drift)}

    @routes.get("/model/{name:path}")
    @needs("predict", "read", on="models")
    @routes.get("/model/{name:path}/")
    @routes.get("/model/{name:path}/metadata")
    def model(name: str, access: Authorized) -> Json:
        """A model, its versions, tags, signature and training history."""
        shelf = models.storage[access.bucket].models
        chosen = shelf.metadata(name)
        same = (chosen.address, chosen.number)
        loaded = (m for m in models.loaded() if (m.version.address, m.version.number) == same)
        view = model_view(shelf.versions(chosen.name), shelf.tags(chosen.name), chosen, next(loaded, None))
        if access.key is None or access.key.allows("read"):
            counted = models.stats.versions.get((shown_name(chosen), chosen.number))
            view |= {"lineage": lineage_view(chosen), "requests": counted.requests if counted else 0}
        return Json({"model": chosen.name, "result": view, "resource_uri": chosen.name})

    @routes.put("/model/{name:path}/tags/{tag}/split")
    @needs("admin", on="models")
    def divide(name: str, tag: str, shares: Shares, access: Authorized) -> dict[str, Any]:
        """Divide the requests of a tag; servers notice within `--refresh-s` seconds."""
        shelf = models.storage[access.bucket].models
        shelf.split(f"{name}@{tag}", canary=shares.canary, shadow=shares.shadow)
        return split(name, tag, access)

    async def moved(access: Access, name: str) -> dict[str, Any]:
        await models.moved(access.bucket, name)
        tags = await run_in_threadpool(models.storage[access.bucket].models.tags, name)
        return {"model": name, "tags": tags}

    @routes.put("/model/{name:path}/tags/{tag}")
    @needs("admin", on="models")
    async def move(name: str, tag: str, to: TagMove, access: Authorized) -> dict[str, Any]:
        """Point a tag at a version. Answers once that version is served."""
        await run_in_threadpool(models.storage[access.bucket].models.tag, f"{name}@{to.version}", tag)
        return await moved(access, name)

    @routes.delete("/model/{name:path}/tags/{tag}")
    @needs("admin", on="models")
    async def remove(name: str, tag: str, access: Authorized) -> dict[str, Any]:
        """Remove a tag."""
        await run_in_threadpool(models.storage[access.bucket].models.untag, name, tag)
        return await moved(access, name)

    return routes


def dataset_routes(models: ModelRegistry, bodies: Bodies) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["datasets"], route_class=Endpoint)
    settings = models.settings

    @routes.get("/dataset/{name:path}")
    @needs("read", on="datasets")
    def dataset(
        request: Request,
        name: str,
        access: Authorized,
        orient: str = "dict",
        limit: Annotated[int, Query(ge=1, le=1_000_000)] = 1000,
        accept: Annotated[str, Header()] = "",
    ) -> Response:
        """The first rows of a dataset. Other query parameters are conditions, such as `x__gte=90`."""
        if orient not in _ORIENTS:
            raise Problem(400, f"orient={orient[:40]!r}: must be one of {', '.join(_ORIENTS)}.")
        shelf = models.storage[access.bucket].datasets
        version = shelf.metadata(name)
        conditions = {key: value for key, value in request.query_params.items() if key not in _KNOWN}
        most, limit = settings.body_bytes, min(limit, settings.rows)
        table = as_table(shelf, version, limit, conditions, most_bytes=most)
        head = {"name": version.name, "version": version.number}
        if table is None:
            value = read_value(shelf, version, trusted=settings.trusted, limit=limit, most_bytes=most)
            shape = getattr(value, "shape", None)
            extra = {} if shape is None else {"shape": list(shape), "dtype": value.dtype.name}
            return Json({**head, "data": plain(value), **extra})
        if ARROW in accept:
            return Response(stream(table), media_type=ARROW)
        return Json(
            {
                **head,
                "data": _oriented(table, orient),
                "index": {"values": list(range(table.num_rows)), "type": "RangeIndex"},
                "columns": {field.name: str(field.type) for field in table.schema},
            }
        )

    @routes.put("/dataset/{name:path}", openapi_extra={"requestBody": _TABLE_BODY})
    @needs("write", on="datasets")
    async def put(
        request: Request, name: str, access: Authorized, append: bool | None = None, mode: str | None = None
    ) -> dict[str, Any]:
        """Store a table, sent as Arrow, Parquet, or JSON with `data`, `dtypes` and `append`."""
        kind = request.headers.get("content-type", "")
        table, in_body = await bodies.table(await request.body(), kind)
        by_append = None if append is None else "append" if append else "replace"
        chosen: Any = mode or by_append or in_body or "fail"
        shelf = models.storage[access.bucket].datasets
        version = await run_in_threadpool(lambda: shelf.put(table, name, mode=chosen))
        return {"dataset": version.name, "version": version.number}

    @routes.delete("/dataset/{name:path}")
    @needs("write", on="datasets")
    def drop(name: str, access: Authorized) -> dict[str, Any]:
        """Remove a dataset with all its versions, or a single version."""
        return {"dataset": name, "dropped": models.storage[access.bucket].datasets.drop(name)}

    return routes


def list_routes(models: ModelRegistry) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", route_class=Endpoint)

    def add(shelf: str) -> None:
        @routes.get(f"/{shelf}", tags=[shelf])
        @needs("read", filtered=True)
        def listing(
            access: Authorized, pattern: str = "**", after: str = "", limit: Limit = None
        ) -> dict[str, Any]:
            """List a shelf of a bucket, each name with its newest version; `next` begins the next page."""
            chosen: Shelf = getattr(models.storage[access.bucket], shelf)
            versions, following = _page(chosen, pattern, access, after, limit)
            listed = {shelf: _entries(chosen, versions)}
            return listed if limit is None else {**listed, "next": following}

    for shelf in ("models", "datasets", "scripts"):
        add(shelf)
    return routes


def _entries(shelf: Shelf, versions: list[Version]) -> list[dict[str, Any]]:
    entries = [version_view(version) for version in versions]
    if shelf.shelf == "models" and versions:
        bucket, first, last = versions[0].bucket, versions[0].name, versions[-1].name
        tags = shelf.store.all_tags(bucket, "models", first, last)
        return [{**entry, "tags": tags.get(entry["name"], {})} for entry in entries]
    if shelf.shelf == "datasets":
        for entry, version in zip(entries, versions, strict=True):
            rows = version.meta.get("rows")
            entry["rows"] = sum(rows) if isinstance(rows, list) and None not in rows else None
            entry["columns"] = version.meta.get("columns")
    return entries


def _page(
    shelf: Shelf, pattern: str, access: Access, after: str, limit: int | None
) -> tuple[list[Version], str | None]:
    """The newest versions of the names that a pattern means and the key covers."""
    check_glob(re.sub(r"\*+", "*", pattern))
    prefix = f"{literal_prefix(pattern)}**"
    versions: list[Version] = []
    while True:
        some = shelf.newest(prefix, after=after, limit=None if limit is None else limit + 1)
        versions += [v for v in some if matches(pattern, v.name) and access.covers(shelf.shelf, v.name)]
        if limit is not None and len(versions) > limit:
            return versions[:limit], versions[limit - 1].name
        if limit is None or len(some) <= limit:
            return versions, None
        after = some[-1].name


def _oriented(table: pa.Table, orient: str) -> Any:
    if orient == "records":
        return table.to_pylist()
    columns = table.to_pydict()
    if orient == "list":
        return columns
    return {name: {str(i): value for i, value in enumerate(values)} for name, values in columns.items()}
