"""Every exception that Kindler raises on purpose.

    KindlerError
    ├── ConfigError (ValueError)            an argument, or a combination of arguments, is invalid
    ├── DataError (ValueError)              a row or a column does not fit the model
    ├── RowsFailedError (ValueError)        more rows failed than `max_errors` allows
    ├── MissingExtraError (ImportError)     an optional dependency is not installed
    ├── JavaNotFoundError (RuntimeError)    Spark needs Java and there is none
    ├── DiskFullError (OSError)             no space for a file
    ├── NotFittedError (RuntimeError)       the operation needs a trained or loaded model
    ├── BrokerError (ConnectionError)       the runtime's broker cannot be reached, or has no worker
    ├── TrackingError (ConnectionError)     the tracking server cannot be used
    ├── FrameError (ValueError)             a message is not one of Kindler's
    ├── TaskCancelledError (RuntimeError)   a task of the runtime was cancelled
    ├── TaskTimeoutError (TimeoutError)     a task of the runtime took too long
    ├── StoreError (RuntimeError)           an operation on the store failed
    │   ├── NotFoundError (KeyError)        no such name, version or tag
    │   ├── AlreadyExistsError (ValueError) the name is taken, and replacing was not requested
    │   ├── UntrustedError (PermissionError)  loading could run untrusted code; needs trusted=True
    │   └── DamagedError                    stored bytes are missing or changed
    └── TrainingError (RuntimeError)        a run failed
        ├── WorkerError                     user code raised on a worker (see `worker_error`)
        ├── WorkerLostError                 a worker process, executor or host was lost
        ├── NonFiniteLossError (FloatingPointError)  a loss is NaN or infinite
        ├── StartTimeoutError (TimeoutError)  the workers did not all start in time
        ├── StalledError (TimeoutError)     all workers are alive and none makes progress
        ├── FeedError                       rows could not be passed to a worker, or taken from one
        └── SyncError                       an exchange between workers failed
            └── SyncTimeoutError (TimeoutError)  some ranks never reached an exchange

Two warnings have classes of their own: UntrainedWarning (UserWarning), for scoring a model without training
it, and RowErrorsWarning (UserWarning), for rows that could not be scored.

All of them pickle, keep their data as attributes, and also derive from the builtin that a caller
would catch. Messages say what was received, which rule it broke, and after "Hint:" what works.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import errno
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

from kindler import tracebacks

_Error = TypeVar("_Error", bound=BaseException)
_MOST_CAUSES = 8  # an exception may be its own cause


class KindlerError(Exception):
    """The base class: `except KindlerError` catches every error that Kindler raises on purpose."""

    _kindler_shown_short = True  # tracebacks.MARK

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        tracebacks.shorten()

    def __str__(self) -> str:  # KeyError would show it in quotes, and OSError its number
        return str(self.args[0]) if self.args else ""

    def _render_traceback_(self) -> list[str]:
        return tracebacks.rendered(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses have keyword-only constructors; rebuild without calling them.
        return _rebuild, (type(self), self.args, self.__dict__)


def _blank(cls: type[KindlerError]) -> KindlerError:
    """An instance whose constructor was not called; OSError has its own fields and `__new__`."""
    make = OSError if issubclass(cls, OSError) else Exception
    error: KindlerError = make.__new__(cls)
    return error


def _rebuild(cls: type[KindlerError], args: tuple[Any, ...], fields: dict[str, Any]) -> KindlerError:
    tracebacks.shorten()
    error = _blank(cls)
    error.args = args
    error.__dict__.update(fields)
    return error


class ConfigError(KindlerError, ValueError):
    """An invalid argument, or an invalid combination of arguments."""


class DataError(KindlerError, ValueError):
    """A value in the data that the model cannot use.

    Attributes:
        column: The column's name, or None when the error concerns the whole input.
        row: The row's number in the input, counted from 0, or None when it concerns no single row.
    """

    def __init__(
        self,
        problem: str,
        *,
        column: str | None = None,
        row: int | str | None = None,
        positions: Sequence[int] | None = None,
        common: str | None = None,
    ) -> None:
        self.column, self.row = column, row
        # All rows of the batch that have this problem, and what is true of each of them.
        self.positions, self.common = positions, common or problem
        where = [f"column {column!r}"] if column is not None else []
        where += [f"row {row}"] if row is not None else []
        super().__init__(f"{', '.join(where)}: {problem}" if where else problem)


class RowsFailedError(KindlerError, ValueError):
    """More rows could not be scored than `max_errors` allows.

    Attributes:
        count: How many had failed by then.
        rows: How many had been scored or had failed.
        most: The value of `max_errors`.
        kinds: The first few different errors, and how many rows had each.
    """

    def __init__(self, *, count: int, rows: int, most: int, kinds: Mapping[str, int]) -> None:
        self.count, self.rows, self.most, self.kinds = count, rows, most, dict(kinds)
        shown = "".join(f"\n  {text} ({times:,} times)" for text, times in self.kinds.items())
        super().__init__(
            f"{count:,} of {rows:,} rows could not be scored, more than max_errors={most}:{shown}"
        )


class RowErrorsWarning(UserWarning):
    """Rows could not be scored; `on_error` put nulls in their place."""


class MissingExtraError(KindlerError, ImportError):
    """An optional dependency is needed and not installed."""

    def __init__(self, *, what: str, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(
            f"{what} needs {package!r}, which is not installed.\nHint: pip install 'kindler[{extra}]'"
        )


class JavaNotFoundError(KindlerError, RuntimeError):
    """Spark needs a Java runtime and none was found."""


class DiskFullError(KindlerError, OSError):
    """A file does not fit: the disk is full, or a quota or limit is reached.

    Attributes:
        path: The file.
        needed_bytes: How much was to be written, if known.
        free_bytes: How much space is left.
    """

    errno = errno.ENOSPC

    def __init__(self, *, path: str, needed_bytes: int | None, free_bytes: int, reason: str) -> None:
        self.path, self.needed_bytes, self.free_bytes = path, needed_bytes, free_bytes
        needed = "" if needed_bytes is None else f" for {needed_bytes:,} bytes"
        super().__init__(
            f"no space left{needed} at {path}: {reason}; {free_bytes:,} bytes are free.\n"
            "Hint: free some space, or use another folder: checkpoint=... for checkpoints, TMPDIR for the"
            " data of workers."
        )


class NotFittedError(KindlerError, RuntimeError):
    """The operation needs a model that was trained or loaded first."""


class UntrainedWarning(UserWarning):
    """A model from a creator is scored, evaluated or saved without having been trained or loaded."""


class BrokerError(KindlerError, ConnectionError):
    """The runtime's broker cannot be reached, or had no worker for a task."""


