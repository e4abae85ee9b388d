"""Looks after one worker process: starts it, sends it the job, relays its messages, notices its end.

It never raises for what happens to the worker; it returns an Outcome, after sending it to the hub.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kindler import limits
from kindler.engine import fork_server
from kindler.engine.feeds import is_feed
from kindler.engine.job import Job
from kindler.engine.links import Carrier
from kindler.engine.notices import SIGTERM, NoticeSource
from kindler.engine.outcome import Outcome
from kindler.engine.placement import HeldPorts
from kindler.engine.stall import beat_interval, readable
from kindler.engine.wire import Address, Channel, connect
from kindler.engine.worker import STACKS, describe
from kindler.errors import ConfigError, StartTimeoutError, TrainingError
from kindler.frame import ChannelClosed, Frame
from kindler.temporary import Folder

# Workers find these imported. numpy imports its masked arrays when it first needs them, as `np.unique` does.
_PRELOAD = ("kindler.engine.worker", "numpy.ma")
_TAIL_LINES = 40
_STACKS_LOOKS = 5
_PASSED_UP = (
    *("gather", "report", "open", "keep", "regroup", "resumed", "forgo", "halting", "notice"),
    *("bulk", "part"),
)
_PASSED_DOWN = ("gathered", "void", "gone", "regrouped", "bulk", "part", "ending", "halt", "halt_at")
_PORTS_HINT = "Hint: RunSettings(port_range=...) must have a few free ports for each worker of a machine."


def worker_fields(
    job: Job, rank: int, *, scratch: Path, address: str = "127.0.0.1", cargo: bool = False, **welcome: Any
) -> dict[str, Any]:
    """Fields of the frame "job"; `cargo` is whether its buffers follow, `welcome` what the hub sent."""
    settings = job.settings
    return {
        "target": job.ranks[rank].target,
        "rank": rank,
        "roles": job.roles,
        "crew": job.crew,
        "hosts": welcome.get("hosts", [socket.gethostname()]),
        "addresses": welcome.get("addresses", [address]),
        "ports": welcome.get("ports", []),
        "fed": welcome.get("fed", False),
        "port_range": settings.port_range,
        "cargo": cargo,
        "scratch": str(scratch),
        "run_id": job.run_id,
        "secret": job.secret.hex(),
        "threads": job.threads,
        "cores": job.cores,
        "replaceable": job.replaceable and not job.ranks[rank].beside,
        "movable": job.movable,
        "regroups": job.regroups > 0 and not job.ranks[rank].beside,
        "heartbeat_s": beat_interval(settings.heartbeat_s, settings.stall_timeout_s),
        "sync_timeout_s": settings.sync_timeout_s,
        "sys_path": job.sys_path,
        "cwd": job.cwd,
    }


class AbortedError(Exception):
    """Another rank failed, or the driver gave up: end silently."""


class Supervisor:
    """Looks after one rank for the length of a `with` block.

    `start` requests the process, which warms up while the caller fetches data into `scratch`; `run` hands it
    the job.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        *,
        hub: Address,
        owner: int,
        base: Path | None = None,
        far: bool = False,
        cargo: bool = False,
        attempt: int = 0,
        folder: Folder | None = None,
    ) -> None:
        self._job = job
        self._rank = rank
        self._lent = folder  # for `scratch`, where it outlives this supervisor
        # How often the task that this is in was started before; 0 also in a stage that begins again.
        self._attempt = attempt
        self._spec = job.ranks[rank]
        self._hub = hub  # the meeting point
        self._owner = owner  # the process that the fork server must not outlive
        self._base = base  # where the scratch folder is made
        # Whether results go to the hub as they come, rather than into the outcome that `run` returns.
        self._far = far
        self._cargo = cargo  # whether the job's buffers are to be fetched, rather than in the job
        self._carrier: Carrier | None = None
        self._source: Address = hub
        self._kept = threading.Event()
        self._host = socket.gethostname()
        self._aborted = threading.Event()
        self._given_notice = False
        self.dismissed = False  # whether another process has the place of this one, or shall have it
        self._frozen = False
        self._optional = False
        self._cut_off = False  # whether the connection to the hub broke, which has not said that all is over
        self._welcomed = threading.Event()
        self._welcome: dict[str, Any] = {}
        self._ports: HeldPorts | None = None
        self._down: queue.Queue[Frame | None] | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._printed: fork_server.PrintedLines | None = None
        self._child: fork_server.Child | None = None
        self._start_error: Exception | None = None
        self._up: Channel
        self._threads: list[threading.Thread] = []
        self._received = time.monotonic()
        self.scratch: Path

    def __enter__(self) -> Supervisor:
        settings = self._job.settings
        self._up = connect(self._hub, self._job.secret, timeout_s=settings.start_timeout_s)
        self._address = self._up.local_host
        try:
            self._listen_for_others()
        except OSError as exc:
            raise self._refuse(exc) from exc
        self._up.send(
            "hello",
            rank=self._rank,
            host=self._host,
            address=self._address,
            attempt=self._attempt,
            ports=self._ports.numbers if self._ports is not None else (),
            cargo=self._carrier.address if self._carrier is not None else None,
        )
        self._folder = self._lent or Folder(f"kindler-{self._job.run_id}-{self._rank}-", self._base)
        self.scratch = self._folder.path
        self._start(self._listen_up, "kindler-listen-hub")
        self._start(self._beat, "kindler-beat-hub")
        if self._job.movable and (self._far or settings.notice is not None):
            self._start(self._watch_for_notice, "kindler-notice")
        return self

    def __exit__(self, *_: object) -> None:
        self._aborted.set()
        self._up.close()
        self._close_sockets()
        if self._down is not None:
            self._down.put(None)
        if self._child is not None:
            self._child.kill()
            try:
                self._child.wait(self._job.settings.stop_timeout_s)
            except TimeoutError:
                pass  # closing the leash below ends it, whatever it does
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._job.settings.stop_timeout_s)
        if self._child is not None:
            if self._printed is not None:
                self._printed.close()
            self._child.close()
        if self._lent is None:
            self._folder.remove()

    def check(self) -> None:
        if self._aborted.is_set():
            raise AbortedError

    def report(self, name: str, **fields: Any) -> None:
        try:
            self._up.send("report", name=name, worker=self._rank, **fields)
        except ChannelClosed:
            pass  # `_listen_up` notices, and `check` says so

    def give_notice(self) -> None:
        """Tell the hub, in a while, that this process got SIGTERM; for the handler of the signal."""
        self._given_notice = True

    def start(self) -> None:
        """Request the process; returns at once, `run` waits for it."""
        self._start(self._fetch_child, "kindler-start-worker")

    def run(self) -> Outcome:
        try:
            child = self._await_start()
            return self._relay(child)
        except (AbortedError, ChannelClosed):
            return self._stopped()
        except Exception as exc:  # noqa: BLE001 - the edge of the worker: it becomes an outcome
            return self.failed(exc)

    def needs_another(self, outcome: Outcome) -> bool:
        """Whether the rank goes on in another process, after this one has ended in this way."""
        if self._spec.beside:
            return False
        if self._job.regroups:
            if outcome.kind == "lost":
                # The hub answers at once, either way.
                self._aborted.wait(self._job.settings.heartbeat_timeout_s)
            return self.dismissed
        return self._job.replaceable and (self.dismissed or outcome.kind == "lost")

    def failed(self, exc: Exception) -> Outcome:
        return self._ended("error", **describe(exc))

    def _listen_for_others(self) -> None:
        job, ports = self._job, self._job.settings.port_range
        if self._cargo:
            # Where ranks come one by one, each gets them from the driver.
            crew = job.crew if job.together or job.regroups else 0
            self._carrier = Carrier(self._rank, crew, job.secret, host=self._address, ports=ports)
        if self._spec.ports:
            self._ports = HeldPorts(self._spec.ports, address=self._address, ports=ports)

    def _refuse(self, problem: OSError) -> ConfigError:
        error = ConfigError(
            f"worker {self._rank} cannot listen on {self._address}: {problem}.\n{_PORTS_HINT}"
        )
        self._up.send("hello", rank=self._rank, host=self._host)
        self.failed(error)
        self._up.close()
        self._close_sockets()
        return error

    def _close_sockets(self) -> None:
        if self._carrier is not None:
            self._carrier.close()
        if self._ports is not None:
            self._ports.release()

    def _fetch_child(self) -> None:
        job = self._job
        recipe = fork_server.Recipe(
            preload=(*_PRELOAD, *job.preload), environment=job.environment, idle_s=job.settings.idle_s
        )
        try:
            child = fork_server.start_child(
                recipe,
                owner=self._owner,
                timeout_s=job.settings.start_timeout_s,
                environment=self._spec.environment,
                wanted=lambda: not self._aborted.is_set(),
                run=job.run_id,
            )
        except Exception as exc:  # noqa: BLE001 - raised again where the process is awaited
            self._start_error = exc
            fork_server.retire(self._owner)  # it may hang; a worker that fails leaves it as it was
            return
        self._printed = fork_server.PrintedLines(child.output, self._send_line)
        self._child = child
        if self._aborted.is_set():
            child.kill()
        self._start(self._printed.pump, "kindler-pump-log")

    def _await_start(self) -> fork_server.Child:
        deadline = time.monotonic() + self._job.settings.start_timeout_s
        fetching = next(t for t in self._threads if t.name == "kindler-start-worker")
        while fetching.is_alive() and time.monotonic() < deadline:
            fetching.join(limits.POLL_S)
            self.check()
        self.check()
        if self._child is None:
            raise self._start_error or StartTimeoutError("a worker process did not start in time")
        while not self._welcomed.wait(limits.POLL_S):
            self.check()
            if time.monotonic() > deadline and self._job.together:  # otherwise the driver decides
                raise StartTimeoutError(
                    f"the other workers did not all start within {self._job.settings.start_timeout_s:g} s.\n"
                    "Hint: are there as many free slots as workers?"
                    " RunSettings(start_timeout_s=...) waits longer."
                )
        return self._child

    def _relay(self, child: fork_server.Child) -> Outcome:
        job, settings = self._job, self._job.settings
        self._received = time.monotonic()
        try:
            child.channel.send(
                "job",
                *job.buffers,
                **worker_fields(
                    job,
                    self._rank,
                    scratch=self.scratch,
                    address=self._address,
                    cargo=self._cargo,
                    **self._welcome,
                ),
            )
            if self._carrier is not None:
                self._carrier.deliver(
                    self._source, child.channel, check=self.check, timeout_s=settings.start_timeout_s
                )
                self._received = time.monotonic()
            self._up.send("pulse", ticks=0, waiting=False)
            while True:
                frame = self._next(child)
                if frame.kind in _PASSED_UP or is_feed(frame.kind):
                    self._pass_up(frame)
                elif frame.kind == "optional":
                    self._optional = True
                    self._up.send("optional")
                elif frame.kind == "release":
                    if self._ports is not None:
                        self._ports.release()
                    child.channel.send("released")
                elif frame.kind == "result":
                    return self._result(frame)
                elif frame.kind == "error":
                    return self._ended("error", **frame.fields)
        except _Silent as exc:
            return self._lost(str(exc), -signal.SIGKILL)
        except ChannelClosed:
            return self._gone(child)

    def _next(self, child: fork_server.Child) -> Frame:
        limit_s = self._job.settings.heartbeat_timeout_s
        while True:
            try:
                frame = child.channel.receive(limits.WAKE_S, whole=not self._far)
            except TimeoutError:
                if time.monotonic() - self._received > limit_s and not can_run(child.pid):
                    self._tail.extend(self._stacks(limits.STOPPED_STACKS_S).splitlines())
                    child.kill()
                    raise _Silent(f"it gave no sign of life for {limit_s:g} s and was ended") from None
                continue
            self._received = time.monotonic()
            if frame.kind != "beat":
                return frame
            self._up.send("pulse", **frame.fields)

    def _result(self, frame: Frame) -> Outcome:
        """End a worker that is done; the hub has its result when this returns."""
        if not self._far:
            return self._ended("result", *frame.buffers)
        self._pass_up(frame)
        deadline = time.monotonic() + limits.RESULT_S
        # Closing the connection before all of it was read could lose the rest.
        while not self._kept.wait(limits.TICK_S):
            self.check()
            if time.monotonic() > deadline:
                raise TrainingError(f"the driver did not accept the result within {limits.RESULT_S:g} s.")
        return self._ended("result")

    def _pass_up(self, frame: Frame) -> None:
        if self._far:
            self._up.pass_on(frame)
        else:  # it was put together here, and may be too large for one frame
            self._up.send(frame.kind, *frame.buffers, **frame.fields)

    def _gone(self, child: fork_server.Child) -> Outcome:
        try:
            # Nobody has asked it to stop: the news of its end may take longer than `stop_timeout_s`.
            code, by_itself = child.wait(max(limits.EXIT_S, self._job.settings.stop_timeout_s))
        except TimeoutError:
            child.kill()
            return self._lost("it closed its connection without a result, and was ended", -signal.SIGKILL)
        if self._frozen:  # the others gave up because of it
            return self._lost("its process was stopped, or had ended, when the run was abandoned", code)
        if not by_itself and self._aborted.is_set():
            return self._stopped()
        return self._lost(_why(code), code)

    def _stopped(self) -> Outcome:
        if self._cut_off:
            return self._lost("its connection to the driver broke", None)
        return self._ended("aborted")

    def _lost(self, reason: str, code: int | None) -> Outcome:
        self._catch_up()  # with its last words, which are told again
        kind = "left" if self._optional else "lost"
        return self._ended(kind, reason=reason, exit_code=code, log_tail="\n".join(self._tail))

    def _ended(self, kind: str, *buffers: bytes, **fields: Any) -> Outcome:
        if kind != "aborted":
            fields.setdefault("host", self._host)
            fields.setdefault("role", self._spec.role)
        self._catch_up()
        try:
            self._up.send("done" if kind == "result" else kind, **fields)
        except ChannelClosed:
            pass  # the outcome also travels with the result
        return Outcome(self._rank, kind, fields, buffers)

    def _listen_up(self) -> None:
        try:
            while True:
                frame = self._up.receive(whole=False)
                if frame.kind == "welcome":
                    self._welcome = json.loads(frame.buffers[0])
                    if self._welcome.get("late") and self._carrier is not None:
                        self._carrier.pass_nothing_on()
                    if frame.fields.get("cargo"):
                        host, port = frame.fields["cargo"]
                        self._source = (host, port)
                    self._welcomed.set()
                elif frame.kind in _PASSED_DOWN or is_feed(frame.kind):
                    self._pass_down(frame)
                elif frame.kind == "kept":
                    self._kept.set()
                elif frame.kind == "stacks":
                    self._start(self._tell_stacks, "kindler-stacks")
                elif frame.kind in ("abort", "dismiss"):
                    self.dismissed = frame.kind == "dismiss"
                    break
        except ChannelClosed:
            self._cut_off = not self._aborted.is_set()
        if self._child is not None:
            self._frozen = not can_run(self._child.pid)
            self._aborted.set()
            self._child.kill()
        self._aborted.set()

    def _pass_down(self, frame: Frame) -> None:
        """Give the worker a frame; from a feed's first frame on, from a separate thread.

        A stopped worker takes nothing, and the hub must still be heard when it ends the run.
        """
        if self._child is None:
            return
        if is_feed(frame.kind) and self._down is None:
            self._down = queue.Queue()  # bounded by the windows of feeds
            self._start(self._pump_down, "kindler-pump-feeds")
        if self._down is None:
            self._give(self._child, frame)
        else:
            self._down.put(frame)

    def _pump_down(self) -> None:
        assert self._child is not None
        assert self._down is not None
        while (frame := self._down.get()) is not None:
            self._give(self._child, frame)

    def _give(self, child: fork_server.Child, frame: Frame) -> None:
        try:
            child.channel.pass_on(frame)
        except ChannelClosed:
            child.kill()  # it has ended, or takes nothing and has half a frame; `_relay` notices

    def _beat(self) -> None:
        try:
            while not self._aborted.wait(self._job.settings.heartbeat_s):
                self._up.send("beat")
        except ChannelClosed:
            pass  # `_listen_up` notices too

    def _watch_for_notice(self) -> None:
        place = self._job.settings.notice
        key = f"{self._host} {place}"
        source = None if place is None or key in self._job.noticed else NoticeSource(place)
        has_answered = True
        while not self._aborted.wait(limits.NOTICE_POLL_S):
            if self._given_notice:
                self._pass_notice_on(SIGTERM, "")
                return
            try:
                if source is not None and source.has_notice():
                    self._pass_notice_on(str(place), key)
                    return
            except OSError as exc:
                if has_answered:
                    self.report("warning", message=f"{place} cannot be read on {self._host}: {exc}.")
                has_answered = False

    def _pass_notice_on(self, reason: str, key: str) -> None:
        try:
            self._up.send("notice", reason=reason, key=key)
        except ChannelClosed:
            pass  # `_listen_up` notices too

    def _tell_stacks(self) -> None:
        try:
            self._up.send("stacks", text=self._stacks())
        except ChannelClosed:
            pass  # nobody asks any more

    def _stacks(self, timeout_s: float = limits.STACKS_S) -> str:
        path, child = self.scratch / STACKS, self._child
        if child is None or not path.exists():
            return ""
        before = size = path.stat().st_size
        child.ask_for_stacks()
        deadline, same = time.monotonic() + timeout_s, 0
        # It writes in pieces and says nothing at the end: what has not grown for a while is whole. On a busy
        # machine it may be made to pause between two pieces.
        while same < _STACKS_LOOKS and time.monotonic() < deadline:
            if self._aborted.wait(limits.POLL_S):
                break
            last, size = size, path.stat().st_size
            same = same + 1 if before < last == size else 0
        text = path.read_text(errors="replace")
        return readable(text) if size > before else ""

    def _send_line(self, line: str) -> None:
        self._tail.append(line)
        try:
            self._up.send("log", line=line)
        except ChannelClosed:
            pass  # keep reading: a full pipe would stop the worker

    def _catch_up(self) -> None:
        if self._printed is not None:
            self._printed.catch_up()

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()


