"""Health, and the routes of the inference protocols: predictions, metadata, and Triton's extensions.

Predictions are here for the OpenAPI document alone: `ServeApp` answers them in front of FastAPI, whose router
and validation would take longer than a small model.

A name may have slashes, so the more specific path must come first; of several decorators the lowest is first.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

import kindler
from kindler.models.predictor import METHODS
from kindler.serve.endpoints import Authorized, Endpoint, needs
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
from kindler.serve.protocols.omega import RAW
from kindler.serve.protocols.tables import ARROW, CSV, PARQUET
from kindler.serve.protocols.values import load_object

_BYTES = {"schema": {"type": "string", "format": "binary"}}
_Parameters = dict[str, Any]
_Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
    "BYTES",
]  # fmt: skip
Tensor = Annotated[Any, Field(description="A number or a string, or nested lists of them")]


def _one_of(*fields: str) -> ConfigDict:
    return ConfigDict(json_schema_extra={"oneOf": [{"required": [field]} for field in fields]})


class V2Tensor(BaseModel):
    name: str
    shape: list[Annotated[int, Field(ge=0)]]
    datatype: _Datatype
    parameters: _Parameters = {}
    data: Tensor


class V2Output(BaseModel):
    name: str
    parameters: _Parameters = {}


class V2Request(BaseModel):
    """Open Inference Protocol V2."""

    id: str = ""
    parameters: _Parameters = {}
    inputs: Annotated[list[V2Tensor], Field(min_length=1)]
    outputs: list[V2Output] = []


class V2Response(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    model_name: str
    model_version: str
    id: str = ""
    outputs: list[V2Tensor]


class TensorFlowRequest(BaseModel):
    """TensorFlow Serving: rows as `instances`, or columns as `inputs`."""

    model_config = _one_of("instances", "inputs")

    signature_name: str = ""
    instances: list[Any] = []
    inputs: Tensor = None


class TensorFlowResponse(BaseModel):
    predictions: list[Any] = []
    outputs: Tensor = None


class DataFrameSplit(BaseModel):
    columns: list[str] = []
    index: list[Any] = []
    data: list[list[Any]]


class MlflowRequest(BaseModel):
    """MLflow's scoring protocol: exactly one of the four inputs."""

    model_config = _one_of("dataframe_split", "dataframe_records", "instances", "inputs")

    dataframe_split: DataFrameSplit = DataFrameSplit(data=[])
    dataframe_records: list[dict[str, Any]] = []
    instances: Tensor = None
    inputs: Tensor = None
    params: dict[str, Any] = {}


class MlflowResponse(BaseModel):
    predictions: Tensor


class OmegaRequest(BaseModel):
    """omega|ml: columns or rows, and the shape of a row."""

    columns: list[str] = []
    data: dict[str, Any] | list[Any]
    shape: list[Annotated[int, Field(ge=1)]] = []


class OmegaResponse(BaseModel):
    model: str
    result: Tensor
    resource_uri: str
    version: int
    shape: Any
    dtype: Any


def _documented(
    takes: tuple[str, ...] = (), gives: tuple[str, ...] = (), *, of_version: bool = False
) -> dict[str, Any]:
    """What a route takes and gives besides JSON; and the version in its path, which its function lacks.

    Functions that have it would document `?version=` for the path without it.
    """
    version = {"name": "version", "in": "path", "required": True, "schema": {"type": "string"}}
    body = {"content": dict.fromkeys(takes, _BYTES)}
    return {
        "openapi_extra": {"requestBody": body, "parameters": [version] if of_version else []},
        "responses": {200: {"description": "Model outputs", "content": dict.fromkeys(gives, _BYTES)}},
    }


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
    async def metrics(access: Authorized) -> Response:
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
    async def all_statistics(access: Authorized) -> Any:
        """Counters of all models that answered, since the server has started."""
        return await triton_statistics(models, access.bucket, access.covers, "", None)

    @routes.get("/models/{name:path}/stats")
    @routes.get("/models/{name:path}/versions/{version}/stats")
    @needs("predict", "read", on="models")
    async def statistics(name: str, access: Authorized, version: str | None = None) -> Any:
        """Counters of a model since the server has started."""
        return await triton_statistics(models, access.bucket, access.covers, name, version)

    @routes.get("/models/{name:path}/config")
    @routes.get("/models/{name:path}/versions/{version}/config")
    @needs("predict", "read", on="models")
    async def config(name: str, access: Authorized, version: str | None = None) -> dict[str, Any]:
        """Triton's configuration of a model; loads it if needed."""
        return await triton_config(models, (access.bucket, name, version))

    @routes.post("/repository/index")
    @needs("read", filtered=True)
    async def index(request: Request, access: Authorized) -> Any:
        """List the models with their newest versions; `{"ready": true}` leaves out unloaded ones."""
        body = await request.body()
        ready = bool(load_object(body).get("ready")) if body else False
        return await run_in_threadpool(triton_index, models, access.bucket, access.covers, ready=ready)

    @routes.post("/repository/models/{name:path}/load")
    @needs("admin", on="models")
    async def load(request: Request, name: str, access: Authorized) -> None:
        """Load a model into memory, also one that was unloaded."""
        body = await request.body()
        check_load_parameters(load_object(body).get("parameters") or {} if body else {})
        await models.load(access.bucket, name)

    @routes.post("/repository/models/{name:path}/unload")
    @needs("admin", on="models")
    async def unload(name: str, access: Authorized) -> None:
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
    def v2_names(access: Authorized) -> dict[str, list[str]]:
        """List the models."""
        return _names(models, access)

    @routes.get("/models/{name:path}/ready")
    @routes.get("/models/{name:path}/versions/{version}/ready")
    @needs("predict", "read", on="models")
    async def model_ready(name: str, access: Authorized, version: str | None = None) -> dict[str, Any]:
        """Whether a model is ready; loads it if needed."""
        model = await models.find((access.bucket, name, version))
        if model.batcher.is_stuck:
            raise Problem(503, f"{model.version} is unresponsive.")
        return {"name": model.version.name, "ready": True}

    @routes.get("/models/{name:path}")
    @routes.get("/models/{name:path}/versions/{version}")
    @needs("predict", "read", on="models")
    async def metadata(name: str, access: Authorized, version: str | None = None) -> dict[str, Any]:
        """Inputs and outputs of a model; loads it if needed."""
        return await model_metadata(models, (access.bucket, name, version))

    @routes.post("/models/{name:path}/infer", **_documented(gives=(RAW,)))
    @routes.post("/models/{name:path}/versions/{version}/infer", **_documented(gives=(RAW,), of_version=True))
    @needs("predict", on="models")
    async def v2_predict(name: str, body: V2Request, access: Authorized) -> V2Response:
        """Predict (Open Inference Protocol V2)."""
        _unreachable()

    return routes


