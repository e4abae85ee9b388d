"""Direct connections between the workers of a run, made once and then left to whoever asked for them.

Addresses and ports travel through the workers' `gather`. Both ends of a connection prove that they
know the run's secret, so what comes out is an authenticated socket; what is sent over it is not decided here.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from kindler.engine.channel import Address, Channel, ChannelClosed, connect
from kindler.engine.listener import Door, listen
from kindler.engine.members import GangMember
from kindler.errors import SyncError, SyncTimeoutError, rank_name

_GREETING_TIMEOUT_S = 5.0  # a stranger who says nothing holds up the others no longer than this
_TURN_S = 1.0
_CALL_TURN_S = 0.25
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
_OP = "connecting workers"


class LinkableWorker(Protocol):
    """The part of a worker that is needed to find the others."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def address(self) -> str: ...

    @property
    def secret(self) -> bytes: ...

    @property
    def port_range(self) -> tuple[int, int] | None: ...

    def gather(self, data: bytes, ranks: Collection[int]) -> dict[int, bytes]: ...


def connect_links(
    worker: LinkableWorker, peers: Collection[int], *, timeout_s: float
) -> dict[int, socket.socket]:
    """A connected, authenticated socket to each of the ranks `peers`.

    Every rank of the run calls it, with no peers where it needs none; if one rank names another, that one
    names it too. The sockets have a timeout of `timeout_s` and belong to the caller.

    Raises:
        SyncTimeoutError: Some peer did not come.
        SyncError: A connection could not be made.
    """
    # The higher rank connects: each rank is done with lower ones before it waits for higher ones, so that
    # the waits cannot form a circle.
    above = {rank for rank in peers if rank > worker.rank}
    listener = _listen(worker, len(above)) if above else None
    made: dict[int, Channel] = {}
    try:
        port = listener.getsockname()[1] if listener else 0
        below = sorted(set(peers) - above - {worker.rank})
        addresses = worker.gather(json.dumps([worker.address, port]).encode(), below)
        deadline = time.monotonic() + timeout_s
        for rank in below:
            host, port = json.loads(addresses[rank])
            made[rank] = _call(worker, rank, (host, port), deadline)
        if listener is not None:
            made |= answer(
                listener,
                worker.secret,
                above,
                deadline=deadline,
                missing=lambda ranks: SyncTimeoutError(
                    op=_OP, missing=ranks, size=worker.size, waited_s=timeout_s
                ),
            )
    except BaseException:
        for channel in made.values():
            channel.close()
        raise
    finally:
        if listener is not None:
            listener.close()
    links = {rank: channel.detach() for rank, channel in sorted(made.items())}
    for link in links.values():
        link.settimeout(timeout_s)
    return links


def _listen(worker: LinkableWorker, expected: int) -> socket.socket:
    try:
        return listen(worker.address, backlog=expected + 16, ports=worker.port_range)
    except OSError as exc:
        raise SyncError(f"worker {worker.rank} cannot listen on {worker.address}: {exc}") from exc


def _call(worker: LinkableWorker, rank: int, address: Address, deadline: float) -> Channel:
    try:
        channel = connect(address, worker.secret, timeout_s=_left(deadline))
        channel.send("link", rank=worker.rank)
    except ChannelClosed as exc:
        raise SyncError(
            f"worker {worker.rank} cannot connect to worker {rank}: {exc}\n"
            "Hint: the machines of a run must reach each other on any port; the log of that worker says"
            " whether it is still there."
        ) from exc
    return channel


