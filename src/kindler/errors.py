"""Every exception that Kindler raises on purpose.

    KindlerError
    ├── ConfigError (ValueError)            an argument or a combination of them cannot work
    ├── DataError (ValueError)              a row or a column is not what the model can take
    ├── MissingExtraError (ImportError)     an optional dependency is not installed
    ├── JavaNotFoundError (RuntimeError)    Spark needs Java and there is none
    ├── DiskFullError (OSError)             no room for a file
    ├── NotFittedError (RuntimeError)       asked for what only training makes
    ├── BrokerError (ConnectionError)       the runtime's broker cannot be reached, or has no worker
    ├── TrackingError (ConnectionError)     the tracking server cannot be used
    ├── FrameError (ValueError)             a message is none that Kindler sends
    ├── TaskCancelledError (RuntimeError)   a task of the runtime was cancelled
    ├── TaskTimeoutError (TimeoutError)     a task of the runtime took too long
    ├── StoreError (RuntimeError)           the store cannot do what was asked
    │   ├── NotFoundError (KeyError)        no such name, version or tag
    │   ├── AlreadyExistsError (ValueError) something has that name, and was not to be replaced
    │   ├── UntrustedError (PermissionError)  it could run code of others, and the caller did not trust it
    │   └── DamagedError                    stored bytes are gone or changed
    └── TrainingError (RuntimeError)        a run failed
        ├── WorkerError                     the user's code raised on a worker (see `worker_error`)
        ├── WorkerLost                      a worker process, executor or host went away
        ├── StartTimeoutError (TimeoutError)  the gang did not come together in time
        ├── StalledError (TimeoutError)     all workers live and none gets any further
        ├── FeedError                       rows could not be passed to a worker, or taken from one
        └── SyncError                       an exchange between workers broke
            └── SyncTimeoutError (TimeoutError)  some ranks never reached an exchange

All of them pickle, keep their data as attributes, and are also the builtin that a caller would
catch. Messages say what was received, which rule it broke, and after "Hint:" what would work.
"""

from __future__ import annotations

import ast
import builtins
import errno
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = [
    "AlreadyExistsError",
    "BrokerError",
    "ConfigError",
    "DamagedError",
    "DataError",
    "DiskFullError",
    "FeedError",
    "FrameError",
    "JavaNotFoundError",
    "KindlerError",
    "MissingExtraError",
    "NotFittedError",
    "NotFoundError",
    "StalledError",
    "StartTimeoutError",
    "StoreError",
    "SyncError",
    "SyncTimeoutError",
    "TaskCancelledError",
    "TaskTimeoutError",
    "TrackingError",
    "TrainingError",
    "UntrustedError",
    "WorkerError",
    "WorkerLost",
    "first_line",
    "naming_full_disk",
    "plain_fields",
    "rank_name",
    "revive",
    "worker_error",
]


