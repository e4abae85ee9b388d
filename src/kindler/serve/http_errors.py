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
    """An HTTP error.

    Attributes:
        status: The HTTP status.
        message: A sentence for the client.
        headers: Extra response headers.
        costly: Whether finding it out took long, as it was in a body that looked harmless.
    """

    costly = False

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.message = message
        self.headers = dict(headers or {})
        super().__init__(message)


def require_post(method: str) -> None:
    """Reject other methods.

    Raises:
        Problem: 405.
    """
    if method != "POST":
        raise Problem(405, f"{method} is not allowed; use POST.", {"allow": "POST"})


def as_problem(error: BaseException) -> Problem | None:
    """The client's view of an error; None for an internal error, whose details stay in the log."""
    if isinstance(error, Problem):
        return error
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return Problem(status, str(error), {"retry-after": "1"} if status == 503 else None)
    return None


def own_status(error: BaseException, told: str) -> tuple[int | None, str]:
    """The HTTP status that code of the store gave its exception, and its text without it.

    It is the second argument, as in `raise Exception("not here", 404)`, or an attribute `http_status`.

    Args:
        error: The exception.
        told: Its text: of one from another process, all that is left of its arguments.
    """
    status = getattr(error, "http_status", None)
    if _PAIR.fullmatch(told):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            pair = ast.literal_eval(told)
            if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str):
                told, status = pair
    return (status if type(status) is int and 400 <= status < 600 else None), told