def tensorflow_serving_routes(models: ModelRegistry) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["tfserving"], route_class=Endpoint)

    @routes.get("/models/{name:path}/metadata")
    @routes.get("/models/{name:path}/labels/{version}/metadata")
    @routes.get("/models/{name:path}/versions/{version}/metadata")
    @needs("predict", "read", on="models")
    async def signatures(name: str, access: Authorized, version: str | None = None) -> dict[str, Any]:
        """Inputs and outputs of a model; loads it if needed."""
        return signature_def(await models.find((access.bucket, name, version)))

    @routes.get("/models/{name:path}")
    @routes.get("/models/{name:path}/labels/{version}")
    @routes.get("/models/{name:path}/versions/{version}")
    @needs("predict", "read", on="models")
    def status(name: str, access: Authorized, version: str | None = None) -> dict[str, Any]:
        """The versions of a model that can be served."""
        shelf = models.storage[access.bucket].models
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

    @routes.post("/models/{name:path}:predict", **_documented())
    @routes.post("/models/{name:path}/versions/{version}:predict", **_documented(of_version=True))
    @routes.post("/models/{name:path}/labels/{version}:predict", **_documented(of_version=True))
    @needs("predict", on="models")
    async def v1_predict(name: str, body: TensorFlowRequest, access: Authorized) -> TensorFlowResponse:
        """Predict (TensorFlow Serving)."""
        _unreachable()

    return routes


def prediction_routes() -> APIRouter:
    """Those of MLflow and omega|ml."""
    routes = APIRouter(route_class=Endpoint)
    mlflow = {"tags": ["mlflow"], **_documented((CSV, PARQUET, ARROW), (ARROW,))}
    storage = {"tags": ["models"], **_documented((ARROW, RAW), (ARROW, RAW))}

    @routes.post("/invocations", **mlflow)
    @needs("predict")
    async def invocations(body: MlflowRequest, access: Authorized) -> MlflowResponse:
        """Predict with the server's default model (MLflow)."""
        _unreachable()

    @routes.post("/models/{name:path}/invocations", **mlflow)
    @needs("predict", on="models")
    async def model_invocations(name: str, body: MlflowRequest, access: Authorized) -> MlflowResponse:
        """Predict (MLflow)."""
        _unreachable()

    for method in METHODS:

        @routes.put(f"/api/v1/model/{{name:path}}/{method}", **storage)
        @needs("predict", on="models")
        async def omega_predict(
            name: str,
            body: OmegaRequest,
            access: Authorized,
            datax: Annotated[str, Field(description="A stored dataset to use instead of a body")] = "",
            flat: Annotated[str, Field(description="1 to return the result as a flat list")] = "",
            dtype: Annotated[str, Field(description=f"The dtype of a {RAW} body")] = "",
            shape: Annotated[str, Field(description=f"The shape of a {RAW} body, such as 8,28,28")] = "",
        ) -> OmegaResponse:
            """Predict (omega|ml)."""
            _unreachable()

    return routes


def _names(models: ModelRegistry, access: Authorized) -> dict[str, list[str]]:
    names = models.storage[access.bucket].models.list()
    return {"models": [name for name in names if access.covers("models", name)]}


def _unreachable() -> NoReturn:
    raise NotImplementedError("predictions are answered by ServeApp")
