"""The protocols: each reads bytes into an `InferRequest` and writes an `Answer` as bytes. All are pure."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kindler.models.signature import Array, Signature
from kindler.serve.http_errors import Problem
from kindler.serve.protocols.values import dumps


@dataclass(frozen=True, slots=True)
class RawRequest:
    """What a client sent: a body, decompressed; headers, with names in lower case; and the URL's query."""

    body: bytes
    headers: Mapping[str, str]
    query: Mapping[str, str]

    @property
    def content_type(self) -> str:
        """Without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


@dataclass(frozen=True, slots=True)
class Target:
    """Which model a URL means.

    Attributes:
        name: A name, which may say which version; empty for the server's default model.
        version: A number or a tag that was given beside it.
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
        stored: Whether its rows are a dataset of the store, and need not be logged.
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
    stored: bool = False

    def check_rows(self, most: int) -> None:
        """Reject more rows than are allowed with 413."""
        rows = max((len(array) for array in self.inputs.values() if array.ndim), default=0)
        if rows > most:
            raise Problem(413, f"the request has {rows} rows; at most {most} are allowed.")


@dataclass(frozen=True, slots=True)
class Answer:
    """What version of which model gave which outputs for how many rows."""

    model: str
    version: int
    outputs: Mapping[str, Array]
    rows: int

    def check_rows(self) -> None:
        """Reject outputs that are not one row for each row of the request, where these are written by row."""
        for name, array in self.outputs.items():
            if not array.ndim or len(array) != self.rows:
                raise Problem(400, f"the output {name!r} does not have one row per row of the request.")


@dataclass(frozen=True, slots=True)
class Reply:
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    status: int = 200


class ErrorFormat:
    """How a protocol writes errors; `error` is the field of the message."""

    name: str
    error = "error"

    def target(self, method: str, path: str) -> Target | None:
        """The model that a prediction is asked of; None if this is none of the protocol's URLs.

        Raises:
            Problem: 405: it is, but not with this method.
        """
        return None

    def problem(self, problem: Problem) -> Reply:
        body = dumps({self.error: problem.message}, tokens=False)
        return Reply(body, headers=tuple(problem.headers.items()), status=problem.status)


class Codec(ErrorFormat, ABC):
    """One protocol for predictions.

    Attributes:
        path: Its URLs for predictions: the groups `name`, and `version` where it has one.
    """

    path: re.Pattern[str]

    def target(self, method: str, path: str) -> Target | None:
        match = self.path.fullmatch(path)
        if match is None:
            return None
        if method != "POST":
            raise Problem(405, f"{method} is not allowed; use POST.", {"allow": "POST"})
        return Target(match["name"] or "", match.groupdict().get("version"))

    @abstractmethod
    def decode(self, sent: RawRequest, signature: Signature, target: Target) -> InferRequest:
        """The request.

        Raises:
            Problem: 400 or 415: the body is none of this protocol.
        """

    @abstractmethod
    def encode(self, answer: Answer, request: InferRequest, sent: RawRequest) -> Reply:
        """The answer.

        Raises:
            Problem: 400 or 406: the outputs cannot be written in the form that was asked for.
        """
