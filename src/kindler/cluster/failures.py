"""How a feeding task learns why its node is gone.

A node that fails may be gone before a task hears why, and a killed one says nothing. The driver knows the
cause a moment later and outlives all nodes, so it answers tasks, which ask with `why`.
"""

from __future__ import annotations

import threading
import time
import traceback
from contextlib import closing, suppress

from kindler import limits
from kindler.engine.gang import Gang
from kindler.engine.server import Handler, Peer, Server, listen
from kindler.engine.wire import Address, connect
from kindler.frame import ChannelClosed, Frame

_EXPECTED = 256


class Failures(Handler):
    """What the driver knows; `serve` lets tasks ask for it."""

    def __init__(self, gang: Gang) -> None:
        settings = gang.job.settings
        # How long it takes at most until the failure of a node has ended all of them.
        self.limit_s = settings.heartbeat_timeout_s + 2 * settings.stop_timeout_s
        self.address: Address | None = None
        self._gang = gang
        self._changed = threading.Condition()
        self._returned: set[int] = set()
        self._asking: dict[Peer, float] = {}
        self._server: Server | None = None

    def serve(self, bind: str, advertised: str) -> None:
        job = self._gang.job
        listener = listen(bind, backlog=_EXPECTED, ports=job.settings.port_range)
        self.address = (advertised, listener.getsockname()[1])
        self._server = Server(
            listener,
            job.secret,
            self,
            expected=_EXPECTED,
            name="kindler-failure-server",
            timeout_s=limits.TASK_GREETING_S,
        )
        self._server.start()

    def close(self) -> None:
        if self._server is not None:
            for peer in list(self._asking):
                self._answer(peer)
            self._server.close(limits.CLOSE_S)

    def returned(self, *ranks: int) -> None:
        """These programs have returned, or without any, the whole gang has ended."""
        with self._changed:
            self._returned.update(ranks)
            self._changed.notify_all()

    def wait(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_known(rank), timeout=self.limit_s)

    def received(self, peer: Peer, frame: Frame) -> None:
        peer.id = int(frame.fields["rank"])
        self._asking[peer] = time.monotonic() + self.limit_s

    def closed(self, peer: Peer, why: str) -> None:
        self._asking.pop(peer, None)

    def tick(self, now: float) -> None:
        for peer, deadline in list(self._asking.items()):
            if now > deadline or self._is_known(peer.id):
                self._answer(peer)

    def _is_known(self, rank: int) -> bool:
        return not self._gang.is_running or rank in self._returned

    def _answer(self, peer: Peer) -> None:
        if self._asking.pop(peer, None) is not None:
            peer.send("because", cause=self._cause(peer.id))

    def _cause(self, rank: int) -> str | None:
        try:
            if not self._gang.is_running:
                self._gang.wait()
        except Exception as exc:  # noqa: BLE001 - the task raises it
            return "".join(traceback.format_exception_only(exc)).strip()
        if rank not in self._returned:
            return None
        return f"the program of node {rank} has returned and accepts no more rows."


def why(server: Address, secret: bytes, rank: int, *, timeout_s: float) -> str | None:
    """What the cluster failed with; None if it did not, or the driver is gone."""
    with (
        suppress(ChannelClosed, TimeoutError),
        closing(connect(server, secret, timeout_s=limits.TASK_GREETING_S)) as channel,
    ):
        channel.send("why", rank=rank)
        cause = channel.receive(timeout_s).fields["cause"]
        return None if cause is None else str(cause)
    return None