class TrackingError(KindlerError, ConnectionError):
    """The tracking server at `uri` cannot be reached, or rejects what is logged."""

    def __init__(self, message: str, *, uri: str) -> None:
        self.uri = uri
        super().__init__(message)


class FrameError(KindlerError, ValueError):
    """A message is not one of Kindler's; nothing in it was executed."""


class TaskCancelledError(KindlerError, RuntimeError):
    """A task of the runtime was cancelled, by its owner or because an earlier one failed."""


class TaskTimeoutError(KindlerError, TimeoutError):
    """A task of the runtime exceeded its time limit, or its caller stopped waiting.

    Attributes:
        goes_on: Whether the task is still running, and only the caller stopped waiting.
    """

    def __init__(self, *, task: str, waited_s: float, goes_on: bool) -> None:
        self.goes_on = goes_on
        message = (
            f"{task} has no result after {waited_s:g} s; it is still running.\nHint: call get()"
            " again, or cancel()."
            if goes_on
            else f"{task} ran for {waited_s:g} s and was stopped.\n"
            "Hint: runtime.options(timeout_s=...) gives it more time."
        )
        super().__init__(message)


class StoreError(KindlerError, RuntimeError):
    """An operation on the store failed."""


class NotFoundError(StoreError, KeyError):
    """There is no such name, version or tag.

    Attributes:
        name: The requested name.
        available: The versions and tags of the name, or similar names.
    """

    def __init__(self, *, what: str, name: str, available: Sequence[str] = ()) -> None:
        self.name, self.available = name, tuple(available)
        shown = ", ".join(available[:20]) + (", ..." if len(available) > 20 else "")
        super().__init__(f"there is no {what} {name!r}." + (f"\nHint: available: {shown}." if shown else ""))


class AlreadyExistsError(StoreError, ValueError):
    """The name is taken, and replacing was not requested."""

    def __init__(self, problem: str, *, name: str) -> None:
        self.name = name
        super().__init__(problem)