class _Silent(ChannelClosed):
    """The worker is alive but silent."""


def can_run(pid: int) -> bool:
    """Whether the process is alive and not stopped, as far as this system can tell.

    Native code that holds the GIL silences the heartbeat thread, so a worker that can run is left to the
    stall timeout.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("T", "t", "Z", "X", "x")


def _why(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code} before it had a result"


class BesideRanks:
    """Supervises the ranks beside the others, on threads of the process that has the hub."""

    def __init__(
        self, job: Job, hub: Address, *, base: Path | None = None, owner: int | None = None, far: bool = False
    ) -> None:
        self._job = job
        self._options: dict[str, Any] = {"hub": hub, "base": base, "owner": owner or os.getpid(), "far": far}
        self._threads = [
            threading.Thread(
                target=self._supervise, args=(rank,), name=f"kindler-supervisor-{rank}", daemon=True
            )
            for rank in range(job.crew, job.size)
        ]
        self.outcomes: list[Outcome] = []

    def __enter__(self) -> BesideRanks:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(2 * self._job.settings.stop_timeout_s)

    def _supervise(self, rank: int) -> None:
        try:
            with Supervisor(self._job, rank, **self._options) as supervisor:
                supervisor.start()
                self.outcomes.append(supervisor.run())
        except (AbortedError, ChannelClosed):
            pass  # the run was over before it came
