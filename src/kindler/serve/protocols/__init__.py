"""The protocols: each reads bytes into an `InferRequest` and writes an `Answer` as bytes. All are pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kindler.models.signature import Signature
from kindler.serve.requests import Answer, InferRequest, Reply, Target

__all__ = ["Codec", "Sent"]


@dataclass(frozen=True, slots=True)
class Sent:
    """What a client sent.

    Attributes:
        body: The body, decompressed.
        headers: The headers, with names in lower case.
        query: What follows the "?" of the URL.
    """

    body: bytes
    headers: Mapping[str, str]
    query: Mapping[str, str]

    @property
    def content_type(self) -> str:
        """What the body is said to be, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class Codec(Protocol):
    """One protocol."""

    name: str

    def target(self, method: str, path: str) -> Target | None:
        """The model that a prediction is asked of, if this is one of the protocol's URLs for that.

        Raises:
            Problem: 405: it is, but not with this method.
        """

    def decode(self, sent: Sent, signature: Signature, target: Target) -> InferRequest:
        """The request.

        Raises:
            Problem: 400 or 415: the body is none of this protocol.
        """

    def encode(self, answer: Answer, request: InferRequest, sent: Sent, target: Target) -> Reply:
        """The answer.

        Raises:
            Problem: 400: the outputs cannot be written in the form that was asked for.
        """

    def problem(self, status: int, message: str) -> Reply:
        """An answer that is no success."""
