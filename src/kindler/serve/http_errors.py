"""A failed request as a status and a sentence; each protocol writes it in its own format."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from contextlib import suppress

from kindler.errors import (
    AlreadyExistsError,
    BrokerError,
    ConfigError,
    DataError,
    KindlerError,
    MissingExtraError,
    NotFoundError,
    StoreError,
    UntrustedError,
)

STATUS_TEXTS = {
    400: "Bad request",
    401: "Missing, unknown or expired API key",
    403: "The API key does not allow this",
    404: "Not found",
    409: "Already exists",
    413: "Request too large",
    415: "Unsupported media type",
    429: "Too many requests; see Retry-After",
    503: "Service unavailable; see Retry-After",
    504: "Timed out",
}
_STATUS: tuple[tuple[type[KindlerError], int], ...] = (
    (NotFoundError, 404),
    (AlreadyExistsError, 409),
    (UntrustedError, 403),
    (ConfigError, 400),
    (DataError, 400),
    (MissingExtraError, 501),
    (StoreError, 503),
    (BrokerError, 503),
)
_PAIR = re.compile(r"\(.{0,10000}, \d{3}\)", re.DOTALL)


class Problem(Exception):
    """An HTTP error: its status, a sentence for the client, and extra response headers.

    Attributes:
        costly: Whether rejecting it required decoding the body.
    """

    costly = False

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.message = message
        self.headers = dict(headers or {})
        super().__init__(message)


def as_problem(error: BaseException) -> Problem | None:
    """The client's view of an error; None for an internal error, whose details stay in the log."""
    if isinstance(error, Problem):
        return error
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return Problem(status, str(error), {"retry-after": "1"} if status == 503 else None)
    return None


def own_status(error: BaseException, text: str) -> tuple[int | None, str]:
    """The HTTP status that code of the store gave its exception, and its text without it.

    It is the second argument, as in `raise Exception("not here", 404)`, or an attribute `http_status`. Of an
    exception from another process, its text is all that is left of its arguments.
    """
    status = getattr(error, "http_status", None)
    if _PAIR.fullmatch(text):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            pair = ast.literal_eval(text)
            if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str):
                text, status = pair
    return (status if type(status) is int and 400 <= status < 600 else None), text
