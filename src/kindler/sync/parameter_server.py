"""The server of asynchronous training: a replica that computes nothing and applies what workers send.

One thread per connection. Updates are always applied one after the other: frameworks' optimizers are not made
for two at a time, and would lose updates silently. `lock` decides whether weights may be read during an
update. A message is a fixed-size header, then raw bytes; nothing is unpickled, text is JSON. The workers'
side is `asynchronous.py`.
"""

from __future__ import annotations

import json
import logging
import socket
import statistics
import struct
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from kindler.collective import Array
from kindler.errors import fresh
from kindler.sync.contract import Replica
from kindler.sync.host_group import FlatLayout
from kindler.sync.shared_memory import Segment

_HEADER = struct.Struct("<4sHHqQ")
_MAGIC = b"KPS1"
_MOST_JSON_BYTES = 64 << 20
_log = logging.getLogger(__name__)


class Op(IntEnum):
    HELLO = 1  # JSON: who calls, and the layout of its parameters
    STATE = 2  # a replica's state: train on from it
    PULL = 3  # the weights, to compute gradients with
    LOOK = 4  # the weights, to look at
    PUSH = 5  # gradients, computed with the weights of that version; the answer is that of PULL
    RELEASE = 6  # no gradients will come of the weights that were pulled last
    EPOCH = 7  # JSON: what an epoch brought; the answer has what happened at the server
    ENDED_EPOCH = 8  # JSON: the figures of an epoch, which a schedule may follow; the answer has the rates
    RATES = 9  # JSON: learning rates
    WRITE = 10  # weights, which replace the server's
    MERGE = 11  # a replica's state: its model counts; the answer is the state of the run
    OK = 16  # the answer; its version is the server's
    ENDED = 17  # the gradients were not applied: the run has made all its steps


class ProtocolError(Exception):
    """The other end does not speak this protocol."""


@dataclass(frozen=True, slots=True)
class Header:
    """`version` counts the updates of the weights; if `shared`, the payload lies in mapped memory."""

    op: Op
    version: int
    nbytes: int
    shared: bool = False


def send(sock: socket.socket, op: Op, *payload: Any, version: int = 0, shared: bool = False) -> None:
    nbytes = sum(memoryview(part).nbytes for part in payload)
    parts: list[Any] = [_HEADER.pack(_MAGIC, op, int(shared), version, nbytes)]
    if not shared:
        parts += [memoryview(part).cast("B") for part in payload if memoryview(part).nbytes]
    _send_all(sock, parts)


def send_json(sock: socket.socket, op: Op, value: Any, *, version: int = 0) -> None:
    send(sock, op, json.dumps(value).encode(), version=version)


def read_header(sock: socket.socket) -> Header:
    data = bytearray(_HEADER.size)
    read_into(sock, memoryview(data))
    magic, op, flags, version, nbytes = _HEADER.unpack(data)
    try:
        if magic != _MAGIC:
            raise ValueError(f"it begins with {bytes(magic)!r}")
        return Header(Op(op), version, nbytes, bool(flags))
    except ValueError as exc:
        raise ProtocolError(f"not a message of this protocol: {exc}") from None


def read_into(sock: socket.socket, view: memoryview) -> None:
    while view:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionError("the other end closed the connection")
        view = view[got:]


def read_payload(sock: socket.socket, header: Header, *, most: int | None = None) -> bytearray:
    if most is not None and header.nbytes > most:
        raise ProtocolError(f"{header.op.name} announces {header.nbytes:,} bytes; {most:,} are possible")
    try:
        data = bytearray(header.nbytes)
    except (MemoryError, OverflowError):
        raise ProtocolError(f"{header.op.name} announces {header.nbytes:,} bytes") from None
    read_into(sock, memoryview(data))
    return data


