"""Watches a run from the driver: passes on what workers say, and notices those that fall silent.

Both engines use it; they differ in who starts the supervisors.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from kindler.config import RunSettings
from kindler.engine.hub import Event, Hub
from kindler.engine.outcome import Outcome, failure
from kindler.errors import KindlerError, StartTimeoutError

__all__ = ["Listener", "new_run_id", "new_secret", "verdict", "watch"]

Listener = Callable[[Event], None]

_TURN_S = 0.2


def new_run_id() -> str:
    """A name for a run."""
    return secrets.token_hex(4)


def new_secret() -> bytes:
    """What the members of a run prove themselves with."""
    return secrets.token_bytes(32)


def watch(
    hub: Hub,
    *,
    running: Callable[[], bool],
    listener: Listener,
    settings: RunSettings,
    after_first: bool = False,
) -> list[Outcome]:
    """Follow the run until `running()` is false; the bad ends that were heard of.

    With `after_first` the time for all to come up counts from when the first one did: before that,
    Spark is computing the data, for as long as it takes.

    Raises:
        StartTimeoutError: The workers did not all come up in time.
    """
    deadline = time.monotonic() + settings.start_timeout_s
    bad: list[Outcome] = []
    ending = False
    while not ending:
        if after_first and not hub.joined:
            deadline = time.monotonic() + settings.start_timeout_s
        ending = not running()  # what was said just before the end is still heard below
        for event in hub.events(0.0 if ending else _TURN_S):
            if event.kind in ("error", "lost"):
                bad.append(Outcome(event.rank, event.kind, event.fields))
            elif event.kind in ("log", "report"):
                listener(event)
        for rank, host in hub.silent():
            reason = f"nothing was heard from its machine for {settings.heartbeat_timeout_s:g} s"
            bad.append(Outcome(rank, "lost", {"host": host, "reason": reason}))
            hub.abort()
            return bad
        if not ending and time.monotonic() > deadline and (missing := hub.missing()):
            raise StartTimeoutError(
                f"{len(missing)} of the workers did not come up in {settings.start_timeout_s:g} s:"
                f" ranks {missing}.\nHint: are there as many free slots as workers?"
                " RunSettings(start_timeout_s=...) waits longer."
            )
    return bad


def verdict(heard: list[Outcome], returned: list[Outcome]) -> list[Outcome]:
    """The outcomes of a run in which every rank has a result, by rank; otherwise what went wrong is raised.

    What the hub heard comes first: it is in the order in which things happened.
    """
    known = {(o.rank, o.kind) for o in heard}
    error: KindlerError | None = failure(heard + [o for o in returned if (o.rank, o.kind) not in known])
    if error is not None:
        raise error
    return sorted(returned, key=lambda outcome: outcome.rank)
