"""How ranks ended, and what that means for the run. Pure: no waiting here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kindler.errors import (
    KindlerError,
    StalledError,
    SyncError,
    SyncTimeoutError,
    WorkerLostError,
    revive,
    worker_error,
)
from kindler.frame import from_bytes, to_bytes

CHUNK_BYTES = 4 << 20
_SYNC_TIMEOUT = f"{SyncTimeoutError.__module__}:{SyncTimeoutError.__qualname__}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank ended, or for `stalled` the whole gang.

    Kinds: `result`, `error` (user code raised), `lost` (the process died), `left` (it died, and the others go
    on), `stalled` (all are alive, none moves) or `aborted` (others failed).
    """

    rank: int
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    buffers: tuple[bytes, ...] = ()


def failure(outcomes: Iterable[Outcome]) -> KindlerError | None:
    """The error to raise, or None: the user's own first, then a stall, then a lost worker.

    A broken exchange is only the echo of one of those on another rank.
    """
    bad = [o for o in outcomes if o.kind in ("error", "lost", "stalled")]
    errors = [o for o in bad if is_own_error(o)]
    lost = [o for o in bad if o.kind == "lost"]
    if errors:
        return _raised(errors[0])
    stalled = [o for o in bad if o.kind == "stalled"]
    if stalled:
        return _stalled(stalled[0])
    if lost:
        return lost_error(lost[0])
    return _timed_out(bad) or (_raised(bad[0]) if bad else None)


def is_own_error(outcome: Outcome) -> bool:
    """Whether a rank's own code raised; a broken exchange is the echo of another rank's end."""
    return outcome.kind == "error" and not outcome.fields.get("sync")


def is_sync_timeout(outcome: Outcome) -> bool:
    """Whether a rank gave up waiting for others; errors travel as the names of their classes."""
    return outcome.kind == "error" and outcome.fields.get("types", [""])[0] == _SYNC_TIMEOUT


def _timed_out(bad: Sequence[Outcome]) -> SyncTimeoutError | None:
    """Merge the ranks' timeouts: a rank that was waiting itself is not missing."""
    waited = [o for o in bad if is_sync_timeout(o)]
    if not waited:
        return None
    own = waited[0].fields["own"]
    named = set.intersection(*(set(o.fields["own"]["missing"]) for o in waited))
    missing = sorted(named - {o.rank for o in waited}) or own["missing"]
    return SyncTimeoutError(op=own["op"], missing=missing, size=own["size"], waited_s=own["waited_s"])


def _raised(outcome: Outcome) -> KindlerError:
    fields = outcome.fields
    if fields.get("sync"):
        error: KindlerError = SyncError(f"{fields['message']} (worker {outcome.rank}, host {fields['host']})")
        return error
    own = revive(fields["types"][0], fields["message"], fields.get("own", {}))
    return own or worker_error(
        types=fields["types"],
        message=fields["message"],
        traceback=fields["traceback"],
        rank=outcome.rank,
        host=fields["host"],
        fields=fields.get("fields"),
        role=fields.get("role", "worker"),
    )


def lost_error(outcome: Outcome) -> WorkerLostError:
    fields = outcome.fields
    return WorkerLostError(
        fields["reason"],
        rank=outcome.rank,
        host=fields["host"],
        exit_code=fields.get("exit_code"),
        log_tail=fields.get("log_tail", ""),
        role=fields.get("role", "worker"),
    )


def _stalled(outcome: Outcome) -> StalledError:
    fields = outcome.fields
    return StalledError(
        ranks=fields["ranks"],
        hosts={int(rank): host for rank, host in fields["hosts"].items()},  # JSON's keys are strings
        stacks={int(rank): text for rank, text in fields["stacks"].items()},
        waited_s=fields["waited_s"],
    )


def pack(outcome: Outcome) -> Iterator[bytes]:
    data = memoryview(to_bytes(outcome.kind, *outcome.buffers, **outcome.fields))
    for start in range(0, len(data), CHUNK_BYTES):
        yield bytes(data[start : start + CHUNK_BYTES])


def unpack(rank: int, pieces: Sequence[bytes]) -> Outcome:
    frame = from_bytes(b"".join(pieces))
    return Outcome(rank, frame.kind, frame.fields, frame.buffers)
