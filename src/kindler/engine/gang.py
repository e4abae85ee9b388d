"""A running gang, and the thread that watches it. How ranks start and end is up to its `Launch`."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

from kindler import limits
from kindler.config import RunSettings
from kindler.engine.feeds import WINDOW_BYTES, FeedReader, FeedWriter
from kindler.engine.hub import Event, Hub
from kindler.engine.job import GangMember, Job
from kindler.engine.outcome import Outcome, failure, is_own_error, is_sync_timeout, lost_error
from kindler.errors import ConfigError, KindlerError, StartTimeoutError, TrainingError, fresh
from kindler.frame import Piece

Listener = Callable[[Event], None]

_NEARLY = 0.9
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
    """Follow the run until `running()` is false and all is heard, or `stopped()`; return the bad outcomes.

    With `after_first` the start timeout restarts with each rank that joins (before the first one, Spark is
    computing the data), and is suspended while `queued()`. Once all ranks have ended, `running()` and their
    last messages have `stop_timeout_s`.
    """
    deadline = time.monotonic() + settings.start_timeout_s
    bad: list[Outcome] = []
    ending = complete = gave_up = False
    joined = 0
    last_end: float | None = None
    while not ending:
        if after_first and (not hub.joined or hub.joined > joined or (hub.missing() and queued())):
            joined = hub.joined
            deadline = time.monotonic() + settings.start_timeout_s
        over = not running()
        if last_end is None and (over or hub.finished):
            last_end = time.monotonic()
        overdue = last_end is not None and time.monotonic() - last_end > settings.stop_timeout_s
        ending = (
            stopped() or overdue or (over and hub.all_final_events_received)
        )  # what was said last is among the events
        for event in hub.events(0.0 if ending else limits.TICK_S if last_end is None else limits.LAST_TICK_S):
            # Before any report: workers get their job only once all have come.
            if not complete and not hub.missing():
                complete = True
                listener(Event(0, "report", {"name": "gang", "workers": hub.joined}))
            if event.kind in ("error", "lost"):
                bad.append(Outcome(event.rank, event.kind, event.fields))
                gave_up = gave_up or is_sync_timeout(bad[-1])
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
            reason = f"nothing was received from its machine for {settings.heartbeat_timeout_s:g} s"
            if hub.let_go(rank, reason):
                continue
            bad.append(Outcome(rank, "lost", {"host": host, "reason": reason}))
            hub.abort()
            return bad
        if not ending and time.monotonic() > deadline and (missing := hub.missing()):
            raise StartTimeoutError(
                f"{len(missing)} of the workers did not start within {settings.start_timeout_s:g} s:"
                f" ranks {missing}.\nHint: are there as many free slots as workers?"
                " RunSettings(start_timeout_s=...) waits longer."
            )
    return bad


def _stall(hub: Hub, listener: Listener, settings: RunSettings) -> Outcome:
    ranks, hosts, stacks = hub.stall(limits.GANG_STACKS_S)
    for rank, text in sorted(stacks.items()):
        message = f"stalled; the stacks of worker {rank} on {hosts[rank]}:\n{text or '  (it did not answer)'}"
        _log.error("%s", message)
        for line in message.splitlines():
            listener(Event(rank, "log", {"line": line}))
    fields = {"ranks": ranks, "hosts": hosts, "stacks": stacks, "waited_s": settings.stall_timeout_s}
    return Outcome(0, "stalled", fields)


def verdict(received: list[Outcome], returned: list[Outcome]) -> list[Outcome]:
    """Return the outcomes by rank, or raise. What the hub heard comes first: it is in chronological order."""
    known = {(o.rank, o.kind) for o in received}
    error: KindlerError | None = failure(received + [o for o in returned if (o.rank, o.kind) not in known])
    if error is not None:
        raise error
    return sorted(returned, key=lambda outcome: outcome.rank)


_MOST_UNREAD = 100_000


class Launch(Protocol):
    after_first: bool
    """Whether the time to start counts from the first rank that comes, rather than from the beginning."""

    def open(self, stack: ExitStack) -> Hub | None:
        """Start all ranks; return their hub, or None where the driver cannot reach it.

        What must be closed after the last rank has ended goes on `stack`.
        """

    def is_queued(self) -> bool:
        """Whether missing ranks may be waiting for other gangs of this driver to end."""

    def is_alive(self) -> bool:
        """Whether anything of it still runs."""

    def end(self) -> None:
        """Wait for the ranks, which were asked to end, and kill those that do not."""

    def outcomes(self, hub: Hub | None) -> list[Outcome]:
        """How the ranks ended, as far as is known."""

    def incomplete(self, outcomes: Sequence[Outcome], *, started: bool) -> BaseException:
        """The error to raise when results are missing and no rank says why."""

    def clean_up(self) -> None:
        """Called once everything has ended."""


class Gang:
    """A running gang; leaving it as a context manager stops it. Methods may be called from any thread."""

    def __init__(self, job: Job, launch: Launch) -> None:
        self.job = job
        self._launch = launch
        self._hub: Hub | None = None
        self._stack = ExitStack()
        self._events = _EventQueue()
        self._stop = threading.Event()
        self._reason: str | None = None
        self._ended = threading.Event()
        self._results: list[Outcome] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Gang:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.abort("the block that it ran in was exited")
        self._ended.wait()

    def start(self) -> None:
        """Start the ranks, once; `with` does it too."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._follow, name=f"kindler-gang-{self.job.run_id}", daemon=True)
        try:
            self._hub = self._launch.open(self._stack)
            thread.start()
            self._thread = thread
        except BaseException:
            self._stack.close()
            self._launch.clean_up()
            raise

    def events(self) -> Iterator[Event]:
        """Yield each event once, until the end; of unread log lines the first 100,000 are kept."""
        return self._events.drained()

    def wait(self, timeout_s: float | None = None) -> list[Outcome]:
        """Return the results by rank, or raise; services that were stopped have the kind "aborted"."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"the gang is still running after {timeout_s:g} s.")
        if self._error is not None:
            raise fresh(self._error, traces=True)
        return self._results

    def abort(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
        if self._hub is not None:
            self._hub.abort(f"the gang was aborted: {reason}")
        self._stop.set()

    def halt(self, timeout_s: float) -> bool:
        """End the workers after the newest step that any has begun; False if there is no such step."""
        return self._hub is not None and bool(self._hub.halt(timeout_s))

    @property
    def is_running(self) -> bool:
        return not self._ended.is_set()

    def members(self, timeout_s: float | None = None) -> tuple[GangMember, ...]:
        """Return who is where, once all ranks have joined."""
        hub = self._reachable()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (members := hub.members):
            if self._ended.wait(limits.TICK_S):
                self.wait()
                break
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the ranks {hub.missing()} did not arrive within {timeout_s:g} s.")
        return members

    def address(self, rank: int) -> str:
        """ "address:port" of a rank's first held port, or its address alone; waits until all have joined."""
        member = self.members()[rank]
        return member.endpoints[0] if member.ports else member.address

    def push(self, rank: int, name: str, *batch: Piece, timeout_s: float | None = None) -> None:
        """Pass a batch to `worker.feed(name)`, waiting while the worker is too far behind.

        Raises FeedError if it takes nothing for `timeout_s` (by default `sync_timeout_s`), has ended, or
        closed the feed.
        """
        limit_s = self.job.settings.sync_timeout_s if timeout_s is None else timeout_s
        self.feed(rank, name).put(*batch, timeout_s=limit_s)

    def feed(self, rank: int, name: str, window_bytes: int = WINDOW_BYTES) -> FeedWriter:
        """The driver's end of a feed to a rank; `put` waits once `window_bytes` are unread."""
        return self._reachable().feeds(self._checked(rank)).writer(name, window_bytes)

    def output(self, rank: int, name: str) -> FeedReader:
        """Read what a rank writes to `worker.output(name)`. It ends when the rank returns."""
        return self._reachable().feeds(self._checked(rank)).reader(name)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.job.size:
            raise ConfigError(f"rank={rank}: this gang has the ranks 0 to {self.job.size - 1}.")
        return rank

    def _reachable(self) -> Hub:
        if self._hub is None:
            raise ConfigError(
                "the workers of this gang meet out of reach of the driver, which cannot feed or find them.\n"
                'Hint: RunSettings(rendezvous="driver") where they can reach it.'
            )
        return self._hub

    def _follow(self) -> None:
        try:
            with self._stack:
                received = self._watched()
            self._results = self._judged(received)
        except BaseException as exc:  # noqa: BLE001 - the edge of the thread: `wait` raises it
            self._error = exc
        finally:
            try:
                self._launch.clean_up()
            finally:
                self._ended.set()
                self._events.close()

    def _watched(self) -> list[Outcome]:
        hub, launch = self._hub, self._launch
        try:
            if hub is not None:
                return watch(
                    hub,
                    running=launch.is_alive,
                    listener=self._events.put,
                    settings=self.job.settings,
                    stopped=self._stop.is_set,
                    after_first=launch.after_first,
                    queued=launch.is_queued,
                )
            while launch.is_alive() and not self._stop.wait(limits.TICK_S):
                pass
            return []
        finally:
            if hub is not None:
                hub.abort()
            launch.end()

    def _judged(self, received: list[Outcome]) -> list[Outcome]:
        returned = self._launch.outcomes(self._hub)
        unbegun = self._hub is not None and self._hub.ended_unbegun
        if unbegun or self._reason is not None:  # broken exchanges are the echo of that
            received, returned = map(_without_echoes, (received, returned))
        outcomes = verdict(received, returned)
        results = {o.rank for o in outcomes if o.kind == "result"} - self.job.services
        left = {o.rank: o for o in [*received, *outcomes] if o.kind == "left"}
        if results and len(results | left.keys() | self.job.services) == self.job.size:
            return outcomes  # whatever became of the engine's own job
        if left and not results and self._reason is None:
            raise lost_error(left[min(left)])
        if unbegun:
            raise NotBegun
        if self._reason is not None:
            raise TrainingError(f"the gang was aborted: {self._reason}.")
        started = self._hub is not None and self._hub.joined > 0
        raise self._launch.incomplete(outcomes, started=started) from None