class KindlerError(Exception):
    """The root of the tree: `except KindlerError` catches all of Kindler's own complaints."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses have keyword-only constructors; rebuild without calling them.
        return _rebuild, (type(self), self.args, self.__dict__)


def _blank(cls: type[KindlerError]) -> KindlerError:
    """An instance whose constructor was not called; a builtin with fields of its own makes it."""
    make = OSError if issubclass(cls, OSError) else Exception
    error: KindlerError = make.__new__(cls)
    return error


def _rebuild(cls: type[KindlerError], args: tuple[Any, ...], fields: dict[str, Any]) -> KindlerError:
    error = _blank(cls)
    error.args = args
    error.__dict__.update(fields)
    return error


class ConfigError(KindlerError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class DataError(KindlerError, ValueError):
    """A value in the data that the model cannot take.

    Attributes:
        column: The column's name, or None when the complaint is about the whole input.
        row: The row's number in the input, counted from 0, or None when no single row is to blame.
    """

    def __init__(self, problem: str, *, column: str | None = None, row: int | str | None = None) -> None:
        self.column = column
        self.row = row
        where = [f"column {column!r}"] if column is not None else []
        where += [f"row {row}"] if row is not None else []
        super().__init__(f"{', '.join(where)}: {problem}" if where else problem)


class MissingExtraError(KindlerError, ImportError):
    """An optional dependency that is needed now and not installed."""

    def __init__(self, *, what: str, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(
            f"{what} needs {package!r}, which is not installed.\nHint: pip install 'kindler[{extra}]'"
        )


class JavaNotFoundError(KindlerError, RuntimeError):
    """Spark needs a Java runtime and none was found."""


class DiskFullError(KindlerError, OSError):
    """There is no room for a file: the disk is full, or a quota or limit is reached.

    Attributes:
        path: The file.
        needed_bytes: How much was to be written, where that is known.
        free_bytes: How much room there is.
    """

    errno = errno.ENOSPC

    def __init__(self, *, path: str, needed_bytes: int | None, free_bytes: int, reason: str) -> None:
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        needed = "" if needed_bytes is None else f" for {needed_bytes:,} bytes"
        super().__init__(
            f"there is no room{needed} at {path}: {reason}; {free_bytes:,} bytes are free there.\n"
            "Hint: free some space, or use another folder: model_dir=... for checkpoints, TMPDIR for the data"
            " of workers."
        )

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NotFittedError(KindlerError, RuntimeError):
    """Asked for something that only training or loading makes."""


class BrokerError(KindlerError, ConnectionError):
    """The runtime's broker cannot be reached, or had no worker for a task."""


class TrackingError(KindlerError, ConnectionError):
    """The tracking server cannot be reached, or refuses what is to be logged.

    Attributes:
        uri: The server.
    """

    def __init__(self, message: str, *, uri: str) -> None:
        self.uri = uri
        super().__init__(message)


class FrameError(KindlerError, ValueError):
    """A message that is none of Kindler's; nothing in it was executed."""


class TaskCancelledError(KindlerError, RuntimeError):
    """A task of the runtime was cancelled, by its owner or because one before it failed."""


class TaskTimeoutError(KindlerError, TimeoutError):
    """A task of the runtime took longer than it may, or than its caller wanted to wait.

    Attributes:
        goes_on: Whether it still runs: the caller did not want to wait any longer.
    """

    def __init__(self, *, task: str, waited_s: float, goes_on: bool) -> None:
        self.goes_on = goes_on
        told = (
            f"{task} has no result after {waited_s:g} s; it goes on.\nHint: get() again, or cancel()."
            if goes_on
            else f"{task} ran for {waited_s:g} s and was ended.\n"
            "Hint: runtime.options(timeout_s=...) gives it more time."
        )
        super().__init__(told)


class StoreError(KindlerError, RuntimeError):
    """The store cannot do what was asked."""


class NotFoundError(StoreError, KeyError):
    """There is no such name, version or tag.

    Attributes:
        name: What was asked for.
        available: What there is instead: the versions and tags of the name, or names that are near.
    """

    def __init__(self, *, what: str, name: str, available: Sequence[str] = ()) -> None:
        self.name = name
        self.available = tuple(available)
        shown = ", ".join(self.available[:20]) + (", ..." if len(self.available) > 20 else "")
        super().__init__(f"there is no {what} {name!r}." + (f"\nHint: there are {shown}." if shown else ""))

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show it in quotes


class AlreadyExistsError(StoreError, ValueError):
    """Something has that name already, and was not to be replaced.

    Attributes:
        name: The name.
    """

    def __init__(self, problem: str, *, name: str) -> None:
        self.name = name
        super().__init__(problem)


class UntrustedError(StoreError, PermissionError):
    """Writing or reading it could run code that came with it, and the caller did not say `trusted=True`.

    Attributes:
        what: What it is.
        reason: What is in it.
    """

    def __init__(self, *, what: str, reason: str) -> None:
        self.what = what
        self.reason = reason
        super().__init__(
            f"{what} was refused: {reason}.\nHint: trusted=True allows it; give it only for what comes from"
            " people whose programs you would run."
        )


