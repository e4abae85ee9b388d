"""Where a feeding task learns why its node is gone: the driver tells it what the cluster failed with.

A node that failed may be gone before a task has heard why, and one that was killed says nothing at all. The
driver knows the cause, a moment later, and outlives all nodes. `why` is the task's side.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from kindler.engine.channel import Address, Channel, ChannelClosed, connect
from kindler.engine.gang import Gang
from kindler.engine.listener import Door, listen

_TURN_S = 0.5
_GREETING_S = 30.0
_EXPECTED = 256


class Failures:
    """What became of nodes that are gone.

    Args:
        gang: The nodes.

    Attributes:
        limit_s: How long it takes at most until the failure of a node has ended all of them.
    """

    def __init__(self, gang: Gang) -> None:
        settings = gang.job.settings
        self.limit_s = settings.heartbeat_timeout_s + 2 * settings.stop_timeout_s
        self._gang = gang
        self._changed = threading.Condition()
        self._returned: set[int] = set()

    def returned(self, rank: int) -> None:
        """The program of a node has returned."""
        with self._changed:
            self._returned.add(rank)
            self._changed.notify_all()

    def ended(self) -> None:
        """The gang has ended."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, rank: int) -> None:
        """Wait for what follows when a node is gone: the end of all, unless its program has returned."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._gang.is_running or rank in self._returned, timeout=self.limit_s
            )

    def cause(self, rank: int) -> str | None:
        """Why a node is gone: what the nodes failed with, or that its program has returned."""
        self.wait(rank)
        try:
            if not self._gang.is_running:
                self._gang.wait()
        except Exception as exc:  # noqa: BLE001 - told to the task
            return "".join(traceback.format_exception_only(exc)).strip()
        return (
            f"the program of node {rank} has returned: it takes no rows." if rank in self._returned else None
        )


class FailureServer:
    """Listens on the driver until it is closed.

    Args:
        hosts: The address to listen on, and the one that tasks reach it by.
        secret: What tasks prove themselves with.
        cause: Given a rank, waits until the cluster has failed, and says with what; None when it has not.
        ports: The ports that may be taken; None is any.
    """

    def __init__(
        self,
        hosts: tuple[str, str],
        secret: bytes,
        cause: Callable[[int], str | None],
        *,
        ports: tuple[int, int] | None = None,
    ) -> None:
        listener = listen(hosts[0], backlog=_EXPECTED, ports=ports)
        self.address: Address = (hosts[1], listener.getsockname()[1])
        self._cause = cause
        self._selector = selectors.DefaultSelector()
        self._door = Door(
            listener, secret, self._selector, self._let_in, expected=_EXPECTED, timeout_s=_GREETING_S
        )
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="kindler-failure-server", daemon=True).start()

    def close(self) -> None:
        """Answer no more tasks than those that have asked."""
        self._closed.set()

    def _listen(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(_TURN_S):
                key.data()
            self._door.expire(time.monotonic())
        self._door.close()
        self._selector.close()

    def _let_in(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        threading.Thread(
            target=self._answer, args=(Channel(sock),), name="kindler-failure-answer", daemon=True
        ).start()

    def _answer(self, channel: Channel) -> None:
        try:
            rank = int(channel.receive(_GREETING_S).fields["rank"])
            channel.send("because", cause=self._cause(rank))
        except (ChannelClosed, TimeoutError, KeyError, ValueError):
            pass  # the task went away
        finally:
            channel.close()


def why(server: Address, secret: bytes, rank: int, *, timeout_s: float) -> str | None:
    """What the cluster of a node failed with; None when it has not, or the driver is gone."""
    with suppress(ChannelClosed, TimeoutError):
        channel = connect(server, secret, timeout_s=_GREETING_S)
        try:
            channel.send("why", rank=rank)
            cause = channel.receive(timeout_s).fields["cause"]
            return None if cause is None else str(cause)
        finally:
            channel.close()
    return None
