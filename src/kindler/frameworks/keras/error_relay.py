"""Host code that a backend calls: what goes wrong there is kept, to be raised as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class HostCode:
    """Something that is called from within a backend.

    A backend raises an exception of host code as one of its own, without type or fields.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            self._error = exc
            raise

    @contextmanager
    def unwrapped(self) -> Iterator[None]:
        """Raise what was remembered as it was, while the block runs."""
        try:
            yield
        except Exception:
            error, self._error = self._error, None  # what fails later has a reason of its own
            if error is None:
                raise
            raise error from None
