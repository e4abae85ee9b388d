"""The prediction routes of the four HTTP protocols, as the OpenAPI document has them.

`ServeApp` answers them in front of FastAPI, whose router and validation would take longer than a small model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from kindler.models.predictor import METHODS
from kindler.serve.auth import needs
from kindler.serve.endpoints import Asked, Endpoint
from kindler.serve.protocols.omega import RAW
from kindler.serve.protocols.tables import ARROW, CSV, PARQUET

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


def _documented(tag: str, takes: tuple[str, ...] = (), gives: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a route takes and gives besides JSON."""
    return {
        "tags": [tag],
        "openapi_extra": {"requestBody": {"content": dict.fromkeys(takes, _BYTES)}},
        "responses": {200: {"description": "Model outputs", "content": dict.fromkeys(gives, _BYTES)}},
    }


def documented_predictions() -> APIRouter:
    """The routes; none of them is ever reached."""
    routes = APIRouter(route_class=Endpoint)
    v2, v1 = _documented("v2", gives=(RAW,)), _documented("tfserving")
    mlflow = _documented("mlflow", (CSV, PARQUET, ARROW), (ARROW,))
    omega = _documented("models", (ARROW, RAW), (ARROW, RAW))

    @routes.post("/v2/models/{name:path}/infer", **v2)
    @routes.post("/v2/models/{name:path}/versions/{version}/infer", **v2)
    @needs("predict", on="models")
    async def v2_predict(name: str, body: V2Request, access: Asked, version: str | None = None) -> V2Response:
        """Predict (Open Inference Protocol V2)."""
        _unreachable()

    @routes.post("/v1/models/{name:path}:predict", **v1)
    @routes.post("/v1/models/{name:path}/versions/{version}:predict", **v1)
    @routes.post("/v1/models/{name:path}/labels/{version}:predict", **v1)
    @needs("predict", on="models")
    async def v1_predict(
        name: str, body: TensorFlowRequest, access: Asked, version: str | None = None
    ) -> TensorFlowResponse:
        """Predict (TensorFlow Serving)."""
        _unreachable()

    @routes.post("/invocations", **mlflow)
    @needs("predict")
    async def invocations(body: MlflowRequest, access: Asked) -> MlflowResponse:
        """Predict with the server's default model (MLflow)."""
        _unreachable()

    @routes.post("/models/{name:path}/invocations", **mlflow)
    @needs("predict", on="models")
    async def model_invocations(name: str, body: MlflowRequest, access: Asked) -> MlflowResponse:
        """Predict (MLflow)."""
        _unreachable()

    for method in METHODS:

        @routes.put(f"/api/v1/model/{{name:path}}/{method}", **omega)
        @needs("predict", on="models")
        async def omega_predict(
            name: str,
            body: OmegaRequest,
            access: Asked,
            datax: Annotated[str, Field(description="A stored dataset to use instead of a body")] = "",
            flat: Annotated[str, Field(description="1 to return the result as a flat list")] = "",
            dtype: Annotated[str, Field(description=f"The dtype of a body of {RAW}")] = "",
            shape: Annotated[str, Field(description=f"The shape of a body of {RAW}, as 8,28,28")] = "",
        ) -> OmegaResponse:
            """Predict (omega|ml)."""
            _unreachable()

    return routes


def _unreachable() -> NoReturn:
    raise NotImplementedError("predictions are answered by ServeApp")
