"""What users see of Ctrl-C and of Kindler's own errors: their program's lines, not Kindler's frames.

Errors keep their tracebacks, for debuggers and `traceback.print_exc()`. Only what Python or IPython shows of
the error that ends a program or a cell is shorter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

MARK = "_kindler_shown_short"  # an attribute of errors that are shown without frames of Kindler's
_before: Callable[..., Any] = sys.__excepthook__


def shorten() -> None:
    """From now on, show an error with `MARK` that ends the program without Kindler's frames."""
    global _before
    if sys.excepthook is not _shown:
        _before, sys.excepthook = sys.excepthook, _shown


def without_kindler_frames(interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """The same interrupt without a traceback; if it ends the program, Python shows no frame of Kindler's."""
    setattr(interrupt, MARK, True)
    interrupt.__dict__["_render_traceback_"] = partial(rendered, interrupt)  # which IPython calls
    shorten()
    return interrupt.with_traceback(None)


def rendered(error: BaseException) -> list[str]:
    shell: Any = sys.modules["IPython"].get_ipython()
    trace = _users(error.__traceback__)
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, trace)
    return lines


def _shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
    """Stands in for the previous excepthook."""
    sys.excepthook = _before
    if getattr(error, MARK, False):
        trace = error.__traceback__ = _users(trace)  # Python shows that of the error itself
        cause = error.__cause__ or error.__context__
        while cause is not None:
            cause.__traceback__ = _users(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
    return _before(kind, error, trace)


def _users(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    rest = _users(trace.tb_next)
    module = str(trace.tb_frame.f_globals.get("__name__"))  # made-up code, of dataclasses say, has no file
    if module.partition(".")[0] == "kindler":
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