def answer(
    listener: socket.socket,
    secret: bytes,
    expected: set[int],
    *,
    deadline: float,
    missing: Callable[[list[int]], Exception],
    check: Callable[[], None] = lambda: None,
) -> dict[int, Channel]:
    """Accept connections until all of the ranks `expected` have come; nobody waits for a stranger.

    Args:
        listener: Is closed.
        secret: What members of the run prove themselves with.
        expected: Who must come.
        deadline: By when, on the monotonic clock.
        missing: Makes the error for those that have not.
        check: Called about every second; may raise.
    """
    made: dict[int, Channel] = {}
    let_in: list[Channel] = []
    with selectors.DefaultSelector() as selector:
        door = Door(
            listener,
            secret,
            selector,
            lambda sock: let_in.append(Channel(sock)),
            expected=len(expected),
            timeout_s=_GREETING_TIMEOUT_S,
        )
        try:
            while absent := expected - made.keys():
                if time.monotonic() > deadline:
                    raise missing(sorted(absent))
                for key, _ in selector.select(min(_TURN_S, _left(deadline))):
                    key.data()
                while let_in:
                    channel = let_in.pop()
                    rank = _who(channel, min(_GREETING_TIMEOUT_S, _left(deadline)))
                    if rank in absent and rank not in made:
                        made[rank] = channel
                    else:
                        channel.close()
                door.expire(time.monotonic())
                check()
        except BaseException:
            for channel in (*made.values(), *let_in):
                channel.close()
            raise
        finally:
            door.close()
    return made


def call(member: GangMember, rank: int, secret: bytes, *, timeout_s: float) -> socket.socket:
    """A connection to a member that answers calls on its first held port.

    Its process may not listen yet, which nobody says: it is called again until it does.

    Args:
        member: Whom to call.
        rank: Who calls.
        secret: What members of the run prove themselves with.
        timeout_s: The longest time to try, and the socket's timeout afterwards.

    Raises:
        SyncError: It did not answer.
    """
    deadline, pause = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while True:
        try:
            channel = connect((member.address, member.ports[0]), secret, timeout_s=_left(deadline))
            channel.send("call", rank=rank)
        except ChannelClosed as exc:
            refused = isinstance(exc.__cause__, ConnectionRefusedError)
            if not refused or time.monotonic() + pause > deadline:
                name = rank_name(member.rank, member.role)
                raise SyncError(f"worker {rank} cannot reach {name}: {exc}") from exc
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            continue
        sock = channel.detach()
        sock.settimeout(timeout_s)
        return sock


def answer_calls(
    port: int,
    address: str,
    secret: bytes,
    take: Callable[[int, socket.socket], None],
    check: Callable[[], None],
    *,
    expected: int,
) -> None:
    """Let in whoever knows the secret, until `check` raises; nobody waits for a stranger.

    Args:
        port: A held port of this rank.
        address: The address to listen on.
        secret: What members of the run prove themselves with.
        take: Gets the rank and the connection of each that came in, on a thread of its own.
        check: Called several times a second; raises to end it.
        expected: How many may come at the same time.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=expected + 16)
    with selectors.DefaultSelector() as selector:

        def let_in(sock: socket.socket) -> None:
            threading.Thread(target=_introduce, args=(sock, take), name="kindler-call", daemon=True).start()

        door = Door(listener, secret, selector, let_in, expected=expected, timeout_s=_GREETING_TIMEOUT_S)
        try:
            while True:
                for key, _ in selector.select(_CALL_TURN_S):
                    key.data()
                door.expire(time.monotonic())
                check()
        finally:
            door.close()


def _introduce(sock: socket.socket, take: Callable[[int, socket.socket], None]) -> None:
    sock.setblocking(True)
    channel = Channel(sock)
    rank = _who(channel, _GREETING_TIMEOUT_S)
    if rank < 0:
        channel.close()
        return
    sock.settimeout(None)
    take(rank, channel.detach())


def _who(channel: Channel, timeout_s: float) -> int:
    try:
        return int(channel.receive(timeout_s).fields["rank"])
    except (ChannelClosed, TimeoutError, KeyError, ValueError):
        return -1  # it proved itself and then went away


def _left(deadline: float) -> float:
    """Seconds until the deadline; never zero, which would mean a socket that does not wait at all."""
    return max(deadline - time.monotonic(), 0.001)
