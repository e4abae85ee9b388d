"""Lets feeding tasks in: each connects to the node itself, and proves that it knows the run's secret.

A connection begins with "open" (what is fed) or "resume" (what came of an earlier attempt). Blocks then come
as `engine.feeds` has it, with a window that bounds what is unread: a program that reads slowly slows its
tasks down, and memory is bounded by how many of them feed at the same time.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from kindler.cluster.inbox import SPOOL, Inbound, Inbox
from kindler.engine.channel import Channel, ChannelClosed, Frame
from kindler.engine.feeds import is_feed
from kindler.engine.listener import Door
from kindler.engine.worker import Worker

CONTROL = "kindler.cluster"  # the feed on which the driver speaks about feeds
_TURN_S = 0.5
_GREETING_S = 30.0
_EXPECTED = 256
_LARGE_BYTES = 1 << 16


class _BlockChannel(Channel):
    """Leaves large buffers where they were received: copying them is a quarter of what reading blocks costs.

    Arrow and pickle read them as they read bytes.
    """

    def _read(self, size: int) -> bytes:
        data = self._fill(size)
        return bytes(data) if size < _LARGE_BYTES else cast(bytes, data)


class FeedServer:
    """The feeds of one node.

    Args:
        worker: The node.
        port: The port that is held for it.
    """

    def __init__(self, worker: Worker, port: int) -> None:
        self._worker = worker
        self._changed = threading.Condition()
        self._inboxes: dict[str, Inbox] = {}
        self._ended = False
        self._over: tuple[str, bool] | None = None
        address = worker.members[worker.rank].outside_address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=_EXPECTED)
        self._selector = selectors.DefaultSelector()
        self._door = Door(
            listener,
            worker.secret,
            self._selector,
            self._let_in,
            expected=_EXPECTED,
            timeout_s=_GREETING_S,
        )
        _start(self._listen, "kindler-feed-door")
        _start(self._obey, "kindler-feed-control")

    def inbox(self, name: str) -> Inbox:
        """The feed of that name, always the same."""
        with self._changed:
            if name not in self._inboxes:
                inbox = Inbox(name, self._changed, self._worker.scratch, self._worker.tick)
                inbox.ended = self._ended
                self._inboxes[name] = inbox
            return self._inboxes[name]

    def terminate(self, name: str) -> None:
        """The program wants no more of a feed: its tasks end, and the driver stops the job."""
        if self.inbox(name).close("the program has terminated the feed"):
            self._worker.report("feed_closed", feed=name)

    def committed(self, name: str, pass_number: int) -> None:
        """Tell the driver that a pass over the data need not be fed again."""
        self._worker.report("committed", feed=name, number=pass_number)

    @property
    def is_first(self) -> bool:
        """Whether this is the node that saves."""
        return self._worker.rank == 0

    def all_workers_have(self, rows: bool) -> bool:
        """Whether every node says yes; all nodes ask in the same order."""
        return self._worker.total([int(rows)])[0] == self._worker.size

    def close(self, reason: str, *, failed: bool = False) -> None:
        """The program has ended, well or badly: nobody reads any more."""
        with self._changed:
            self._over = (reason, failed)
            inboxes = list(self._inboxes.values())
        for inbox in inboxes:
            inbox.close(reason, failed=failed)

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select(_TURN_S):
                key.data()
            self._door.expire(time.monotonic())

    def _let_in(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        _start(lambda: self._serve(_BlockChannel(sock)), "kindler-feed")

    def _serve(self, channel: Channel) -> None:
        try:
            opened = channel.receive(_GREETING_S)
            inbox = self.inbox(str(opened.fields["feed"]))
            if opened.kind == "resume":
                self._tell_blocks(channel, inbox, opened.fields)
            else:
                self._receive(channel, inbox, opened)
        except (ChannelClosed, TimeoutError, KeyError, ValueError):
            pass  # the task went away
        finally:
            channel.close()

    def _tell_blocks(self, channel: Channel, inbox: Inbox, fields: dict[str, Any]) -> None:
        with self._changed:
            numbers = inbox.resume((str(fields["job"]), int(fields["partition"])), int(fields["attempt"]))
        channel.send("blocks", numbers=sorted(numbers))

    def _receive(self, channel: Channel, inbox: Inbox, opened: Frame) -> None:
        inbound = Inbound(channel, opened, self._changed)
        with self._changed:
            if self._over is not None:
                inbound.close(self._over[0], failed=self._over[1])
            else:
                inbox.add(inbound)
        try:
            while True:
                frame = channel.receive()
                if is_feed(frame.kind):
                    inbound.heard(frame)
                if inbound.kind == SPOOL:
                    inbox.keep(inbound)
        finally:
            with self._changed:
                inbound.gone()
                self._changed.notify_all()

    def _obey(self) -> None:
        for words in self._worker.feed(CONTROL):
            order = json.loads(words[0])
            with self._changed:
                if order["do"] == "end":
                    self._ended = True
                    for inbox in self._inboxes.values():
                        inbox.ended = True
                elif order["do"] == "begin":
                    self.inbox(order["feed"]).micro_batches[order["pass"]] = order["micro_batch"]
                else:
                    self.inbox(order["feed"]).finished.add(order["pass"])
                self._changed.notify_all()


def _start(run: Callable[[], None], name: str) -> None:
    threading.Thread(target=run, name=name, daemon=True).start()
