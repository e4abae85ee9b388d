"""Exceptions that are kept and raised again: as they were, and holding nothing of those who get them."""

from __future__ import annotations

import gc
import weakref

import pytest

from kindler import errors
from kindler.errors import KindlerError, NotFoundError, UntrustedError, fresh
from kindler.serve.http_errors import Problem


class _Slotted(Exception):
    __slots__ = ("place",)

    def __init__(self, *, place: str) -> None:
        self.place = place
        super().__init__(f"not at {place}")


KEPT = [
    NotFoundError(what="model", name="net", available=["a"]),
    UntrustedError(what="it", reason="code"),
    errors.DiskFullError(path="/x", needed_bytes=1, free_bytes=0, reason="full"),
    errors.WorkerLostError("gone", rank=1, host="h"),
    errors.worker_error(types=["builtins:KeyError"], message="m", traceback="t", rank=0, host="h"),
    Problem(404, "nothing here", {"retry-after": "1"}),
    _Slotted(place="home"),
    OSError(2, "no such file", "/x"),
    KeyError("k"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
    StopIteration(3),
]


@pytest.mark.parametrize("error", KEPT, ids=lambda error: type(error).__name__)
def test_a_copy_has_the_type_the_message_the_attributes_and_the_cause(error: BaseException) -> None:
    error.__cause__ = ValueError("why")
    copy = fresh(error)
    assert copy is not error
    assert (type(copy), str(copy), copy.args) == (type(error), str(error), error.args)
    assert vars(copy) == vars(error)
    for name in ("errno", "strerror", "filename", "place", "value", "start", "reason", "message"):
        assert getattr(copy, name, None) == getattr(error, name, None)
    assert (type(copy.__cause__), str(copy.__cause__)) == (ValueError, "why")
    assert copy.__suppress_context__


def test_a_chain_of_causes_has_an_end() -> None:
    error = ValueError("why")
    error.__cause__ = error
    assert str(fresh(error).__cause__) == "why"


class _Body:
    """What a request has in hand."""


def _refused(kept: KindlerError, *, again: bool) -> weakref.ref[_Body]:
    body = _Body()
    try:
        raise fresh(kept) if again else kept
    except KindlerError:
        return weakref.ref(body)


def test_a_kept_exception_holds_the_frames_of_nobody() -> None:
    kept = NotFoundError(what="model", name="net")
    assert _refused(kept, again=True)() is None
    held = _refused(kept, again=False)
    gc.collect()
    assert held() is not None  # which is what copies are for
    assert fresh(kept).__traceback__ is None
    assert fresh(kept, traces=True).__traceback__ is kept.__traceback__
