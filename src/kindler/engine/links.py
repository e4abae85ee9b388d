"""Direct, authenticated connections between members of a run, and the tree that carries a job's buffers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing

from kindler import limits
from kindler.engine.job import GangMember
from kindler.engine.server import Listener, listen, listen_on
from kindler.engine.wire import Address, Channel, connect
from kindler.errors import SyncError, SyncTimeoutError, rank_name
from kindler.frame import ChannelClosed
from kindler.group import Group

_BACKLOG = 16
_FANOUT = 2


def connect_links(worker: Group, peers: Collection[int], *, timeout_s: float) -> dict[int, socket.socket]:
    """Connect to each of the ranks `peers`. Every rank calls this, and naming a peer is mutual."""
    # The higher rank connects: each rank is done with lower ones before it waits for higher ones, so that
    # the waits cannot form a circle.
    above = {rank for rank in peers if rank > worker.rank}
    below = sorted(set(peers) - above - {worker.rank})
    channels: dict[int, Channel] = {}
    try:
        with ExitStack() as stack:
            listener, port = None, 0
            if above:
                listener = stack.enter_context(closing(_listen(worker, len(above))))
                port = listener.getsockname()[1]
            addresses = worker.gather(json.dumps([worker.address, port]).encode(), below)
            deadline = time.monotonic() + timeout_s
            for rank in below:
                channels[rank] = _link(worker, rank, json.loads(addresses[rank]), deadline)
            if listener is not None:
                channels |= accept_ranks(
                    listener,
                    worker.secret,
                    above,
                    deadline=deadline,
                    missing=lambda ranks: SyncTimeoutError(
                        op="connecting workers", missing=ranks, size=worker.size, waited_s=timeout_s
                    ),
                    check=lambda: _check_presence(worker),
                )
    except BaseException:
        for channel in channels.values():
            channel.close()
        raise
    for channel in channels.values():
        channel.socket.settimeout(timeout_s)
    return {rank: channel.socket for rank, channel in sorted(channels.items())}


def _check_presence(worker: Group) -> None:
    if worker.absent:  # those that live give up as well, and all meet again
        raise SyncError(f"workers {sorted(worker.absent)} died before all had connected.")


def _listen(worker: Group, expected: int) -> socket.socket:
    try:
        return listen(worker.address, backlog=expected + _BACKLOG, ports=worker.port_range)
    except OSError as exc:
        raise SyncError(f"worker {worker.rank} cannot listen on {worker.address}: {exc}") from exc


def _link(worker: Group, rank: int, address: Sequence[object], deadline: float) -> Channel:
    host, port = address
    try:
        channel = connect((str(host), int(str(port))), worker.secret, timeout_s=_until(deadline))
        channel.send("link", rank=worker.rank)
    except ChannelClosed as exc:
        raise SyncError(
            f"worker {worker.rank} cannot connect to worker {rank}: {exc}\n"
            "Hint: the machines of a run must reach each other on any port; the log of that worker says"
            " whether it is still there."
        ) from exc
    return channel


def accept_ranks(
    listener: socket.socket,
    secret: bytes,
    expected: set[int],
    *,
    deadline: float,
    missing: Callable[[list[int]], Exception],
    check: Callable[[], None] = lambda: None,
) -> dict[int, Channel]:
    """Accept connections until all `expected` ranks have come; closes `listener`. `check` may raise."""
    channels: dict[int, Channel] = {}
    admitted: list[Channel] = []
    with closing(
        Listener(
            listener,
            secret,
            lambda sock: admitted.append(Channel(sock)),
            expected=len(expected),
            timeout_s=limits.GREETING_S / 2,
        )
    ) as door:
        try:
            while absent := expected - channels.keys():
                if time.monotonic() > deadline:
                    raise missing(sorted(absent))
                door.poll(min(limits.WAKE_S, _until(deadline)))
                while admitted:
                    channel = admitted.pop()
                    rank = _rank_of(channel, min(limits.GREETING_S / 2, _until(deadline)))
                    if rank in absent and rank not in channels:
                        channels[rank] = channel
                    else:
                        channel.close()
                check()
        except BaseException:
            for channel in (*channels.values(), *admitted):
                channel.close()
            raise
    return channels


def call(member: GangMember, rank: int, secret: bytes, *, timeout_s: float) -> socket.socket:
    """Call a member on its first held port, again and again until it listens or the time is over."""
    deadline, pause_s = time.monotonic() + timeout_s, limits.FIRST_RETRY_S
    while True:
        try:
            channel = connect((member.address, member.ports[0]), secret, timeout_s=_until(deadline))
            channel.send("call", rank=rank)
        except ChannelClosed as exc:
            refused = isinstance(exc.__cause__, ConnectionRefusedError)
            if not refused or time.monotonic() + pause_s > deadline:
                name = rank_name(member.rank, member.role)
                raise SyncError(f"worker {rank} cannot reach {name}: {exc}") from exc
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, limits.MAX_RETRY_S)
            continue
        channel.socket.settimeout(timeout_s)
        return channel.socket


def answer_calls(
    port: int,
    address: str,
    secret: bytes,
    take: Callable[[int, socket.socket], None],
    check: Callable[[], None],
    *,
    expected: int,
) -> None:
    """Admit members of the run on a held port until `check` raises; `take` is called on new threads."""

    def introduce(sock: socket.socket) -> None:
        sock.setblocking(True)
        channel = Channel(sock)
        rank = _rank_of(channel, limits.GREETING_S / 2)
        if rank < 0:
            channel.close()
            return
        sock.settimeout(None)
        take(rank, sock)

    def admit(sock: socket.socket) -> None:
        threading.Thread(target=introduce, args=(sock,), name="kindler-call", daemon=True).start()

    listener = listen_on(address, port, backlog=expected + _BACKLOG)
    with closing(
        Listener(listener, secret, admit, expected=expected, timeout_s=limits.GREETING_S / 2)
    ) as door:
        while True:
            door.poll(limits.CALL_TICK_S)
            check()


def _rank_of(channel: Channel, timeout_s: float) -> int:
    try:
        return int(channel.receive(timeout_s).fields["rank"])
    except (ChannelClosed, TimeoutError, KeyError, ValueError):
        return -1  # it proved itself and then went away


def _until(deadline: float) -> float:
    """Seconds until the deadline; never 0, which would make a socket non-blocking."""
    return max(deadline - time.monotonic(), 0.001)


def parent_of(rank: int) -> int | None:
    """The rank that a supervisor gets the job's buffers from; None for the first, which asks the hub."""
    return None if rank == 0 else (rank - 1) // _FANOUT


