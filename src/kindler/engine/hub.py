"""The meeting point of one run: relays messages, feeds and results, and stops all ranks if one fails.

What a failure means for the run is decided in `outcome.py`; `server.py` serves all connections on one thread.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kindler import limits
from kindler.engine.feeds import Feeds, is_feed
from kindler.engine.job import GangMember, Job, members_of
from kindler.engine.links import parent_of
from kindler.engine.meeting import Gathering, HaltVote, Regrouping, Transcript, encode_parts
from kindler.engine.server import Handler, Peer, Server, allow_files, listen
from kindler.engine.stall import Motion, beat_interval
from kindler.engine.wire import Address
from kindler.errors import ConfigError, rank_name
from kindler.frame import Frame, Piece, encode

_SPARE_FILES = 1024
_TERMINAL_EVENTS = ("done", "error", "lost", "left", "aborted")


@dataclass(frozen=True, slots=True)
class Event:
    rank: int
    kind: str
    fields: dict[str, Any]


@dataclass(slots=True)
class _Member:
    peer: Peer
    host: str
    received: float
    address: str
    ports: Sequence[int]
    cargo: Sequence[Any] | None
    has_job: bool = False
    optional: bool = False
    finished: bool = False
    dead: bool = False  # and to be replaced
    died: float = 0.0
    reported: int = -1  # the turn of the last report of the one that it has replaced
    asked: int = -1  # the turn of its last gather


class Hub(Handler):
    def __init__(
        self,
        job: Job,
        *,
        at_driver: bool = True,
        host: str = "127.0.0.1",
        advertised: str | None = None,
        cargo: Sequence[Piece] = (),
    ) -> None:
        self._job = job  # what the gang does
        self._size = job.size
        self._settings = settings = job.settings
        self._crew = job.crew
        self._left: set[int] = set()
        self._final: set[int] = set()  # ranks whose terminal event is among the events
        self._regrouping = Regrouping(job.crew, job.regroups) if job.regroups and at_driver else None
        # Otherwise another process may come for a rank.
        self._together = (job.together and self._regrouping is None) or not at_driver
        keeps_answers = (job.replaceable or self._regrouping is not None) and at_driver
        self._transcript = Transcript(job.crew) if keeps_answers else None
        self._last_turn = -1  # the newest gather that any rank has begun
        self._standby: dict[int, list[tuple[Peer, Frame]]] = {}  # by rank, those that wait to take its place
        self._reported: dict[int, int] = {}  # by rank, the turn of its last report
        # Whether it is the driver's, which feeds workers and takes what they put out; otherwise it is the
        # first rank's, in a stage whose tasks all run once.
        self._at_driver = at_driver
        self._host = host  # the address to listen on
        self._advertised = advertised  # the address under which others reach it, where that is another one
        self._cargo = cargo  # buffers for every worker, sent to the first supervisor, which passes them on
        self._members: dict[int, _Member] = {}
        self._met = False  # whether all were there once; who comes later need not wait for anybody
        self._feeds: dict[int, Feeds] = {}
        self._over: dict[int, str | None] = {}  # why feeds of a rank cannot go on; None: it has returned
        self._gatherings: dict[int, Gathering] = {}
        self._results: dict[int, tuple[bytes, ...]] = {}
        self._events: queue.Queue[Event] = queue.Queue()
        self._lock = threading.RLock()
        self._aborted = threading.Event()
        self._abort_at: float | None = None
        self._ending = False
        self._halt: HaltVote | None = None
        self._is_noticed = False  # all are asked to halt once all have their job
        self._looked = time.monotonic()
        self.ended_unbegun = False  # whether it was ended for a notice that came before its first step
        beat_s = beat_interval(settings.heartbeat_s, settings.stall_timeout_s)
        # What a rank did just now is known a beat later.
        self._motion = Motion(self._size, settings.stall_timeout_s + beat_s, beat_s=beat_s)
        for rank in job.services:
            self._motion.ended(rank)  # it waits for others all its life, and holds up nobody
        self._attending: set[Peer] = set()
        self._departed = threading.Condition(self._lock)
        self._stacks: dict[int, str] = {}
        self._stacks_received = threading.Condition(self._lock)
        self._server: Server | None = None

    def __enter__(self) -> Hub:
        allow_files(self._size + _SPARE_FILES)
        try:
            listener = listen(self._host, backlog=self._size + 16, ports=self._settings.port_range)
        except OSError as exc:
            raise ConfigError(
                f"the meeting point of the workers cannot listen on {self._host}: {exc}.\n"
                "Hint: it must be an address of this machine. Behind NAT or in a container, set"
                " spark.driver.bindAddress to the machine's own address and spark.driver.host to the one that"
                " others reach; RunSettings(port_range=(first, last)) names the ports that may be used."
            ) from exc
        self._port: int = listener.getsockname()[1]
        self._server = Server(listener, self._job.secret, self, expected=self._size, name="kindler-hub")
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
        if self._server is not None:
            self._server.close(self._settings.stop_timeout_s)
        for rank in range(self._size):
            self._close_feeds(rank, "the gang has ended")
        if self._transcript is not None:
            self._transcript.close()  # the thread that wrote to it has ended

    @property
    def address(self) -> Address:
        assert self._server is not None, "the hub is not open"
        return (self._advertised or self._host, self._port)

    @property
    def joined(self) -> int:
        return len(self._members)

    @property
    def finished(self) -> bool:
        with self._lock:
            return len(self._members) == self._size and all(m.finished for m in self._members.values())

    @property
    def all_final_events_received(self) -> bool:
        with self._lock:
            return all(rank in self._final or member.dead for rank, member in self._members.items())

    @property
    def results(self) -> dict[int, tuple[bytes, ...]]:
        with self._lock:
            return dict(self._results)

    @property
    def members(self) -> tuple[GangMember, ...]:
        with self._lock:
            if len(self._members) < self._size:
                return ()
            return members_of(self._job.roles, *self._whereabouts().values())

    def feeds(self, rank: int) -> Feeds:
        """The driver's end of the feeds of a rank, which need not have joined yet."""
        with self._lock:
            feeds = self._feeds.setdefault(rank, Feeds(rank_name(rank, self._job.roles[rank])))
            member = self._members.get(rank)
            over = (self._over[rank],) if rank in self._over else None
        # Not under the lock, which the server's thread takes while it holds the feeds'.
        if over is not None:
            feeds.close(over[0])
        elif member is not None and member.has_job:
            feeds.connect(member.peer.send)
        return feeds

    def missing(self) -> list[int]:
        members = self._members
        there = {rank for rank, member in list(members.items()) if member.has_job or not member.dead}
        return [rank for rank in range(self._size) if rank not in there]

    def events(self, timeout_s: float) -> Iterator[Event]:
        try:
            yield self._events.get(timeout=timeout_s)
            while True:
                yield self._events.get_nowait()
        except queue.Empty:
            return

    def abort(self, problem: str | None = None) -> None:
        """Tell every supervisor to end its worker now; feeds end with `problem`."""
        with self._lock:
            if self._aborted.is_set():
                return
            self._aborted.set()
            peers = [m.peer for m in self._members.values() if not m.finished]
            peers += [peer for waiting in self._standby.values() for peer, _ in waiting]
        for peer in peers:
            peer.send("abort")
        for rank in range(self._size) if self._at_driver else ():
            self._close_feeds(rank, problem or "the gang was stopped")

    def halt(self, timeout_s: float) -> int | None:
        """Ask all workers to end after the newest step that any has begun, and return its number.

        None if they cannot be asked or do not all answer in time; 0 if none has begun a step.
        """
        vote = self._ask_to_halt(moves=False)
        return None if vote is None else vote.wait(timeout_s)

    def notice(self, host: str, reason: str, *, rank: int | None = None, key: str = "") -> None:
        """A process or a machine will be taken away: end all workers as `halt` does, for others to go on.

        `key` tells a notice from others, so that one that stays is heard once.
        """
        address = None if rank is None else self._members[rank].address
        self.announce("notice", worker=rank, host=host, address=address, reason=reason, key=key)
        self._is_noticed = True
        if self._ask_to_halt(moves=True) is None and len(self._members) < self._size:
            self._end_unbegun()

    def _end_unbegun(self) -> None:
        if self._at_driver and not self._aborted.is_set():  # elsewhere nobody hears why
            self.ended_unbegun = True
            self.abort("a worker was given notice before the first step")

    def _ask_to_halt(self, *, moves: bool) -> HaltVote | None:
        with self._lock:
            crew = {rank: member for rank, member in self._members.items() if rank < self._crew}
            working = {rank: member for rank, member in crew.items() if not member.finished}
            ready = all(member.has_job and not member.dead for member in working.values())
            if self._aborted.is_set() or len(self._members) < self._size or not working or not ready:
                return None
            first = self._halt is None
            vote = self._halt = self._halt or HaltVote(working, moves=moves)
        for member in working.values() if first else ():
            member.peer.send("halt")
        return vote

    def _halted(self, rank: int, begun: int | None = None) -> None:
        """Count a rank's vote (None: it has ended); once all votes are in, tell the ranks where to stop."""
        vote = self._halt
        if vote is None or not (vote.left(rank) if begun is None else vote.says(rank, begun)):
            return
        if vote.moves and vote.last == begun == 0:
            self._end_unbegun()
        for other, member in list(self._members.items()):
            if other < self._crew and not member.finished and member.has_job:
                member.peer.send("halt_at", last=vote.last, moves=vote.moves)

    def await_departures(self, timeout_s: float) -> bool:
        with self._departed:
            return self._departed.wait_for(lambda: not self._attending, timeout_s)

    def silent(self) -> list[tuple[int, str]]:
        """The ranks of which nothing was heard for too long; to be called about every second."""
        now = time.monotonic()
        limit, unheard_s = now - self._settings.heartbeat_timeout_s, now - self._looked
        self._looked = now
        with self._lock:
            if unheard_s > limits.WAKE_S:  # this process stood still itself, and has yet to read what came
                for member in self._members.values():
                    member.received = min(now, member.received + unheard_s)
            alive = [(r, m) for r, m in self._members.items() if not m.finished and not m.dead]
            return [(rank, member.host) for rank, member in alive if member.received < limit]

    @property
    def idle_s(self) -> float:
        with self._lock:
            return self._motion.idle_s(time.monotonic())

    def announce(self, name: str, **fields: Any) -> None:
        self._events.put(Event(0, "report", {"name": name, **fields}))

    def stalled(self) -> bool:
        with self._lock:
            return not self._aborted.is_set() and self._motion.stalled(time.monotonic())

    def stall(self, timeout_s: float) -> tuple[list[int], dict[int, str], dict[int, str]]:
        """Ask all workers for stacks; return the ranks that hold up the others, hosts and stacks."""
        with self._stacks_received:
            self._stacks.clear()
            self._abort_at = None  # it would end the workers before they have answered; the caller aborts
            missing = self._motion.missing(time.monotonic())
            asked = {rank: member for rank, member in self._members.items() if not member.finished}
            hosts = {rank: member.host for rank, member in self._members.items()}
        for member in asked.values():
            member.peer.send("stacks")
        with self._stacks_received:
            self._stacks_received.wait_for(lambda: asked.keys() <= self._stacks.keys(), timeout_s)
            return missing, hosts, dict(self._stacks)

    def received(self, peer: Peer, frame: Frame) -> None:
        if peer.id is not None:
            self._handle(peer, peer.id, frame)
        elif frame.kind == "hello":
            self._join(peer, frame)
        elif frame.kind == "fetch":
            peer.id = int(frame.fields["rank"])
            peer.send("cargo", *self._cargo)
        elif frame.kind == "attend":
            peer.id = int(frame.fields["rank"])
            with self._lock:
                self._attending.add(peer)

    def _join(self, peer: Peer, frame: Frame) -> None:
        rank, host = int(frame.fields["rank"]), str(frame.fields["host"])
        known = self._members.get(rank)
        if not 0 <= rank < self._size or (known is not None and self._together):
            raise ValueError(f"unexpected rank {rank}")
        if known is not None and not (known.dead and not self._aborted.is_set()):
            self._wait_in_line(peer, frame, known)
            return
        self._final.discard(rank)
        with self._lock:
            self._members[rank] = _Member(
                peer,
                host,
                time.monotonic(),
                address=str(frame.fields.get("address", "127.0.0.1")),
                ports=[int(port) for port in frame.fields.get("ports", ())],
                cargo=frame.fields.get("cargo"),
                reported=self._reported.get(rank, -1),
            )
            everyone = len(self._members) == self._size and not any(m.dead for m in self._members.values())
        peer.id = rank
        if self._aborted.is_set():
            peer.send("abort")
        elif self._met:
            peer.send("welcome", json.dumps({**self._whereabouts(), "fed": True, "late": True}).encode())
        elif everyone:
            self._met = True
            self._welcome()

    def _wait_in_line(self, peer: Peer, frame: Frame, known: _Member) -> None:
        """Put a rank that joins again on standby: Spark runs its task twice, or has restarted it.

        It waits rather than ends, because Spark would take its end for the rank's.
        """
        rank = int(frame.fields["rank"])
        peer.id = rank
        if self._aborted.is_set() or self.finished or (known.finished and self._transcript is not None):
            peer.send("abort")  # nobody needs it any more
            return
        with self._lock:
            self._standby.setdefault(rank, []).append((peer, frame))
        if self._transcript is not None and not frame.fields.get("attempt", 1):
            # The whole stage begins again, and may need the slot of the task that still runs.
            self._await_another(rank, {"host": known.host, "reason": "Spark has restarted its stage"})

    def _welcome(self) -> None:
        meeting = json.dumps({**self._whereabouts(), "fed": self._at_driver}).encode()
        same = [piece for frame in encode("welcome", [meeting], {}) for piece in frame]
        for rank, member in self._members.items():
            parent = parent_of(rank)
            if self._cargo and parent is not None:
                member.peer.send("welcome", meeting, cargo=self._members[parent].cargo)
            else:
                member.peer.put(same)

    def _whereabouts(self) -> dict[str, list[Any]]:
        members = [self._members[rank] for rank in range(self._size)]
        any_ports = any(member.ports for member in members)
        return {
            "hosts": [member.host for member in members],
            "addresses": [member.address for member in members],
            "ports": [member.ports for member in members] if any_ports else [],
        }

    def closed(self, peer: Peer, why: str) -> None:
        with self._departed:
            self._attending.discard(peer)
            self._departed.notify_all()
        rank = peer.id
        member = None if rank is None else self._members.get(rank)
        if rank in self._standby:
            with self._lock:
                self._standby[rank] = [waiting for waiting in self._standby[rank] if waiting[0] is not peer]
        if rank is None or member is None or member.peer is not peer:
            return  # a stranger, or a worker that died while greeting; its supervisor tells of the latter
        if member.finished or member.dead or self._aborted.is_set():
            self._final.add(rank)
            return
        reason = f"the connection to its machine broke ({why})"
        if self.let_go(rank, reason):
            return
        member.finished = True
        self._ended(rank, Event(rank, "lost", {"host": member.host, "reason": reason}))
        self.abort(self._over[rank])

    def let_go(self, rank: int, reason: str) -> bool:
        """Go on without a rank, or wait for another supervisor; return whether the run allows that."""
        member = self._members[rank]
        # What only it knew is in a file that the ranks of its machine hold open.
        others = [m for r, m in self._members.items() if r != rank and r < self._crew and not m.dead]
        known = self._regrouping is None or any(other.host == member.host for other in others)
        fields = {"host": member.host, "reason": reason}
        if known and not self._job.together and self._await_another(rank, fields):
            return True
        with self._lock:
            if not member.optional or member.finished:
                return member.finished
            member.finished = True
            self._motion.ended(rank)
        member.peer.send("abort")  # should it come back
        self._ended(rank, Event(rank, "left", {"host": member.host, "reason": reason}))
        self._after(rank)
        return True

    def give_up(self, rank: int, fields: dict[str, Any]) -> None:
        """Fail the run: nobody replaces a rank that has died."""
        with self._lock:
            if self._members[rank].finished or self._aborted.is_set():
                return
            self._members[rank].finished = True
        self._ended(rank, Event(rank, "lost", fields))
        self.abort(self._over[rank])

    def _await_another(self, rank: int, fields: dict[str, Any]) -> bool:
        """Wait for a process that replaces the one of this rank; return whether the run allows that."""
        group, transcript = self._regrouping, self._transcript
        if transcript is None or rank >= self._crew:
            return False
        with self._lock:
            member = self._members[rank]
            if member.dead or member.finished:
                return True
            if group is not None:
                over = self._halt is not None or any(m.finished for m in self._members.values())
                if over or not group.lose(rank, {**fields, "died": time.monotonic()}):
                    return False
            member.dead, member.died = True, time.monotonic()
            self._motion.replaced(rank)
            waiting = self._standby.get(rank)
            newest = waiting.pop() if waiting else None
        member.peer.send("dismiss")  # should it come back
        if group is None:
            self._events.put(Event(rank, "report", {"name": "replaced", "worker": rank, **fields}))
        else:
            self._void(rank)
        if newest is not None:
            self._join(*newest)
        return True

    def _void(self, lost: int) -> None:
        """Tell all ranks that one has died; those in a gather that it took no part in need not wait."""
        with self._lock:
            for rank, member in self._members.items():
                if rank < self._crew and member.has_job and not member.dead:
                    member.peer.send("gone", rank=lost)
        self._end_in_vain()

    def _end_in_vain(self) -> None:
        """End gathers that some rank brings nothing to before all meet again."""
        with self._lock:
            for turn, gathering in list(self._gatherings.items()):
                if self._regrouping is not None and gathering.lacks(self._regrouping.away):
                    self._gatherings.pop(turn)
                    for rank in gathering.brought:
                        if not self._members[rank].dead:
                            self._members[rank].peer.send("void")

    def _meet_again(self, rank: int, kind: str, turn: int, group: Regrouping) -> None:
        """A rank is prepared, or has heard of a loss: all meet once all have come. One says if they go on."""
        if kind == "resumed":
            for fields in group.resume(time.monotonic()):
                self.announce("regrouped", **fields)
            return
        if kind == "open" and group.prepare(rank):
            self._members[rank].peer.put(encode_parts([str(turn).encode(), b""]))
            return
        if not group.come(rank):
            self._end_in_vain()
            return
        with self._lock:
            self._gatherings.clear()
            self._last_turn += 1
            meeting = json.dumps(self._whereabouts()).encode()
            for other in range(self._crew):
                self._members[other].peer.send("regrouped", meeting, turn=self._last_turn)
        group.part()

    def _forget_answers(self) -> None:
        """The ranks cannot be replaced."""
        transcript, self._transcript = self._transcript, None
        self._regrouping = None
        if transcript is not None:
            transcript.close()

    def _fail_of_absence(self) -> None:
        """End the run by the loss that its ranks cannot go on after."""
        absent = self._regrouping.absent if self._regrouping is not None else {}
        for rank, fields in absent.items():
            self.give_up(rank, {name: value for name, value in fields.items() if name != "died"})

    def _handle(self, peer: Peer, rank: int, frame: Frame) -> None:
        member = self._members[rank]
        if member.peer is not peer or member.dead:
            return  # one that waits in line, or whose place another one has or shall have
        member.received = time.monotonic()
        if frame.kind == "beat":
            return
        if frame.kind == "stacks":
            with self._stacks_received:
                self._stacks[rank] = frame.fields["text"]
                self._stacks_received.notify_all()
            return
        if self._moves(rank, frame):
            return
        if frame.kind == "gather":
            self._gather(rank, frame)
            return
        if frame.kind == "halting":
            self._halted(rank, int(frame.fields["begun"]))
            return
        if frame.kind == "notice":
            self.notice(member.host, rank=rank, **frame.fields)
            return
        if frame.kind == "forgo":
            self._forget_answers()
            return
        if frame.kind in ("open", "regroup", "resumed") and self._regrouping is not None:
            self._meet_again(rank, frame.kind, int(frame.fields.get("turn", 0)), self._regrouping)
            return
        if frame.kind in ("open", "keep") and self._transcript is not None:
            self._remember(rank, frame, self._transcript)
            return
        if frame.kind == "lost":
            if self._await_another(rank, frame.fields):
                return
            if self._job.regroups:
                peer.send("abort")  # no other process is wanted, which its supervisor waits to hear
        if frame.kind == "report" and self._is_known(rank, frame):
            return
        if frame.kind == "optional":
            member.optional = True
            return
        if frame.kind == "result":
            with self._lock:
                self._results[rank] = frame.buffers
            member.peer.send("kept")
            return
        if is_feed(frame.kind):
            self.feeds(rank).received(frame)
            return
        event = Event(rank, frame.kind, frame.fields)
        if frame.kind not in _TERMINAL_EVENTS:
            self._events.put(event)
            return
        member.finished = True
        self._ended(rank, event)
        if frame.kind == "done" or (frame.kind == "error" and frame.fields.get("sync")):
            self._fail_of_absence()
        if frame.kind in ("error", "lost"):
            if frame.fields.get("sync"):
                self._abort_within(limits.ROOT_CAUSE_S)
            else:
                self.abort(self._over[rank])
        else:
            self._after(rank)
        if any(self._standby.values()) and self.finished:
            self.abort()

    def _after(self, rank: int) -> None:
        """A rank has ended while the others go on: complete gathers without it, and end services."""
        with self._lock:
            for turn, gathering in list(self._gatherings.items()) if rank in self._left else ():
                self._answer(turn, gathering)
        if self._job.services and all(
            self._members[r].finished for r in self._members.keys() - self._job.services
        ):
            self._end_services()

    def _end_services(self) -> None:
        """Stop all services, or start the grace period of those that have one."""
        left = {
            r: grace_s
            for r, grace_s in self._job.graces.items()
            if r in self._members and not self._members[r].finished
        }
        if not left:
            self.abort()
        elif not self._ending:
            self._ending = True
            self._abort_within(max(left.values()))
            for rank in left:
                if self._members[rank].has_job:  # otherwise once it has
                    self._members[rank].peer.send("ending")

    def _ended(self, rank: int, event: Event) -> None:
        if event.kind == "left":
            self._left.add(rank)
        self._halted(rank)
        self._close_feeds(rank, _problem(event, rank_name(rank, self._job.roles[rank])))
        self._events.put(event)
        self._final.add(rank)

    def _close_feeds(self, rank: int, problem: str | None) -> None:
        with self._lock:
            problem = self._over.setdefault(rank, problem)
            feeds = self._feeds.get(rank)
        if feeds is not None:
            feeds.close(problem)

    def _moves(self, rank: int, frame: Frame) -> bool:
        """Record the progress that a frame shows; return whether the frame says nothing else."""
        now = time.monotonic()
        if frame.kind == "pulse" and not self._members[rank].has_job:
            self._members[rank].has_job = True
            if rank in self._feeds:
                self.feeds(rank)  # connects them
            if self._halt is not None and rank < self._crew:  # it was asked of the one that it replaces
                self._members[rank].peer.send("halt")
                if self._halt.last is not None:
                    self._members[rank].peer.send("halt_at", last=self._halt.last, moves=self._halt.moves)
            elif self._is_noticed:
                self._ask_to_halt(moves=True)
            if self._ending and rank in self._job.graces:
                self._members[rank].peer.send("ending")
        with self._lock:
            if frame.kind == "pulse":
                self._motion.pulse(rank, frame.fields["ticks"], frame.fields["waiting"], now)
            elif frame.kind in ("gather", "report", "result", "keep") or is_feed(frame.kind):
                self._motion.moved(now)
            elif frame.kind == "done":
                self._motion.moved(now)
                self._motion.ended(rank)
            elif frame.kind in ("error", "lost", "left", "aborted"):
                self._motion.ended(rank)
        return frame.kind == "pulse"

    def _abort_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._abort_at = at if self._abort_at is None else min(at, self._abort_at)

    def tick(self, now: float) -> None:
        if self._abort_at is not None and now > self._abort_at:
            self.abort()
        wait_s = self._settings.executor_wait_s
        for rank, member in list(self._members.items()) if self._transcript is not None else ():
            if member.dead and not member.finished and now - member.died > wait_s:
                reason = f"it died, and no other worker took its place in {wait_s:g} s"
                self.give_up(rank, {"host": member.host, "reason": reason})

    def _gather(self, rank: int, frame: Frame) -> None:
        turn = self._members[rank].asked = frame.fields["turn"]
        self._last_turn = max(self._last_turn, turn)
        answer = None if self._transcript is None else self._transcript.answer(turn, rank)
        if answer is not None:
            self._members[rank].peer.put([answer])
            return
        with self._lock:
            gathering = self._gatherings.setdefault(turn, Gathering(turn, self._crew))
            gathering.bring(rank, frame.buffers[0], frame.fields["wants"])
            self._answer(turn, gathering)
            if turn in self._gatherings:
                self._end_in_vain()

    def _answer(self, turn: int, gathering: Gathering) -> None:
        if gathering.complete(self._left):
            del self._gatherings[turn]
            answers = gathering.answers(self._left)
            # Ranks that regroup give a replacement what it goes on from.
            group = self._regrouping
            if self._transcript is not None and (group is None or not group.all_prepared):
                self._transcript.answered(turn, answers)
            for other, pieces in answers.items():
                if self._members[other].asked == turn:  # the process that did may be dead; the next one will
                    self._members[other].peer.put(pieces)

    def _remember(self, rank: int, frame: Frame, transcript: Transcript) -> None:
        turn = int(frame.fields["turn"])
        if frame.kind == "keep":
            transcript.keep(rank, turn, frame.buffers[0])
            return
        next_turn, data = transcript.opens(rank, turn)
        self._members[rank].peer.put(encode_parts([str(next_turn).encode(), data]))

    def _is_known(self, rank: int, frame: Frame) -> bool:
        """Whether the previous process of this rank has already sent this report."""
        turn = frame.fields.pop("turn", None)
        if turn is None:
            return False
        self._reported[rank] = max(self._reported.get(rank, -1), turn)
        return bool(turn <= self._members[rank].reported)


def _problem(event: Event, name: str) -> str | None:
    if event.kind == "done":
        return None
    if event.kind == "aborted":
        return "the gang was stopped"
    if event.kind in ("lost", "left"):
        return f"{name} was lost: {event.fields.get('reason', '')}"
    kind = str((event.fields.get("types") or ["an error"])[0]).partition("@")[0].rpartition(":")[2]
    return f"{name} failed with {kind}: {str(event.fields.get('message', '')).partition(chr(10))[0]}"