def _without_echoes(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.kind != "error" or is_own_error(outcome)]


class NotBegun(Exception):
    """A worker was given notice before the first step; nothing was lost."""


class Halted(KeyboardInterrupt):
    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        super().__init__("interrupted")


def follow(gang: Gang, listener: Listener) -> list[Outcome]:
    """Run a gang to its end; `listener` is called on this thread.

    An interrupt raises Halted once all workers have ended after a whole step; a second one kills them.
    """
    with gang:
        try:
            return _heard(gang, listener)
        except KeyboardInterrupt:
            if not gang.halt(limits.HALT_S):
                raise
        listener(Event(0, "report", {"name": "halting"}))
        raise Halted(_heard(gang, listener))


def _heard(gang: Gang, listener: Listener) -> list[Outcome]:
    for event in gang.events():
        if event.kind != "done":
            listener(event)
    return gang.wait()


class _EventQueue:
    """Events on their way to the driver. Log lines are dropped while too many are unread."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._dropped = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, event: Event) -> None:
        with self._changed:
            if event.kind == "log" and len(self._events) >= _MOST_UNREAD:
                self._dropped += 1
                return
            if self._dropped:
                line = f"({self._dropped} lines were dropped, because they were not read)"
                self._events.append(Event(event.rank, "log", {"line": line}))
                self._dropped = 0
            self._events.append(event)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def drained(self) -> Iterator[Event]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._closed)
                if not self._events:
                    return
                event = self._events.popleft()
            yield event