class Carrier:
    """One supervisor's place in the tree along which the job's large buffers travel.

    Each supervisor passes every part on as it comes, to its own worker and to two other supervisors, and
    keeps nothing: the driver's traffic does not grow with the workers, and no supervisor holds a model's
    state.
    """

    def __init__(
        self, rank: int, size: int, secret: bytes, *, host: str, ports: tuple[int, int] | None = None
    ) -> None:
        self._rank = rank
        self._size = size
        self._secret = secret
        first = rank * _FANOUT + 1
        self._children = set(range(first, min(first + _FANOUT, size)))
        self._listener = (
            listen(host, backlog=len(self._children) + _BACKLOG, ports=ports) if self._children else None
        )

    @property
    def address(self) -> Address | None:
        if self._listener is None:
            return None
        host, port = self._listener.getsockname()[:2]
        return (host, port)

    def deliver(
        self, source: Address, worker: Channel, *, check: Callable[[], None], timeout_s: float
    ) -> None:
        """Fetch the buffers and pass them on; `timeout_s` is the longest silence."""
        with ExitStack() as stack:
            onward = self._accepted(check, timeout_s)
            for channel in onward:
                stack.callback(channel.close)
            try:
                up = connect(source, self._secret, timeout_s=timeout_s)
                stack.callback(up.close)
                up.send("fetch", rank=self._rank)
                self._pass_on(up, [worker, *onward], check, timeout_s)
            except ChannelClosed as exc:
                check()
                raise SyncError(
                    f"the job's data did not reach worker {self._rank}: {exc}.\n"
                    "Hint: the machines of a run must reach each other; most often another worker is gone,"
                    " and its log says why."
                ) from exc

    def pass_nothing_on(self) -> None:
        """The others have had theirs; to be called before `deliver`."""
        self.close()
        self._listener = None

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _accepted(self, check: Callable[[], None], timeout_s: float) -> list[Channel]:
        if self._listener is None:
            return []
        channels = accept_ranks(
            self._listener,
            self._secret,
            self._children,
            deadline=time.monotonic() + timeout_s,
            missing=lambda ranks: SyncTimeoutError(
                op="handing out the job", missing=ranks, size=self._size, waited_s=timeout_s
            ),
            check=check,
        )
        return list(channels.values())

    def _pass_on(
        self, up: Channel, onward: Sequence[Channel], check: Callable[[], None], timeout_s: float
    ) -> None:
        received = time.monotonic()
        while True:
            check()
            try:
                frame = up.receive(limits.WAKE_S, whole=False)
            except TimeoutError:
                if time.monotonic() - received > timeout_s:
                    raise ChannelClosed(f"nothing was received for {timeout_s:g} s") from None
                continue
            received = time.monotonic()
            for channel in onward:
                channel.pass_on(frame)
            if frame.kind == "cargo":
                return
