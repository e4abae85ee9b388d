"""Sums and broadcasts between hosts, over a ring of TCP connections.

Each member sends to the one on its right and receives from the one on its left, both at once. A sum travels
once around in parts (reduce-scatter) and once more with the results (all-gather), so each member sends about
twice the array, however many there are. Small arrays go around whole. Who is a member, and how connections
are made and authenticated, is left to others.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kindler.errors import SyncError, SyncTimeoutError
from kindler.sync.waiting import Waiting

__all__ = ["Ring", "neighbours"]

_SMALL_BYTES = 8 << 10  # latency counts more than bytes: half as many hops
_NOTHING = memoryview(b"")


def neighbours(members: Sequence[int], rank: int) -> tuple[int, int]:
    """The ranks on the left and on the right of `rank`; of two members, each is both for the other."""
    place = members.index(rank)
    return members[place - 1], members[(place + 1) % len(members)]


class Ring:
    """One member's place in the ring.

    Args:
        members: The global ranks that take part, in order; the same on all of them.
        rank: This rank, one of them.
        links: Connected sockets to its neighbours, by rank; the ring closes them.
        size: How many ranks the run has, for messages.
        timeout_s: Seconds to wait for a neighbour in each hop.
        waiting: Counts the time.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        links: dict[int, socket.socket],
        *,
        size: int,
        timeout_s: float,
        waiting: Waiting | None = None,
    ) -> None:
        self._members = tuple(members)
        self._place = self._members.index(rank)
        self._links = links
        left, right = neighbours(members, rank)
        self._left, self._right = links[left], links[right]
        self._size = size
        self._timeout_s = timeout_s
        self._waiting = waiting or Waiting()
        for link in links.values():
            link.setblocking(False)

    def all_reduce(self, flat: np.ndarray[Any, Any]) -> None:
        """Replace the flat array by its sum over members, the same bits on all of them."""
        if flat.nbytes <= _SMALL_BYTES:
            self._sum_whole(flat)
        else:
            self._sum_in_parts(flat)

    def broadcast(self, flat: np.ndarray[Any, Any], source: int) -> None:
        """Overwrite the flat array with that of the member in place `source`."""
        data = _bytes(flat)
        distance = (self._place - source) % len(self._members)
        if distance:
            self._swap(_NOTHING, data, hops=1)
        if distance < len(self._members) - 1:
            self._swap(data, _NOTHING, hops=1)

    def close(self) -> None:
        """Close the connections; neighbours that go on notice at once. Idempotent."""
        for link in self._links.values():
            link.close()

    def _sum_whole(self, flat: np.ndarray[Any, Any]) -> None:
        count, place = len(self._members), self._place
        parts = [flat.copy() if member == place else np.empty_like(flat) for member in range(count)]
        for step in range(count - 1):
            outgoing, incoming = parts[(place - step) % count], parts[(place - step - 1) % count]
            self._swap(_bytes(outgoing), _bytes(incoming), hops=step + 1)
        np.add(parts[0], parts[1], out=flat)
        for part in parts[2:]:
            np.add(flat, part, out=flat)

    def _sum_in_parts(self, flat: np.ndarray[Any, Any]) -> None:
        count, place = len(self._members), self._place
        bounds = [member * flat.size // count for member in range(count + 1)]
        parts = [flat[bounds[member] : bounds[member + 1]] for member in range(count)]
        received = np.empty(max(part.size for part in parts), flat.dtype)
        for step in range(count - 1):
            own = parts[(place - step - 1) % count]
            theirs = received[: own.size]
            self._swap(_bytes(parts[(place - step) % count]), _bytes(theirs), hops=step + 1)
            np.add(theirs, own, out=own)
        for step in range(count - 1):
            outgoing, incoming = parts[(place + 1 - step) % count], parts[(place - step) % count]
            self._swap(_bytes(outgoing), _bytes(incoming), hops=1)

    def _swap(self, outgoing: memoryview, incoming: memoryview, *, hops: int) -> None:
        """Send to the right while receiving from the left.

        `hops` says how far to the left the one sits whose data this rank would get: the members between
        have passed on what came before, so a silence is that one's.
        """
        deadline = time.monotonic() + self._timeout_s
        while outgoing or incoming:
            sent = self._send(outgoing) if outgoing else 0
            got = self._receive(incoming) if incoming else 0
            outgoing, incoming = outgoing[sent:], incoming[got:]
            if not (sent or got) and not self._ready(bool(outgoing), bool(incoming), deadline):
                culprit = self._place - hops if incoming else self._place + 1
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
        """Wait until a byte can move; False when the time is over."""
        wanted: dict[socket.socket, int] = {}
        if sending:
            wanted[self._right] = select.POLLOUT
        if receiving:
            wanted[self._left] = wanted.get(self._left, 0) | select.POLLIN
        poll = select.poll()
        for link, events in wanted.items():
            poll.register(link, events)
        with self._waiting:
            return bool(poll.poll(max(deadline - time.monotonic(), 0.0) * 1000))

    def _gone(self, place: int, why: str) -> SyncError:
        rank = self._members[place % len(self._members)]
        return SyncError(
            f"the connection to worker {rank} broke in an exchange between hosts: {why}.\n"
            "Hint: most often that worker is gone; its log says why."
        )


def _bytes(flat: np.ndarray[Any, Any]) -> memoryview:
    return flat.view(np.uint8).data
