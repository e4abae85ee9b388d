"""What Triton adds to the Open Inference Protocol: configuration, statistics, and its model repository.

The values are those of its JSON; the gRPC service writes the same ones as messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from kindler.models.signature import TensorSpec
from kindler.omega import Omega
from kindler.serve.auth import bare_name, needs
from kindler.serve.http_errors import Problem
from kindler.serve.loaded_models import Name, Resident, Residents, shown_name
from kindler.serve.protocols.v2 import described
from kindler.serve.protocols.values import as_object, loads
from kindler.serve.routes import Bucket, Parts, Sees
from kindler.serve.settings import ServeSettings
from kindler.serve.stats import Stats, VersionStats

if TYPE_CHECKING:
    from collections.abc import Iterable

_NS = 1_000_000_000


def config_of(resident: Resident, settings: ServeSettings) -> dict[str, Any]:
    """Triton's configuration of a model: dims are without the rows, if their number is free."""
    signature = resident.servable.signature
    specs = (*signature.inputs, *signature.outputs)
    rows_free = all(spec.shape is None or (spec.shape and spec.shape[0] is None) for spec in specs)
    joins = resident.batcher.joins(resident.servable.methods[0])
    config: dict[str, Any] = {
        "name": resident.version.name,
        "platform": f"kindler_{resident.version.kind}",
        "backend": resident.version.kind,
        "version_policy": {"specific": {"versions": [resident.version.number]}},
        "max_batch_size": settings.rows if rows_free else 0,
        "input": [_configured(spec, rows_free=rows_free) for spec in signature.inputs],
        "output": [_configured(spec, rows_free=rows_free) for spec in signature.outputs],
    }
    if joins is not False:
        config["dynamic_batching"] = {
            "preferred_batch_size": [settings.batch_rows],
            "max_queue_delay_microseconds": 0,
        }
    return config


def statistics_of(stats: Stats, residents: Residents, bucket: str, wanted: Callable[[str, int], bool]) -> Any:
    """The statistics of the versions of a bucket that are wanted, by name and number."""
    sizes = {(shown_name(r.version), r.version.number): r.size for r in residents.shown()}
    found = []
    for (shown, number), counted in sorted(stats.versions.items()):
        there, _, name = shown.rpartition(":")
        if (there or "default") == bucket and wanted(name, number):
            found.append(_statistics(name, number, counted, sizes.get((shown, number))))
    return {"model_stats": found}


def index_of(
    omega: Omega, residents: Residents, bucket: str, sees: Callable[[str, str], bool], *, ready: bool
) -> list[dict[str, str]]:
    """The models of a bucket with their newest versions.

    Args:
        omega: The store.
        residents: The loaded models.
        bucket: The bucket.
        sees: Whether a name of a shelf is shown.
        ready: Only those that are served.
    """
    entries = []
    for version in omega[bucket].models.newest():
        gone = residents.is_unloaded(bucket, version.name)
        if sees("models", version.name) and not (ready and gone):
            state, reason = ("UNAVAILABLE", "unloaded") if gone else ("READY", "")
            number = str(version.number)
            entries.append({"name": version.name, "version": number, "state": state, "reason": reason})
    return entries


def check_load_parameters(names: Iterable[str]) -> None:
    """Check what a client sent with a request to load a model.

    Raises:
        Problem: 400: a configuration or files of its own, which a model of the store has already.
    """
    for name in names:
        raise Problem(
            400, f"loading takes no parameters; received {name[:100]!r}. Models come from the store."
        )


def triton_routes(parts: Parts) -> APIRouter:
    """Routes of Triton's extensions."""
    routes = APIRouter(prefix="/v2", tags=["v2"])

    @routes.get("/models/stats")
    @needs("read", filtered=True)
    async def all_statistics(bucket: Bucket, sees: Sees) -> Any:
        """Counters of all models that answered, since the server has started."""
        return statistics_of(parts.stats, parts.residents, bucket, lambda name, _: sees("models", name))

    @routes.get("/models/{name:path}/stats")
    @routes.get("/models/{name:path}/versions/{version}/stats")
    @needs("predict", "read", on="models")
    async def statistics(name: str, bucket: Bucket, version: str | None = None) -> Any:
        """Counters of a model since the server has started."""
        wanted = await wanted_versions(parts.residents, (bucket, name, version))
        return statistics_of(parts.stats, parts.residents, bucket, wanted)

    @routes.get("/models/{name:path}/config")
    @routes.get("/models/{name:path}/versions/{version}/config")
    @needs("predict", "read", on="models")
    async def config(name: str, bucket: Bucket, version: str | None = None) -> dict[str, Any]:
        """Triton's configuration of a model; loads it if needed."""
        return config_of(await parts.residents.find((bucket, name, version)), parts.settings)

    @routes.post("/repository/index")
    @needs("read", filtered=True)
    async def index(request: Request, bucket: Bucket, sees: Sees) -> Any:
        """List the models with their newest versions; `{"ready": true}` leaves out unloaded ones."""
        body = await request.body()
        ready = bool(as_object(loads(body)).get("ready")) if body else False
        return await parts.in_thread(
            lambda: index_of(parts.omega, parts.residents, bucket, sees, ready=ready)
        )

    @routes.post("/repository/models/{name:path}/load")
    @needs("admin", on="models")
    async def load(request: Request, name: str, bucket: Bucket) -> None:
        """Load a model into memory, also one that was unloaded."""
        body = await request.body()
        check_load_parameters(as_object(loads(body)).get("parameters") or {} if body else {})
        await parts.residents.load(bucket, name)

    @routes.post("/repository/models/{name:path}/unload")
    @needs("admin", on="models")
    async def unload(name: str, bucket: Bucket) -> None:
        """Take a model out of memory; its requests get 503 until it is loaded again."""
        await parts.residents.unload(bucket, name)

    return routes


async def wanted_versions(residents: Residents, asked: Name) -> Callable[[str, int], bool]:
    """Which versions a client means: one, or all of a name that is in the store."""
    version = await residents.version(asked)
    bare = asked[2] is None and bare_name(asked[1]) == asked[1]
    return lambda name, number: name == version.name and (bare or number == version.number)


def _configured(spec: TensorSpec, *, rows_free: bool) -> dict[str, Any]:
    told = described(spec)
    kind = "STRING" if told["datatype"] == "BYTES" else told["datatype"]
    dims = told["shape"][1:] if rows_free else told["shape"]
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": dims}


def _statistics(name: str, number: int, counted: VersionStats, size: int | None) -> dict[str, Any]:
    fine = counted.requests - counted.failures
    none = {"count": 0, "ns": 0}
    calls = counted.batches
    return {
        "name": name,
        "version": str(number),
        "last_inference": int(counted.last * 1000),
        "inference_count": counted.rows,
        "execution_count": calls,
        "inference_stats": {
            "success": {"count": fine, "ns": int((counted.seconds - counted.failed_seconds) * _NS)},
            "fail": {"count": counted.failures, "ns": int(counted.failed_seconds * _NS)},
            "queue": {"count": calls, "ns": int(counted.queue_seconds * _NS)},
            "compute_input": none,
            "compute_infer": {"count": calls, "ns": int(counted.call_seconds * _NS)},
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": none,
                "compute_infer": {"count": int(count), "ns": int(seconds * _NS)},
                "compute_output": none,
            }
            for rows, (count, seconds) in sorted(counted.by_rows.items())
        ],
        "memory_usage": [] if size is None else [{"type": "CPU", "id": 0, "byte_size": size}],
    }
