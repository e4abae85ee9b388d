"""What the user sees of Ctrl-C: the line of their own program, not the frames of Kindler above it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

__all__ = ["bare"]

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MARK = "_kindler_bare"
_before: Callable[..., Any] = sys.__excepthook__


def bare(interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """The same interrupt without a traceback; if it ends the program, Python shows no frame of Kindler's."""
    global _before
    setattr(interrupt, _MARK, True)
    interrupt.__dict__["_render_traceback_"] = partial(_rendered, interrupt)  # which IPython calls
    if sys.excepthook is not _shown:
        _before, sys.excepthook = sys.excepthook, _shown
    return interrupt.with_traceback(None)


def _shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
    """What shows the error that ends the program; after an interrupt it stands in for the one before it."""
    sys.excepthook = _before
    if getattr(error, _MARK, False):
        trace = error.__traceback__ = _users(trace)  # Python shows that of the error itself
    return _before(kind, error, trace)


def _rendered(interrupt: KeyboardInterrupt) -> list[str]:
    """What IPython shows of it, in the shell's own colours."""
    shell: Any = sys.modules["IPython"].get_ipython()
    trace = _users(interrupt.__traceback__)
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(interrupt), interrupt, trace)
    return lines


def _users(trace: TracebackType | None) -> TracebackType | None:
    """The frames that are not Kindler's."""
    if trace is None:
        return None
    rest = _users(trace.tb_next)
    if trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
