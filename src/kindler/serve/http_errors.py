"""A failed request as a status and a sentence; each protocol writes it in its own format."""

from __future__ import annotations

from collections.abc import Mapping

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

__all__ = ["Problem", "as_problem", "require_post"]

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
