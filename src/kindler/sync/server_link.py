"""A worker's connection to a parameter server: requests, and the memory that weights and gradients lie in."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kindler.collective import Array
from kindler.errors import SyncError, SyncTimeoutError
from kindler.sync.flat_buffer import FlatLayout
from kindler.sync.server_wire import (
    Header,
    Op,
    ProtocolError,
    read_header,
    read_into,
    read_json,
    read_payload,
    send,
    send_json,
)
from kindler.sync.shared_memory import Segment
from kindler.sync.wait_clock import Waiting


class ServerLink:
    """One worker's end.

    Args:
        worker: This worker.
        server: The server's rank.
        arrays: The parameters that the server looks after, whose shapes and dtypes count.
        waiting: Counts the time that the worker waits for the server.
        timeout_s: The longest time to wait for an answer.
        memory: Whether to share memory with a server on the same machine.
        ends_at: The updates after which the server applies no more.
        owned: The places of `arrays` among all parameters; None where they are all of them.

    Attributes:
        version: How many updates the weights have seen that came last.
        gradients: Where to put gradients before `push`.
        weights: Where weights lie after `pull`, `push` and `look`; the next of these overwrites them.
    """

    def __init__(
        self,
        worker: Any,
        server: int,
        arrays: Sequence[Array],
        *,
        waiting: Waiting,
        timeout_s: float,
        memory: bool,
        ends_at: int | None,
        owned: Sequence[int] | None,
    ) -> None:
        self._worker, self._server, self._waiting, self._timeout_s = worker, server, waiting, timeout_s
        layout = FlatLayout(arrays)
        self._sock: socket.socket = worker.call(server, timeout_s)
        nbytes = layout.nbytes
        self._segment: Segment | None = None
        near = memory and nbytes > 0 and worker.members[server].host == worker.host
        segment = _shared(worker, 2 * nbytes) if near else None
        try:
            hello = {
                "ends_at": ends_at,
                "owned": None if owned is None else list(owned),
                "memory": None if segment is None else segment.path,
                "nbytes": 2 * nbytes,
            }
            with self._talking("greeting"):
                send_json(self._sock, Op.HELLO, hello)
                mapped = read_json(self._sock, read_header(self._sock))["memory"]
        finally:
            if segment is not None:
                segment.unlink()
        if mapped and segment is not None:
            self._segment = segment
            whole = np.frombuffer(segment.mapping, np.uint8)
        else:
            whole = np.empty(2 * nbytes, np.uint8)
        self._outgoing, self._incoming = whole[:nbytes], whole[nbytes:]
        self.gradients, self.weights = layout.views(self._outgoing), layout.views(self._incoming)
        self.version = 0

    def start_from(self, state: bytes) -> None:
        """Give the server the state that training begins with."""
        with self._talking("sending the first state"):
            send(self._sock, Op.STATE, state)
            read_header(self._sock)

    def pull(self) -> None:
        """Fetch weights to compute gradients with."""
        with self._talking("pulling weights"):
            send(self._sock, Op.PULL)
            self._take_weights()

    def look(self) -> None:
        """Fetch weights without owing gradients for them."""
        with self._talking("pulling weights"):
            send(self._sock, Op.LOOK)
            self._take_weights()

    def push(self) -> None:
        """Send `gradients`, which were computed with `version`; `receive` takes the answer."""
        with self._talking("pushing gradients"):
            shared = self._segment is not None
            send(self._sock, Op.PUSH, self._outgoing, version=self.version, shared=shared)

    def receive(self) -> bool:
        """Take the weights that answer a push; whether its gradients were applied."""
        with self._talking("pushing gradients"):
            return self._take_weights().op == Op.OK

    def release(self) -> None:
        """Say that no gradients will come of the weights that were pulled last."""
        with self._talking("ending an epoch"):
            send(self._sock, Op.RELEASE)

    def write(self, arrays: Sequence[Array]) -> None:
        """Replace the server's weights."""
        for view, array in zip(self.gradients, arrays, strict=True):
            np.copyto(view, array)
        with self._talking("writing weights"):
            send(self._sock, Op.WRITE, self._outgoing, shared=self._segment is not None)
            read_header(self._sock)

    def ask(self, op: Op, value: Any) -> Any:
        """Send JSON, and return the JSON that comes back; None where none does."""
        with self._talking("asking the server"):
            send_json(self._sock, op, value)
            header = read_header(self._sock)
            return read_json(self._sock, header) if header.nbytes else None

    def merge(self, state: bytes, *, epoch: int) -> bytes:
        """The state of the run, with the model of `state`."""
        with self._talking("fetching the state"):
            send(self._sock, Op.MERGE, state, version=epoch)
            return bytes(read_payload(self._sock, read_header(self._sock)))

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._sock.close()

    def _take_weights(self) -> Header:
        header = read_header(self._sock)
        if header.nbytes != self._incoming.nbytes:
            raise ProtocolError(
                f"{header.nbytes:,} bytes of weights came instead of {self._incoming.nbytes:,}"
            )
        if not header.shared:
            read_into(self._sock, self._incoming.data)
        self.version = header.version
        return header

    def _talking(self, what: str) -> _Talk:
        return _Talk(self, what)


class _Talk:
    """Around a request: counts the wait, and says in the words of a run what went wrong."""

    def __init__(self, link: ServerLink, what: str) -> None:
        self._link, self._what = link, what

    def __enter__(self) -> None:
        self._link._waiting.__enter__()

    def __exit__(self, kind: Any, exc: BaseException | None, trace: Any) -> None:
        link = self._link
        link._waiting.__exit__(kind, exc, trace)
        if isinstance(exc, TimeoutError):
            raise SyncTimeoutError(
                op=f"{self._what} (worker {link._worker.rank})",
                missing=[link._server],
                size=link._worker.size,
                waited_s=link._timeout_s,
            ) from None
        if isinstance(exc, OSError | ProtocolError):
            raise SyncError(
                f"worker {link._worker.rank} lost the parameter server while {self._what}: {exc}"
            ) from exc


def _shared(worker: Any, nbytes: int) -> Segment | None:
    """Memory that the server maps, too; None where there is no room for it."""
    try:
        return Segment.create([Path("/dev/shm")], f"kindler-{worker.run_id}", nbytes)
    except SyncError:
        return None
