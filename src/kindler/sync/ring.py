"""Sums and broadcasts between hosts, over a ring of TCP connections.

A sum travels once around in parts (reduce-scatter) and once more with the results (all-gather), so each
member sends about twice the array, however many there are. It is pipelined: a block is added and passed on
while the rest of its part is still on the way. Small arrays go around whole.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kindler import limits
from kindler.errors import SyncError, SyncTimeoutError
from kindler.group import Group
from kindler.sync.shared_memory import NUMPY, Arrays, Topology

_SMALL_BYTES = 8 << 10  # latency counts more than bytes: half as many hops
_BLOCK = 64 << 10  # elements that are added and passed on at once, while they are still in the cache
_NOTHING = memoryview(b"")


def neighbours(members: Sequence[int], rank: int) -> tuple[int, int]:
    """The ranks on the left and right of `rank`; of two members, each is both for the other."""
    place = members.index(rank)
    return members[place - 1], members[(place + 1) % len(members)]


@dataclass(slots=True)
class _Hop:
    data: memoryview
    own: Any  # the array that incoming data is added to; None if it is replaced
    hops: int  # how far to the left the origin of the data sits
    got: int = 0  # bytes received
    ready: int = 0  # bytes that may be passed on


class Ring:
    def __init__(self, where: Topology, links: dict[int, socket.socket], arrays: Arrays = NUMPY) -> None:
        self._arrays = arrays
        self._members = where.leaders
        self._place = self._members.index(where.rank)
        self._links = links
        left, right = neighbours(self._members, where.rank)
        self._left, self._right = links[left], links[right]
        self._size, self._timeout_s, self.waiting = where.size, where.timeout_s, where.waiting
        self._news = where.waiting  # which knows who has died
        for link in links.values():
            link.setblocking(False)

    @classmethod
    def join(cls, worker: Group, where: Topology, arrays: Arrays = NUMPY) -> Ring | None:
        """Connect the leaders of all hosts; None on other ranks, which only take part in the meeting."""
        peers = set(neighbours(where.leaders, where.rank)) if where.leads else set()
        with where.waiting:
            links = worker.links(sorted(peers), where.timeout_s)
        return cls(where, links, arrays) if links else None

    def all_reduce(self, flat: Any) -> None:
        if self._arrays.raw(flat).nbytes <= _SMALL_BYTES:
            self._sum_whole(flat)
            return
        count, elements = len(self._members), self._arrays.count(flat)
        bounds = [member * elements // count for member in range(count + 1)]
        parts = [flat[bounds[member] : bounds[member + 1]] for member in range(count)]
        hops = [*self._adding(parts), *self._replacing(parts)]
        self._stream(self._arrays.raw(parts[self._place]), hops, block=self._arrays.empty(_BLOCK, flat))

    def reduce_scatter(self, flat: Any, bounds: Sequence[int]) -> None:
        """The rest of the array is garbage afterwards; `bounds` delimit the members' parts."""
        parts = self._parts(flat, bounds)
        block = self._arrays.empty(_BLOCK, flat)
        self._stream(self._arrays.raw(parts[self._place]), self._adding(parts), block=block)

    def all_gather(self, flat: Any, bounds: Sequence[int]) -> None:
        parts = self._parts(flat, bounds)
        own = parts[(self._place + 1) % len(parts)]
        self._stream(self._arrays.raw(own), self._replacing(parts))

    def _parts(self, flat: Any, bounds: Sequence[int]) -> list[Any]:
        """The parts in ring order: sums leave each member with the one after its own."""
        count = len(self._members)
        return [flat[bounds[member] : bounds[member + 1]] for member in (count - 1, *range(count - 1))]

    def _adding(self, parts: Sequence[Any]) -> list[_Hop]:
        incoming = [
            (step + 1, parts[(self._place - step - 1) % len(parts)]) for step in range(len(parts) - 1)
        ]
        return [_Hop(self._arrays.raw(part), part, hops=hops) for hops, part in incoming]

    def _replacing(self, parts: Sequence[Any]) -> list[_Hop]:
        incoming = [parts[(self._place - step) % len(parts)] for step in range(len(parts) - 1)]
        return [_Hop(self._arrays.raw(part), None, hops=1) for part in incoming]

    def broadcast(self, flat: Any, source: int) -> None:
        data = self._arrays.raw(flat)
        distance = (self._place - source) % len(self._members)
        if distance == 0:
            self._swap(data, _NOTHING, hops=1)
        elif distance == len(self._members) - 1:
            self._swap(_NOTHING, data, hops=1)
        else:
            self._stream(_NOTHING, [_Hop(data, None, hops=1)], last=True)

    def close(self) -> None:
        """Close the connections, which neighbours notice at once. Idempotent."""
        for link in self._links.values():
            link.close()

    def _sum_whole(self, flat: Any) -> None:
        arrays, count, place = self._arrays, len(self._members), self._place
        parts = [arrays.empty(arrays.count(flat), flat) for _ in range(count)]
        arrays.copy(flat, parts[place])
        for step in range(count - 1):
            outgoing, incoming = parts[(place - step) % count], parts[(place - step - 1) % count]
            self._swap(arrays.raw(outgoing), arrays.raw(incoming), hops=step + 1)
        arrays.add_up(parts, flat)

    def _stream(
        self, first: memoryview, hops: Sequence[_Hop], *, block: Any = None, last: bool = False
    ) -> None:
        """Receive the hops in order while sending `first` and then all of them, the last only if `last`.

        A member never overwrites what it has yet to send: a byte comes back only after it has gone around.
        """
        outgoing = [first, *(hop.data for hop in (hops if last else hops[:-1]))]
        room = _NOTHING if block is None else self._arrays.raw(block)
        sending = receiving = sent = 0
        deadline = time.monotonic() + self._timeout_s
        while sending < len(outgoing) or receiving < len(hops):
            moved = 0
            ready = 0 if sending == len(outgoing) else hops[sending - 1].ready if sending else len(first)
            if sent < ready:
                moved = self._send(outgoing[sending][sent:ready])
                sent += moved
            if sending < len(outgoing) and sent == len(outgoing[sending]):
                sending, sent, moved = sending + 1, 0, moved + 1
            if receiving < len(hops):
                hop = hops[receiving]
                moved += self._take(hop, room, block)
                if hop.ready == len(hop.data):
                    receiving, moved = receiving + 1, moved + 1
            if moved:
                deadline = time.monotonic() + self._timeout_s
            else:
                self._await(sent < ready, hops[receiving].hops if receiving < len(hops) else None, deadline)

    def _take(self, hop: _Hop, room: memoryview, block: Any) -> int:
        """Receive some of a hop; what is to be added passes through `block`, whose bytes are `room`."""
        if hop.own is None:
            got = self._receive(hop.data[hop.got :]) if hop.got < len(hop.data) else 0
            hop.got = hop.ready = hop.got + got
            return got
        full = min(hop.ready + len(room), len(hop.data))
        got = self._receive(room[hop.got - hop.ready : full - hop.ready]) if hop.got < full else 0
        hop.got += got
        if hop.got == full and hop.ready < full:
            width = len(room) // self._arrays.count(block)
            own = hop.own[hop.ready // width : full // width]
            self._arrays.add_up([block[: self._arrays.count(own)], own], own)
            hop.ready = full
        return got

    def _swap(self, outgoing: memoryview, incoming: memoryview, *, hops: int) -> None:
        """Send to the right while receiving from the left.

        `hops` is how far left the origin of the data sits: the members between have passed on what came
        before, so a silence is its fault.
        """
        deadline = time.monotonic() + self._timeout_s
        while outgoing or incoming:
            sent = self._send(outgoing) if outgoing else 0
            got = self._receive(incoming) if incoming else 0
            outgoing, incoming = outgoing[sent:], incoming[got:]
            if not (sent or got):
                self._await(bool(outgoing), hops if incoming else None, deadline)

    def _await(self, sending: bool, hops: int | None, deadline: float) -> None:
        """Wait until a byte can move; `hops` is how far left the awaited member sits, if any."""
        if not self._ready(sending, hops is not None, deadline):
            culprit = self._place + 1 if hops is None else self._place - hops
            raise SyncTimeoutError(
                op="exchange between hosts",
                missing=[self._members[culprit % len(self._members)]],
                size=self._size,
                waited_s=self._timeout_s,
            )

    def _send(self, data: memoryview) -> int:
        try:
            return self._right.send(data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise self._gone(self._place + 1, str(exc)) from exc

    def _receive(self, room: memoryview) -> int:
        try:
            got = self._left.recv_into(room)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise self._gone(self._place - 1, str(exc)) from exc
        if not got:
            raise self._gone(self._place - 1, "it closed the connection")
        return got

    def _ready(self, sending: bool, receiving: bool, deadline: float) -> bool:
        wanted: dict[socket.socket, int] = {}
        if sending:
            wanted[self._right] = select.POLLOUT
        if receiving:
            wanted[self._left] = wanted.get(self._left, 0) | select.POLLIN
        poll = select.poll()
        for link, events in wanted.items():
            poll.register(link, events)
        with self.waiting:
            while (left := deadline - time.monotonic()) > 0:
                if poll.poll(1000 * min(left, limits.TICK_S)):
                    return True
                if absent := sorted(self._news.absent):
                    raise SyncError(f"workers {absent} died in an exchange between hosts.")
            return bool(poll.poll(0))

    def _gone(self, place: int, why: str) -> SyncError:
        rank = self._members[place % len(self._members)]
        return SyncError(
            f"the connection to worker {rank} broke in an exchange between hosts: {why}.\n"
            "Hint: most often that worker is gone; its log says why."
        )
