"""How a feeding task learns why its node is gone.

A node that fails may be gone before a task hears why, and a killed one says nothing. The driver knows the
cause a moment later and outlives all nodes, so it answers tasks (`FailureServer`), which ask with `why`.
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


class Failures:
    def __init__(self, gang: Gang) -> None:
        settings = gang.job.settings
        # How long it takes at most until the failure of a node has ended all of them.
        self.limit_s = settings.heartbeat_timeout_s + 2 * settings.stop_timeout_s
        self._gang = gang
        self._changed = threading.Condition()
        self._returned: set[int] = set()

    def returned(self, rank: int) -> None:
        with self._changed:
            self._returned.add(rank)
            self._changed.notify_all()

    def ended(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def is_known(self, rank: int) -> bool:
        """Whether the outcome of a missing node is known: it returned, or the whole gang ended."""
        return not self._gang.is_running or rank in self._returned

    def wait(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.is_known(rank), timeout=self.limit_s)

    def cause(self, rank: int) -> str | None:
        try:
            if not self._gang.is_running:
                self._gang.wait()
        except Exception as exc:  # noqa: BLE001 - told to the task
            return "".join(traceback.format_exception_only(exc)).strip()
        return (
            f"the program of node {rank} has returned: it takes no rows." if rank in self._returned else None
        )


class FailureServer(Handler):
    def __init__(
        self,
        hosts: tuple[str, str],  # the address to listen on, and the one that tasks reach it by
        secret: bytes,  # what tasks prove themselves with
        failures: Failures,
        *,
        ports: tuple[int, int] | None = None,  # the ports that may be taken; None is any
    ) -> None:
        listener = listen(hosts[0], backlog=_EXPECTED, ports=ports)
        self.address: Address = (hosts[1], listener.getsockname()[1])
        self._failures = failures  # what is known
        self._asking: dict[Peer, float] = {}
        self._server = Server(
            listener,
            secret,
            self,
            expected=_EXPECTED,
            name="kindler-failure-server",
            timeout_s=limits.TASK_GREETING_S,
        )
        self._server.start()

    def close(self) -> None:
        for peer in list(self._asking):
            self._answer(peer)
        self._server.close(limits.CLOSE_S)

    def received(self, peer: Peer, frame: Frame) -> None:
        peer.id = int(frame.fields["rank"])
        self._asking[peer] = time.monotonic() + self._failures.limit_s

    def closed(self, peer: Peer, why: str) -> None:
        self._asking.pop(peer, None)

    def tick(self, now: float) -> None:
        for peer, deadline in list(self._asking.items()):
            if now > deadline or self._failures.is_known(peer.id):
                self._answer(peer)

    def _answer(self, peer: Peer) -> None:
        if self._asking.pop(peer, None) is not None:
            peer.send("because", cause=self._failures.cause(peer.id))


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
