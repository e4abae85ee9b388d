"""Whether the code that a saved stage names may be run while it is read: not unless the caller says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_trusted: ContextVar[bool] = ContextVar("kindler_ml_trusted", default=False)


@contextmanager
def trusting() -> Iterator[None]:
    """Read stages whose model is, or names, code: `with kindler.ml.trusting(): PipelineModel.load(path)`.

    Needed for PyTorch models of your own classes, which are imported by name, and for exported programs. Use
    it only for files from people whose code you would run.
    """
    token = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(token)


def is_trusted() -> bool:
    """Whether this is within `trusting()`."""
    return _trusted.get()