class DamagedError(StoreError):
    """Stored bytes are gone, or are not those that were stored.

    Attributes:
        sha256: The blob.
    """

    def __init__(self, *, sha256: str, problem: str) -> None:
        self.sha256 = sha256
        super().__init__(f"the blob {sha256} of the store is damaged: {problem}.")


class TrainingError(KindlerError, RuntimeError):
    """A run failed."""


class WorkerError(TrainingError):
    """The user's own code raised on a worker.

    `worker_error` makes it: what `fit` raises is a WorkerError *and* the type that was raised, so
    `except ValueError` catches the ValueError of a model that runs three machines away.

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

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class WorkerLost(TrainingError):
    """A worker went away without saying why: killed, out of memory, or its machine is gone.

    Attributes:
        rank: The worker that went away, or None when its whole executor took the news with it.
        role: Its role in the gang.
        host: Its machine.
        exit_code: What the process ended with; negative is a signal's number.
        log_tail: The last lines it printed.
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
        self.rank = rank
        self.role = role
        self.host = host
        self.exit_code = exit_code
        self.log_tail = log_tail
        who = "a worker" if rank is None else rank_name(rank, role)
        tail = f"\nIts last lines:\n{log_tail}" if log_tail else "\nIt had printed nothing."
        super().__init__(f"lost {who} on {host}: {reason}.{tail}")


class FeedError(TrainingError):
    """Data could not be passed to a running worker, or taken from one: it ended, closed the feed or hangs."""


class StartTimeoutError(TrainingError, TimeoutError):
    """The workers did not all come up in time."""


class StalledError(TrainingError, TimeoutError):
    """All workers live and none got any further for `RunSettings(stall_timeout_s=...)`.

    Attributes:
        ranks: The workers that the others wait for; all of them when none waits.
        stacks: What each worker was doing, as text, by rank.
    """

    def __init__(
        self, *, ranks: Sequence[int], hosts: Mapping[int, str], stacks: Mapping[int, str], waited_s: float
    ) -> None:
        self.ranks = tuple(ranks)
        self.stacks = dict(stacks)
        others = "; the others wait at an exchange" if len(self.ranks) < len(hosts) else ""
        names = ", ".join(f"worker {rank} on {hosts.get(rank, 'an unknown host')}" for rank in self.ranks)
        shown = "\n\n".join(
            f"worker {rank} on {hosts.get(rank, 'an unknown host')} was at:\n"
            f"{self.stacks.get(rank, '').rstrip() or '  (it did not answer)'}"
            for rank in self.ranks
        )
        super().__init__(
            f"no worker got any further for {waited_s:g} s. Stuck: {names}{others}.\n\n{shown}\n\n"
            "Hint: the log has the stacks of all workers; if steps really take that long, raise"
            " RunSettings(stall_timeout_s=...)."
        )


class SyncError(TrainingError):
    """An exchange between workers broke; most often because another worker is gone."""


class SyncTimeoutError(SyncError, TimeoutError):
    """Some ranks never reached an exchange.

    Attributes:
        missing: The ranks that did not arrive.
        op: The exchange.
        size: How many ranks there are.
        waited_s: How long the others waited.
    """

    def __init__(self, *, op: str, missing: Sequence[int], size: int, waited_s: float) -> None:
        self.missing = tuple(missing)
        self.op, self.size, self.waited_s = op, size, waited_s
        super().__init__(
            f"{op} waited {waited_s:.0f} s for {len(self.missing)} of {size} workers:"
            f" {list(self.missing)} did not arrive.\n"
            "Hint: the log of those workers says what they were doing; if they are only slow,"
            " raise RunSettings(sync_timeout_s=...)."
        )


@contextmanager
def naming_full_disk(path: str | os.PathLike[str], needed_bytes: int | None = None) -> Iterator[None]:
    """Say where there is no room, and how much there is, if what the block writes to `path` does not fit.

    Raises:
        DiskFullError: It does not.
    """
    try:
        yield
    except DiskFullError:
        raise
    except OSError as exc:
        full = exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if not full and os.strerror(errno.ENOSPC) not in str(exc):  # HDF5 gives no number
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
    found = os.statvfs(path or ".")
    return found.f_bavail * found.f_frsize


