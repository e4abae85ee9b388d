"""Listens for connections and lets in those who prove that they know the run's secret.

Nobody waits for a stranger: connections that have not proved themselves are greeted side by side, cost a
socket and a few bytes each, and are closed after a while. What is said after the greeting is left to others.
"""

from __future__ import annotations

import random
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kindler.engine.channel import GREETING_BYTES, greeting, tuned

_SPARE_GUESTS = 512
_ACCEPTS_PER_TURN = 64
_PAUSE_S = 0.2

LetIn = Callable[[socket.socket], None]


def listen(host: str, *, backlog: int, ports: tuple[int, int] | None = None) -> socket.socket:
    """A listener on `host`, an address or a name, of either family; on any port, or on a free one of `ports`.

    Raises:
        OSError: There is no such address here, or all the ports are taken.
    """
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    if ports is None:
        # Port 0: taken and held, so there is no race for it.
        return socket.create_server((place[0], 0), family=family, backlog=backlog)
    problem: OSError | None = None
    # Not always from the first one on: several processes of a machine look at the same time.
    for port in random.sample(range(ports[0], ports[1] + 1), ports[1] - ports[0] + 1):
        try:
            return socket.create_server((place[0], port), family=family, backlog=backlog)
        except OSError as exc:
            problem = exc
    raise OSError(f"no port from {ports[0]} to {ports[1]} can be taken on {host}: {problem}")


@dataclass(slots=True)
class _Guest:
    sock: socket.socket
    answer: Callable[[bytes], bytes]
    deadline: float
    said: bytearray = field(default_factory=bytearray)


class Door:
    """Greets whoever connects to `listener`. Its keys in `selector` carry functions to be called when ready.

    Args:
        listener: Is closed with the door.
        secret: What those who may come in know.
        selector: Whoever owns it calls `key.data()` for ready keys, and `expire` now and then.
        let_in: Takes over the socket of one who has proved itself. It does not block.
        expected: How many may come at the same time; when there are many more, the oldest is dropped.
        timeout_s: How long a greeting may take.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        selector: selectors.BaseSelector,
        let_in: LetIn,
        *,
        expected: int,
        timeout_s: float,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._selector = selector
        self._let_in = let_in
        self._timeout_s = timeout_s
        self._most_guests = expected + _SPARE_GUESTS
        self._guests: dict[int, _Guest] = {}
        self._paused_until: float | None = None
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def expire(self, now: float) -> None:
        """Close on those who have taken too long."""
        for guest in [guest for guest in self._guests.values() if guest.deadline < now]:
            self._drop(guest)
        if self._paused_until is not None and self._paused_until < now:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Listen no more; those who were let in stay."""
        for guest in list(self._guests.values()):
            self._drop(guest)
        if self._paused_until is None:
            self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # too many open files: make room, and try again in a moment
                self._drop_oldest()
                self._pause()
                return
            if len(self._guests) >= self._most_guests:
                self._drop_oldest()
            self._greet(sock)

    def _greet(self, sock: socket.socket) -> None:
        hello, answer = greeting(self._secret)
        sock.setblocking(False)
        try:
            sock.send(hello)  # a fresh connection has room for it
        except OSError:
            sock.close()
            return
        guest = _Guest(sock, answer, time.monotonic() + self._timeout_s)
        self._guests[sock.fileno()] = guest
        self._selector.register(sock, selectors.EVENT_READ, partial(self._hear, guest))

    def _hear(self, guest: _Guest) -> None:
        try:
            said = guest.sock.recv(GREETING_BYTES - len(guest.said))
        except BlockingIOError:
            return
        except OSError:
            self._drop(guest)
            return
        guest.said += said
        if not said:
            self._drop(guest)
        elif len(guest.said) == GREETING_BYTES:
            try:
                guest.sock.send(guest.answer(bytes(guest.said)))
            except OSError:  # it knows no secret, or is gone
                self._drop(guest)
                return
            self._forget(guest)
            self._let_in(tuned(guest.sock))

    def _pause(self) -> None:
        if self._paused_until is None:
            self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + _PAUSE_S

    def _drop_oldest(self) -> None:
        if self._guests:
            self._drop(next(iter(self._guests.values())))

    def _drop(self, guest: _Guest) -> None:
        self._forget(guest)
        guest.sock.close()

    def _forget(self, guest: _Guest) -> None:
        del self._guests[guest.sock.fileno()]
        self._selector.unregister(guest.sock)
