"""Watches a run from the driver: passes on what workers say, and notices those that fall silent.

Both engines use it; they differ in who starts the supervisors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kindler.config import RunSettings
from kindler.engine.hub import Event, Hub
from kindler.engine.outcome import Outcome, failure
from kindler.errors import KindlerError, StartTimeoutError

Listener = Callable[[Event], None]

_TURN_S = 0.2
_LAST_TURN_S = 0.01  # all ranks have ended, and what started them follows in a moment
_NEARLY = 0.9
_STACKS_TIMEOUT_S = 15.0
_log = logging.getLogger(__name__)


def watch(
    hub: Hub,
    *,
    running: Callable[[], bool],
    listener: Listener,
    settings: RunSettings,
    stopped: Callable[[], bool] = lambda: False,
    after_first: bool = False,
    queued: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Follow the run until `running()` is false and all is heard, or `stopped()`; return the bad ends.

    The listener gets what workers print and report and which have a result, a report "gang" of the gang
    itself once all ranks have come, and a report "left" of a rank that died while the others go on.

    With `after_first` the time for all to come up counts from when the last of those did that have: before
    the first one, Spark is computing the data, for as long as it takes. It does not count while `queued()`:
    others have the slots.

    Once all ranks have ended, `running()` has `stop_timeout_s` to become false, and so has the rest of what
    they said to arrive: what is still missing then is not waited for.

    Raises:
        StartTimeoutError: The workers did not all come up in time.
    """
    deadline = time.monotonic() + settings.start_timeout_s
    bad: list[Outcome] = []
    ending = complete = gave_up = False
    came = 0
    last_end: float | None = None
    while not ending:
        if after_first and (not hub.joined or hub.joined > came or (hub.missing() and queued())):
            came = hub.joined
            deadline = time.monotonic() + settings.start_timeout_s
        over = not running()
        if last_end is None and (over or hub.finished):
            last_end = time.monotonic()
        overdue = last_end is not None and time.monotonic() - last_end > settings.stop_timeout_s
        ending = stopped() or overdue or (over and hub.heard_out)  # what was said last is among the events
        for event in hub.events(0.0 if ending else _TURN_S if last_end is None else _LAST_TURN_S):
            # Before any report: workers get their job only once all have come.
            if not complete and not hub.missing():
                complete = True
                listener(Event(0, "report", {"name": "gang", "workers": hub.joined}))
            if event.kind in ("error", "lost"):
                bad.append(Outcome(event.rank, event.kind, event.fields))
                gave_up = gave_up or _waited_in_vain(event)
            elif event.kind == "left":
                bad.append(Outcome(event.rank, event.kind, event.fields))
                listener(Event(event.rank, "report", {"name": "left", "worker": event.rank, **event.fields}))
            elif event.kind in ("log", "report", "done"):
                listener(event)
        # Those who wait may lose patience just before the stall is noticed: it is one all the same.
        if hub.stalled() or (gave_up and hub.idle_s > _NEARLY * settings.stall_timeout_s):
            bad.append(_stall(hub, listener, settings))
            hub.abort()
            return bad
        for rank, host in hub.silent():
            reason = f"nothing was heard from its machine for {settings.heartbeat_timeout_s:g} s"
            if hub.let_go(rank, reason):
                continue
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


def _waited_in_vain(event: Event) -> bool:
    return event.kind == "error" and event.fields.get("types", [""])[0] == "kindler.errors:SyncTimeoutError"


def _stall(hub: Hub, listener: Listener, settings: RunSettings) -> Outcome:
    """Fetch the stacks of all workers, write them to the log, and say who holds up the others."""
    ranks, hosts, stacks = hub.stall(_STACKS_TIMEOUT_S)
    for rank, text in sorted(stacks.items()):
        said = f"stalled; the stacks of worker {rank} on {hosts[rank]}:\n{text or '  (it did not answer)'}"
        _log.error("%s", said)
        for line in said.splitlines():
            listener(Event(rank, "log", {"line": line}))
    fields = {"ranks": ranks, "hosts": hosts, "stacks": stacks, "waited_s": settings.stall_timeout_s}
    return Outcome(0, "stalled", fields)


def verdict(heard: list[Outcome], returned: list[Outcome]) -> list[Outcome]:
    """The outcomes of a run in which every rank has a result, by rank; otherwise what went wrong is raised.

    What the hub heard comes first: it is in the order in which things happened.
    """
    known = {(o.rank, o.kind) for o in heard}
    error: KindlerError | None = failure(heard + [o for o in returned if (o.rank, o.kind) not in known])
    if error is not None:
        raise error
    return sorted(returned, key=lambda outcome: outcome.rank)
