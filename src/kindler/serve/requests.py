"""The one request that all protocols are read into, and the one answer that all are written from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kindler.models.predictor import METHODS
from kindler.models.signature import Array
from kindler.serve.http_errors import Problem

__all__ = ["METHODS", "Answer", "InferRequest", "Reply", "Target", "check_rows"]


@dataclass(frozen=True, slots=True)
class Target:
    """Which model a URL means.

    Attributes:
        name: A name, which may say which version; empty for the server's default model.
        version: A number or an alias that was given beside it.
        action: The method that is called.
    """

    name: str
    version: str | None = None
    action: str = "predict"


@dataclass(slots=True, kw_only=True)
class InferRequest:
    """Arrays for a model.

    Attributes:
        inputs: Arrays by name; one of an unnamed input has the name "".
        columns: Whether these are columns of a table, and not the model's inputs.
        method: What is called: "predict", "predict_proba", ...
        signature: The name of the signature that is asked for; None for the model's own.
        params: The request's other parameters.
        outputs: The outputs that are wanted, with the parameters of each; None for all.
        id: What the answer repeats.
        timeout_s: How long the client waits, if it said so.
        batch: Whether its rows may share a call with others.
    """

    inputs: Mapping[str, Array]
    columns: bool = False
    method: str = "predict"
    signature: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[str, Any]] | None = None
    id: str = ""
    timeout_s: float | None = None
    batch: bool = True


def check_rows(request: InferRequest, most: int) -> None:
    """Reject a request with more rows than are allowed with 413."""
    rows = max((len(array) for array in request.inputs.values() if array.ndim), default=0)
    if rows > most:
        raise Problem(413, f"the request has {rows} rows; at most {most} are allowed.")


@dataclass(frozen=True, slots=True)
class Answer:
    """What version of which model gave which outputs for how many rows."""

    model: str
    version: int
    outputs: Mapping[str, Array]
    rows: int


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response."""

    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    status: int = 200