class UntrustedError(StoreError, PermissionError):
    """Writing or reading the object could run code that came with it, and `trusted=True` was not passed.

    Attributes:
        what: The rejected operation.
        reason: What makes it unsafe.
    """

    def __init__(self, *, what: str, reason: str) -> None:
        self.what, self.reason = what, reason
        super().__init__(
            f"{what} was rejected: {reason}.\nHint: trusted=True allows it; use it only for files from"
            " people whose code you would run."
        )


class DamagedError(StoreError):
    """Stored bytes, with the hash `sha256`, are missing or have changed."""

    def __init__(self, *, sha256: str, problem: str) -> None:
        self.sha256 = sha256
        super().__init__(f"the blob {sha256} of the store is damaged: {problem}.")


class TrainingError(KindlerError, RuntimeError):
    """A run failed."""


class WorkerError(TrainingError):
    """User code raised on a worker.

    What `fit` raises is also of the original type (see `worker_error`): `except ValueError` catches a
    ValueError raised on another machine.

    Attributes:
        rank: The worker that raised first; for work on shards, the shard's number.
        role: Its role in the gang.
        host: Its machine.
        remote_traceback: Its traceback, as text.
        shard: The number of the shard that the code was called with, for work on an XShards; else None.
    """

    rank: int
    host: str
    remote_traceback: str
    shard: int | None = None
    role: str = "worker"


class WorkerLostError(TrainingError):
    """A worker died without reporting an error: it was killed, ran out of memory, or lost its machine.

    `role` and `host` are as in `WorkerError`.

    Attributes:
        rank: The worker, or None when its whole executor was lost.
        exit_code: The exit code of the process; negative for a signal.
        log_tail: The last lines of its output.
    """

    def __init__(
        self,
        reason: str,
        *,
        rank: int | None,
        host: str,
        exit_code: int | None = None,
        log_tail: str = "",
        role: str = "worker",
    ) -> None:
        self.rank, self.role, self.host, self.exit_code, self.log_tail = rank, role, host, exit_code, log_tail
        who = "a worker" if rank is None else rank_name(rank, role)
        tail = f"\nIts last output:\n{log_tail}" if log_tail else "\nIt printed nothing."
        super().__init__(f"lost {who} on {host}: {reason}.{tail}")


class NonFiniteLossError(TrainingError, FloatingPointError):
    """The loss of a training step is NaN or infinite; `RunSettings(nan_loss=...)` decides what happens then.

    Attributes:
        step: The optimizer step, counted from 1 since the model was created.
        rank: The worker that computed it.
        loss: Its value.
        rows: The first rows of the worker's batch, by their numbers in the data if known.
    """

    def __init__(
        self, *, step: int, rank: int, loss: float, rows: Sequence[int | str], oddity: str = ""
    ) -> None:
        self.step, self.rank, self.loss, self.rows = step, rank, loss, tuple(rows)
        named = f" Its batch begins with the rows {', '.join(map(str, self.rows))}." if self.rows else ""
        super().__init__(
            f"the loss is {loss} in step {step} on worker {rank}.{named}{oddity and ' ' + oddity}\n"
            "Hint: scale the features, look for extreme values, lower the learning rate, or clip gradients;"
            " RunSettings(nan_loss='skip') skips such steps, and nan_loss='warn' continues."
        )


class FeedError(TrainingError):
    """Data could not be passed to a running worker or taken from one: it ended, closed the feed or hangs."""


class StartTimeoutError(TrainingError, TimeoutError):
    """The workers did not all start in time."""


class StalledError(TrainingError, TimeoutError):
    """All workers are alive and none made progress for `RunSettings(stall_timeout_s=...)`.

    Attributes:
        ranks: The workers that the others wait for; all of them when none waits.
        stacks: What each worker was doing, as text, by rank.
    """

    def __init__(
        self, *, ranks: Sequence[int], hosts: Mapping[int, str], stacks: Mapping[int, str], waited_s: float
    ) -> None:
        self.ranks = tuple(ranks)
        self.stacks = dict(stacks)
        others = "; the others are waiting at an exchange" if len(self.ranks) < len(hosts) else ""
        names = ", ".join(f"worker {rank} on {hosts.get(rank, 'an unknown host')}" for rank in self.ranks)
        shown = "\n\n".join(
            f"worker {rank} on {hosts.get(rank, 'an unknown host')} was at:\n"
            f"{self.stacks.get(rank, '').rstrip() or '  (no answer)'}"
            for rank in self.ranks
        )
        super().__init__(
            f"no worker made progress for {waited_s:g} s. Stuck: {names}{others}.\n\n{shown}\n\n"
            "Hint: the log has the stacks of all workers; if steps really take that long, increase"
            " RunSettings(stall_timeout_s=...)."
        )