def read_json(sock: socket.socket, header: Header) -> Any:
    try:
        return json.loads(read_payload(sock, header, most=_MOST_JSON_BYTES))
    except ValueError as exc:
        raise ProtocolError(f"{header.op.name} is not JSON: {exc}") from None


def _send_all(sock: socket.socket, parts: list[Any]) -> None:
    while parts:
        sent = sock.sendmsg(parts)
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = memoryview(parts[0])[sent:]


class Outstanding:
    """Who may take weights, and whose gradients may be applied, so that none becomes staler than `most`.

    A gradient's staleness is the number of updates between the weights it was computed with and its own
    update. A worker that has taken weights and not returned gradients is outstanding. With bound s and
    present version v, the outstanding p1 <= p2 <= ... (by version taken) can still be applied in that order
    as long as v + i - 1 - p_i <= s for each. Both rules below keep that true, and the oldest can always be
    applied: none waits forever, and no work is thrown away.

    >>> out = Outstanding(most=1)
    >>> out.take("a", 0), out.take("b", 0)
    (None, None)
    >>> out.may_take(), out.may_apply("b", 0)
    (False, True)
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._taken: dict[Hashable, int] = {}  # in the order in which they were taken: versions only grow

    def take(self, who: Hashable, version: int) -> None:
        self._taken.pop(who, None)
        self._taken[who] = version

    def drop(self, who: Hashable) -> None:
        """Its gradients have come, or never will."""
        self._taken.pop(who, None)

    def may_take(self) -> bool:
        """Whether one more worker can have the present weights."""
        return self._most is None or len(self._taken) <= self._most

    def may_apply(self, who: Hashable, version: int) -> bool:
        if self._most is None:
            return True
        for place, (other, taken) in enumerate(self._taken.items(), start=1):
            if other == who:
                return True
            if version + place - taken > self._most:
                return False
        return True


class _Connection:
    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank, self.sock = rank, sock
        self.segment: Segment | None = None
        self.incoming: Array = np.empty(0, np.uint8)
        self.outgoing: Array = np.empty(0, np.uint8)
        self.gradients: list[Array] = []

    def make_room(self, layout: FlatLayout) -> None:
        nbytes = layout.nbytes
        if self.segment is not None:
            whole = np.frombuffer(self.segment.mapping, np.uint8)
            self.incoming, self.outgoing = whole[:nbytes], whole[nbytes : 2 * nbytes]
        else:
            self.incoming, self.outgoing = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        self.gradients = layout.views(self.incoming)


class ParameterServer:
    """Serves one run; `serve` is called for each connection, on its own thread.

    `replica` is loaded with the first worker's state and belongs to the server from then on.
    """

    def __init__(self, replica: Replica, *, lock: bool, max_staleness: int | None) -> None:
        self._replica = replica
        self._lock_reads = lock
        self._outstanding = Outstanding(max_staleness)
        self._changed = threading.Condition()
        self._pulls: deque[_Connection] = deque()
        self._ready = False
        self._failure: BaseException | None = None
        self._ends_at: int | None = None
        self._owned: list[int] | None = None
        self._count = 0
        self._layout = FlatLayout([])
        self._weights: Array = np.empty(0, np.uint8)
        self._views: list[Array] = []
        self._staleness: list[int] = []
        self._bytes = 0
        self._figures: dict[int, dict[str, Any]] = {}
        self._rates: dict[int, list[float]] = {}

    def check(self) -> None:
        if self._failure is not None:
            raise fresh(self._failure, traces=True)

    def serve(self, rank: int, sock: socket.socket) -> None:
        connection = _Connection(rank, sock)
        try:
            while True:
                self._answer(connection, read_header(sock))
        except OSError:
            pass  # it has ended, well or badly, which the engine knows
        except ProtocolError as exc:
            _log.warning("the parameter server disconnects worker %s: %s", rank, exc)
        except BaseException as exc:  # noqa: BLE001 - the edge of the thread: `check` raises it
            with self._changed:
                self._failure = self._failure or exc
        finally:
            with self._changed:
                self._outstanding.drop(connection)
                if connection in self._pulls:
                    self._pulls.remove(connection)
                self._changed.notify_all()
            sock.close()

    def _answer(self, connection: _Connection, header: Header) -> None:
        sock, op = connection.sock, header.op
        if op == Op.PUSH:
            self._push(connection, header)
        elif op == Op.PULL:
            self._pull(connection)
        elif op == Op.LOOK:
            self._await_ready(connection)
            self._send_weights(connection, self._copy_weights(connection))
        elif op == Op.RELEASE:
            with self._changed:
                self._outstanding.drop(connection)
                self._changed.notify_all()
        elif op == Op.HELLO:
            self._hello(connection, read_json(sock, header))
        elif op == Op.STATE:
            self._start_from(bytes(read_payload(sock, header)))
            send(sock, Op.OK)
        elif op == Op.EPOCH:
            send_json(sock, Op.OK, self._epoch(int(read_json(sock, header)["epoch"])))
        elif op == Op.ENDED_EPOCH:
            fields = read_json(sock, header)
            send_json(sock, Op.OK, {"rates": self._end_epoch(int(fields["epoch"]), fields["logs"])})
        elif op == Op.RATES:
            rates = [float(rate) for rate in read_json(sock, header)]
            with self._changed:
                self._replica.set_rates(rates)
            send(sock, Op.OK)
        elif op == Op.WRITE:
            self._write(connection, header)
        elif op == Op.MERGE:
            send(sock, Op.OK, self._merge(bytes(read_payload(sock, header)), epoch=header.version))
        else:
            raise ProtocolError(f"{op.name} is not a request")

    def _hello(self, connection: _Connection, fields: dict[str, Any]) -> None:
        with self._changed:
            self._ends_at, self._owned = fields["ends_at"], fields["owned"]
        path, mapped = fields["memory"], False
        if path is not None:
            try:
                connection.segment = Segment(str(path), nbytes=int(fields["nbytes"]), create=False)
                mapped = True
            except OSError:
                pass  # the same name, and another machine or container
        send_json(connection.sock, Op.OK, {"memory": mapped})

    def _start_from(self, state: bytes) -> None:
        with self._changed:
            self._replica.load_state(state)
            arrays = self._replica.read()
            self._count = len(arrays)
            self._layout = FlatLayout(self._own(arrays))
            self._weights = np.zeros(self._layout.nbytes, np.uint8)
            self._views = self._layout.views(self._weights)
            self._publish()
            self._ready = True
            self._changed.notify_all()

    def _own(self, arrays: Sequence[Any]) -> list[Any]:
        return list(arrays) if self._owned is None else [arrays[place] for place in self._owned]

    def _publish(self) -> None:
        if self._owned is None:
            self._replica.read_into(self._views)
        else:
            for view, array in zip(self._views, self._own(self._replica.read()), strict=True):
                np.copyto(view, array)

    def _await_ready(self, connection: _Connection) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._failure is not None)
            self._raise_failure()
        if not connection.gradients:
            connection.make_room(self._layout)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise ConnectionError("the server has failed")  # `check` says how

    def _pull(self, connection: _Connection) -> None:
        self._await_ready(connection)
        with self._changed:
            self._outstanding.drop(connection)  # nothing will come of what it has pulled before
            self._pulls.append(connection)
            # In turn: one that has just pushed would be faster than all who wait.
            self._changed.wait_for(
                lambda: (self._pulls[0] is connection and self._outstanding.may_take()) or self._failure
            )
            self._raise_failure()
            self._pulls.popleft()
            self._outstanding.take(connection, self._replica.step)
            version = self._copy_weights(connection) if self._lock_reads else self._replica.step
            self._changed.notify_all()
        if not self._lock_reads:
            version = self._copy_weights(connection)
        self._send_weights(connection, version)

    def _copy_weights(self, connection: _Connection) -> int:
        """Copy the weights for a worker; return the least number of updates they have seen."""
        if self._lock_reads:
            with self._changed:
                np.copyto(connection.outgoing, self._weights)
                return self._replica.step
        version = self._replica.step
        np.copyto(connection.outgoing, self._weights)
        return version

    def _send_weights(self, connection: _Connection, version: int, op: Op = Op.OK) -> None:
        shared = connection.segment is not None
        with self._changed:  # first: whoever has the weights may ask for the figures
            self._bytes += connection.outgoing.nbytes
        send(connection.sock, op, connection.outgoing, version=version, shared=shared)

    def _push(self, connection: _Connection, header: Header) -> None:
        self._receive(connection, header)
        applied = self._applied(connection, header.version)
        if applied:
            self._pull(connection)
        else:
            self._send_weights(connection, self._copy_weights(connection), Op.ENDED)

    def _receive(self, connection: _Connection, header: Header) -> None:
        self._await_ready(connection)
        if header.nbytes != self._layout.nbytes or (header.shared and connection.segment is None):
            raise ProtocolError(f"{header.nbytes:,} bytes came, the weights have {self._layout.nbytes:,}")
        if not header.shared:
            read_into(connection.sock, connection.incoming.data)
        with self._changed:
            self._bytes += header.nbytes

    def _applied(self, connection: _Connection, version: int) -> bool:
        replica = self._replica
        with self._changed:
            self._changed.wait_for(
                lambda: self._outstanding.may_apply(connection, replica.step) or self._failure
            )
            self._raise_failure()
            if not 0 <= version <= replica.step:
                raise ProtocolError(f"gradients of version {version} came at version {replica.step}")
            self._outstanding.drop(connection)
            ended = self._ends_at is not None and replica.step >= self._ends_at
            if not ended:
                stale = replica.step - version
                replica.apply(self._spread(connection.gradients))
                self._publish()
                self._staleness.append(stale)
            self._changed.notify_all()
        return not ended

    def _spread(self, gradients: list[Array]) -> Sequence[Array | None]:
        """The gradients of all parameters; None for those of other servers."""
        if self._owned is None:
            return gradients
        whole: list[Array | None] = [None] * self._count
        for place, gradient in zip(self._owned, gradients, strict=True):
            whole[place] = gradient
        return whole

    def _write(self, connection: _Connection, header: Header) -> None:
        self._receive(connection, header)
        with self._changed:
            arrays = self._replica.read()
            owned = range(len(arrays)) if self._owned is None else self._owned
            for place, array in zip(owned, connection.gradients, strict=True):
                arrays[place] = array.copy()
            self._replica.write(arrays)
            self._publish()
        send(connection.sock, Op.OK)

    def _epoch(self, epoch: int) -> dict[str, Any]:
        """Figures of an epoch: the first to ask ends the count, and all get the same answer."""
        with self._changed:
            if epoch not in self._figures:
                stale = self._staleness
                self._figures = {
                    epoch: {
                        "updates": len(stale),
                        "staleness_median": float(statistics.median(stale)) if stale else 0.0,
                        "staleness_max": max(stale, default=0),
                        "sync_bytes": self._bytes,
                        "rates": self._replica.rates(),
                    }
                }
                self._staleness, self._bytes = [], 0
            return self._figures[epoch]

    def _end_epoch(self, epoch: int, logs: dict[str, Any]) -> list[float]:
        with self._changed:
            if epoch not in self._rates:
                self._replica.epoch = epoch
                self._replica.end_epoch(logs)
                self._rates = {epoch: self._replica.rates()}
            return self._rates[epoch]

    def _merge(self, state: bytes, *, epoch: int) -> bytes:
        with self._changed:
            self._replica.load_state(state, weights_only_model=True)
            self._replica.epoch = epoch
            self._publish()
            return self._replica.state()