def revive(kind: str, message: str, fields: dict[str, Any]) -> KindlerError | None:
    """A complaint of Kindler's own that was raised on a worker, as it was; None if `kind` names none."""
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

    Args:
        types: Qualified names ("module:Class") of the exception's classes, most specific first.
        message: The exception's own message.
        traceback: The worker's traceback, as text.
        rank: The worker's rank.
        host: The worker's machine.
        shard: The shard that was worked on, where the work was on shards.
        fields: The exception's own attributes, as `plain_fields` writes them.
        role: The worker's role.
    """
    bases = _combined(types)
    name = _short(types[0]) if types else "WorkerError"
    cls = type(name, bases, {"__module__": __name__, "__reduce__": _reduce_worker_error})
    place = rank_name(rank, role) if shard is None else f"shard {shard}"
    text = f"{message}\n\nraised as {name} on {place}, host {host}:\n{traceback.rstrip()}"
    error: Any = _blank(cls)
    error.args = (text,)
    for attribute, value in (fields or {}).items():
        try:
            setattr(error, attribute, ast.literal_eval(value))
        except (AttributeError, TypeError, ValueError, SyntaxError):
            continue  # a property of the user's class without a setter
    error.rank, error.host, error.remote_traceback, error.shard = rank, host, traceback, shard
    error.role = role
    error.__dict__["_origin"] = (
        tuple(types),
        message,
        traceback,
        rank,
        host,
        shard,
        dict(fields or {}),
        role,
    )
    made: WorkerError = error
    return made


def rank_name(rank: int, role: str) -> str:
    """How messages name a rank.

    >>> rank_name(2, "worker"), rank_name(0, "ps")
    ('worker 2', 'worker 0 (ps)')
    """
    return f"worker {rank}" if role == "worker" else f"worker {rank} ({role})"


def plain_fields(error: BaseException) -> dict[str, str]:
    """An exception's own attributes as text, those that are plain values; nothing runs to read them again.

    >>> error = ValueError("too hot")
    >>> error.degrees, error.thermometer = (41.5, "C"), object()
    >>> plain_fields(error)
    {'degrees': "(41.5, 'C')"}
    """
    found = dict(vars(error))
    if isinstance(error, OSError):  # these are no attributes of the instance's own
        found |= {name: getattr(error, name) for name in ("errno", "strerror", "filename", "filename2")}
    kept = {}
    for name, value in found.items():
        text = repr(value)
        try:
            same = ast.literal_eval(text) == value
            if isinstance(same, bool) and same:
                kept[name] = text
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return kept


def first_line(error: BaseException, most: int = 300) -> str:
    """What an error says, without what follows; its name if it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:most]


def _combined(types: Sequence[str]) -> tuple[type, ...]:
    for qualified in types:
        found = _loaded_class(qualified)
        if found is None or issubclass(WorkerError, found):
            continue
        try:
            _blank(type("probe", (WorkerError, found), {}))
        except TypeError:  # instance layouts that do not go together
            continue
        return (WorkerError, found)
    return (WorkerError,)


def _short(qualified: str) -> str:
    return qualified.partition(":")[2].partition("@")[0].rpartition(".")[2]


def _loaded_class(qualified: str) -> type[BaseException] | None:
    """The exception class of that name, only if its module is already loaded: nothing is imported.

    A class that was made in a function has no name to be found by; after an "@" comes the mark under which
    cloudpickle knows it in the process that sent it out.
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


def _reduce_worker_error(self: WorkerError) -> tuple[Any, ...]:
    return _rebuild_worker_error, self.__dict__["_origin"]


def _rebuild_worker_error(
    types: tuple[str, ...],
    message: str,
    traceback: str,
    rank: int,
    host: str,
    shard: int | None,
    fields: Mapping[str, str],
    role: str,
) -> WorkerError:
    return worker_error(
        types=types,
        message=message,
        traceback=traceback,
        rank=rank,
        host=host,
        shard=shard,
        fields=fields,
        role=role,
    )