class SyncError(TrainingError):
    """An exchange between workers failed, usually because another worker died."""


class SyncTimeoutError(SyncError, TimeoutError):
    """Some ranks, `missing`, never reached the exchange `op`."""

    def __init__(self, *, op: str, missing: Sequence[int], size: int, waited_s: float) -> None:
        self.missing, self.op, self.size, self.waited_s = tuple(missing), op, size, waited_s
        super().__init__(
            f"{op} waited {waited_s:.0f} s for {len(self.missing)} of {size} workers:"
            f" {list(self.missing)} did not arrive.\n"
            "Hint: the logs of those workers show what they were doing; if they are only slow,"
            " increase RunSettings(sync_timeout_s=...)."
        )


def fresh(error: _Error, *, traces: bool = False, _deep: int = 0) -> _Error:
    """A copy of a kept exception, to be raised: same type, message, attributes and cause.

    An exception keeps the frames it was raised through, and so their variables: one that is raised again and
    again keeps the data of every caller. With `traces` the copy remembers where the exception was first
    raised; without, neither it nor its causes do.
    """
    cls = type(error)
    makers: tuple[Any, ...] = (cls, OSError, BaseException)  # of several bases, Python accepts the deepest
    copy: Any = None
    for maker in makers:
        with suppress(TypeError):
            copy = maker.__new__(cls, *error.args)
            break
    else:  # a class with a `__new__` of its own
        return error if traces else error.with_traceback(None)
    copy.args = error.args
    for field in _native_fields(cls):
        with suppress(AttributeError, TypeError):  # not set, or not to be set
            if (value := field.__get__(error)) is not None:
                field.__set__(copy, value)
    copy.__dict__.update(error.__dict__)
    cause = error.__cause__
    if cause is not None and not traces:
        cause = fresh(cause, _deep=_deep + 1) if _deep < _MOST_CAUSES else None
    copy.__cause__ = cause
    copy.__suppress_context__ = error.__suppress_context__
    return cast(_Error, copy.with_traceback(error.__traceback__ if traces else None))


def _native_fields(cls: type[BaseException]) -> Iterator[Any]:
    """Attributes that are not in `__dict__`, such as `errno` of OSError."""
    kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)
    for base in cls.__mro__[:-1]:
        yield from (v for n, v in vars(base).items() if isinstance(v, kinds) and not n.startswith("__"))


@contextmanager
def naming_full_disk(path: str | os.PathLike[str], needed_bytes: int | None = None) -> Iterator[None]:
    """Turn a full disk into a DiskFullError, which names the path and the free space.

    Other errors of the system name the path as well.
    """
    try:
        yield
    except DiskFullError:
        raise
    except OSError as exc:
        full = exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if not full and os.strerror(errno.ENOSPC) not in str(exc):  # HDF5 gives no number
            if exc.errno and exc.filename is None:
                exc.filename = os.fspath(path)
            raise
        raise DiskFullError(
            path=os.fspath(path),
            needed_bytes=needed_bytes,
            free_bytes=_free_bytes(os.fspath(path)),
            reason=exc.strerror or str(exc),
        ) from exc


def _free_bytes(path: str) -> int:
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    disk = os.statvfs(path or ".")
    return disk.f_bavail * disk.f_frsize


def revive(kind: str, message: str, fields: dict[str, Any]) -> KindlerError | None:
    """Rebuild one of Kindler's own errors that was raised on a worker; None if `kind` is not one."""
    module, _, name = kind.partition(":")
    cls = globals().get(name) if module == __name__ else None
    if not (isinstance(cls, type) and issubclass(cls, KindlerError)):
        return None
    return _rebuild(cls, (message,), fields)


def worker_error(
    *,
    types: Sequence[str],
    message: str,
    traceback: str,
    rank: int,
    host: str,
    shard: int | None = None,
    fields: Mapping[str, str] | None = None,
    role: str = "worker",
) -> WorkerError:
    """The error that `fit` raises for an exception raised by user code on a worker.

    `types` are qualified names ("module:Class") of its classes, most specific first; `fields` are its own
    attributes, as `plain_fields` writes them.
    """
    origin = dict(locals())
    bases = _combined(types)
    name = types[0].partition(":")[2].partition("@")[0].rpartition(".")[2] if types else "WorkerError"
    pickled = lambda self: (_rebuild_worker_error, (self.__dict__["_origin"],))  # noqa: E731
    cls = type(name, bases, {"__module__": __name__, "__reduce__": pickled})
    place = rank_name(rank, role) if shard is None else f"shard {shard}"
    text = f"{message}\n\nraised as {name} on {place}, host {host}:\n{traceback.rstrip()}"
    error: Any = _blank(cls)
    error.args = (text,)
    for attribute, value in (fields or {}).items():
        try:
            setattr(error, attribute, ast.literal_eval(value))
        except (AttributeError, TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
            continue  # a property of the user's class without a setter, or no text of `plain_fields`
    error.rank, error.host, error.remote_traceback = rank, host, traceback
    error.shard, error.role = shard, role
    error.__dict__["_origin"] = origin
    return cast(WorkerError, error)


def rank_name(rank: int, role: str) -> str:
    """How messages name a rank.

    >>> rank_name(2, "worker"), rank_name(0, "ps")
    ('worker 2', 'worker 0 (ps)')
    """
    return f"worker {rank}" if role == "worker" else f"worker {rank} ({role})"


def plain_fields(error: BaseException) -> dict[str, str]:
    """The plain attributes of an exception, as text that can be read back without running code.

    >>> error = ValueError("too hot")
    >>> error.degrees, error.thermometer = (41.5, "C"), object()
    >>> plain_fields(error)
    {'degrees': "(41.5, 'C')"}
    """
    fields = dict(vars(error))
    if isinstance(error, OSError):  # not in the instance's __dict__
        fields |= {name: getattr(error, name) for name in ("errno", "strerror", "filename", "filename2")}
    kept = {}
    for name, value in fields.items():
        text = repr(value)
        try:
            same = ast.literal_eval(text) == value
            if isinstance(same, bool) and same:
                kept[name] = text
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return kept


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """A sentence that suggests the known name closest to `name`, or nothing.

    >>> did_you_mean("acuracy", ["accuracy", "auc"])
    " Did you mean 'accuracy'?"
    >>> did_you_mean("model_creator", ["model", "scheduler"])
    " Did you mean 'model'?"
    """
    wrong, names = str(name), [str(each) for each in known]
    begin = sorted((each for each in names if wrong.startswith(f"{each}_")), key=len, reverse=True)
    near = begin or difflib.get_close_matches(wrong, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def first_line(error: BaseException, most: int = 300) -> str:
    """The first line of an error's message, or the name of its class if there is none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:most]


def _combined(types: Sequence[str]) -> tuple[type, ...]:
    for qualified in types:
        raised = _loaded_class(qualified)
        if raised is None or issubclass(WorkerError, raised):
            continue
        try:
            _blank(type("probe", (WorkerError, raised), {}))
        except TypeError:  # incompatible instance layouts
            continue
        return (WorkerError, raised)
    return (WorkerError,)


def _loaded_class(qualified: str) -> type[BaseException] | None:
    """The exception class of that name if its module is already loaded; imports nothing.

    A class defined in a function cannot be looked up by name; after an "@" comes cloudpickle's id for it.
    """
    qualified, _, mark = qualified.partition("@")
    module, _, name = qualified.partition(":")
    if mark:
        sent = getattr(sys.modules.get("cloudpickle.cloudpickle"), "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
        if mark in sent:
            return sent[mark] if issubclass(sent[mark], Exception) else None
    holder: Any = builtins if module == "builtins" else sys.modules.get(module)
    for part in name.split("."):
        holder = getattr(holder, part, None)
    return holder if isinstance(holder, type) and issubclass(holder, Exception) else None


def _rebuild_worker_error(origin: dict[str, Any]) -> WorkerError:
    return worker_error(**origin)


__all__ = [
    name
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, KindlerError | UserWarning)
]
