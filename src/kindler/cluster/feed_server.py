"""Where feeding tasks deliver rows to a node, until its program reads them.

Each task connects to the node directly and sends "open" (what it feeds) or "resume" (which blocks arrived
from an earlier attempt?). Blocks then follow as in `engine.feeds`; the window slows down tasks whose program
reads slowly and bounds memory by the number of tasks.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa

from kindler import limits
from kindler.cluster.blocks import INFER, SPOOL, TRAIN, Block, block_number, decode, to_arrow
from kindler.data.arrow import stream
from kindler.engine.feeds import Feeds, is_feed
from kindler.engine.server import Handler, Peer, Server, listen_on
from kindler.engine.worker import Worker
from kindler.errors import FeedError, naming_full_disk
from kindler.frame import Frame

PASS_END, END = "the end of a pass over the data", "the end of the feed"
CONTROL = "kindler.cluster"  # the feed on which the driver speaks about feeds
_RESULT_ROWS = 1024
_EXPECTED = 256


class Inbound:
    def __init__(self, peer: Peer, inbox: Inbox, opened: Frame) -> None:
        fields = opened.fields
        self.inbox = inbox
        self.kind: str = fields["work"]  # TRAIN, INFER, or SPOOL for rows that are kept on disk
        # Which pass over the data it belongs to; None for an inference.
        self.pass_number: int | None = fields["pass"]
        # The job and the partition of the data that it reads.
        self.partition = (str(fields["job"]), int(fields["partition"]))
        self.attempt = int(fields["attempt"])  # spark may run a task again
        self.superseded = False  # whether it has done so: this one's rows are no longer taken
        self.broken = False  # whether the task went away before it had sent everything
        self.numbers: set[int] = set()  # the blocks that it has sent
        self.unanswered = 0  # of an inference: how many rows the program has read and not answered yet
        schema, declared = opened.buffers
        self.schema = None if fields["items"] else pa.ipc.read_schema(pa.py_buffer(schema))
        self._declared = list(pa.ipc.read_schema(pa.py_buffer(declared))) if declared else None
        self._flat = bool(fields["flat"])
        self._complete = False
        self._answers: list[Any] = []
        self._answered = 0
        self._peer = peer
        self._feeds = Feeds("a feeding task", peer.send, changed=inbox.changed)
        self.reader = self._feeds.reader("rows")

    def received(self, frame: Frame) -> None:
        if frame.kind == "feed.data":
            if self.superseded:
                return
            self.numbers.add(block_number(frame.buffers))
        self._feeds.received(frame)
        if frame.kind == "feed.end":
            self._complete = frame.fields["problem"] is None
            self._peer.send("received")

    def block(self) -> Block | None:
        buffers = self.reader.get() if self.reader.has_batch else None
        return None if buffers is None else decode(buffers, self.schema)

    def answer(self, results: Any, count: int, *, more: bool) -> None:
        """Send results for `count` rows; they are collected while the program has more rows of this task."""
        if self.schema is None:
            self._answers.extend(results)
        else:
            self._answers.append(to_arrow(results, self._declared, flat=self._flat))
        self._answered += count
        self.unanswered -= count
        if more and self._answered < _RESULT_ROWS:
            return
        if self.schema is None:
            data = cloudpickle.dumps(self._answers)
        else:
            data = stream(pa.table({"result": pa.chunked_array(self._answers)}))
        self._answers, self._answered = [], 0
        with suppress(FeedError):  # the task went away: Spark runs it again
            self._feeds.writer("results").put(data)

    def close(self, reason: str, *, failed: bool = False) -> None:
        """Take no more; tell the task why, and whether the program failed."""
        self._peer.send("stopped", reason=reason, failed=failed)
        self.reader.close(reason)

    def gone(self) -> None:
        self.broken = not self._complete
        self._feeds.close(None)
        if self.broken and self.kind == INFER:
            self.reader.close()  # nobody waits for the answers


class Inbox:
    def __init__(
        self, name: str, changed: threading.Condition, folder: Path, tick: Callable[[], None]
    ) -> None:
        self.name = name
        self.changed = changed  # held while anything here is looked at, and notified when something came
        self.closed = False  # whether the program needs no more data
        self.ended = False  # whether the driver has said that nothing more comes
        self.pass_number = 0  # the pass over the data that is read now
        self.finished: set[int] = set()  # the passes of which everything has been sent
        self.micro_batches: dict[int, int] = {}  # the number of a stream's micro-batch, by pass
        self._tick = tick
        self._spool = folder / f"feed-{name.replace('/', '_')}.blocks"
        self._schema: pa.Schema | None = None
        self._connections: deque[Inbound] = deque()
        self._fed: dict[tuple[str, int], set[int]] = {}  # blocks of attempts that are over, by partition
        self._attempts: dict[tuple[str, int], int] = {}  # the newest, of partitions whose task is run again

    def add(self, inbound: Inbound) -> None:
        if self.closed:
            inbound.close("the program needs no more data")
            return
        if inbound.kind == SPOOL:
            self._schema = inbound.schema
        # The next attempt may have been faster.
        inbound.superseded = inbound.attempt < self._attempts.get(inbound.partition, 0)
        self._connections.append(inbound)

    def keep(self, inbound: Inbound) -> None:
        while inbound.reader.has_batch:
            buffers = inbound.reader.get()
            with naming_full_disk(self._spool), self._spool.open("ab") as file:
                pickle.dump(buffers, file, protocol=5)

    def kept(self) -> Iterator[Block]:
        with self.changed:
            while not (self.finished or self.ended or self.closed):
                self.wait()
        if self._spool.exists():
            with self._spool.open("rb") as file, suppress(EOFError):
                while True:
                    yield decode(pickle.load(file), self._schema)

    def resume(self, partition: tuple[str, int], attempt: int) -> set[int]:
        """Supersede a task's earlier attempts; return the blocks that they brought."""
        self._attempts[partition] = max(attempt, self._attempts.get(partition, 0))
        numbers = set(self._fed.get(partition, ()))
        for inbound in self._connections:
            if inbound.partition == partition and inbound.attempt < attempt:
                inbound.superseded = True
                numbers |= inbound.numbers
        return numbers

    def ready(self, only: Inbound | None = None) -> Inbound | str | None:
        """Who has the next block, PASS_END, END, or None if nothing has come yet. Needs `changed` held.

        With `only`, END is that of this one.
        """
        if self.closed:
            return END
        if only is not None:
            return only if only.reader.has_batch else END if only.reader.is_over else None
        for _ in range(len(self._connections)):
            inbound = self._connections[0]
            self._connections.rotate(-1)
            if inbound.reader.has_batch and inbound.pass_number in (None, self.pass_number):
                return inbound
            if inbound.reader.is_over and (inbound.broken or not inbound.unanswered):
                self._forget(inbound)
        if self.pass_number in self.finished:
            self.pass_number += 1
            self._fed.clear()  # no task of it is run again
            self._attempts.clear()
            return PASS_END
        return END if self.ended and not self._connections else None

    def waits_for_results(self) -> bool:
        """Whether all tasks have sent everything, and some still wait for results."""
        with self.changed:
            open_ones = [c for c in self._connections if not c.reader.is_over or c.unanswered]
            return bool(open_ones) and all(c.reader.is_over and c.kind == INFER for c in open_ones)

    def wait(self) -> None:
        """Wait at most a second for a change. Needs `changed` held."""
        self.changed.wait(limits.WAKE_S)
        self._tick()

    def close(self, reason: str, *, failed: bool = False) -> bool:
        with self.changed:
            if self.closed:
                return False
            self.closed = True
            for inbound in self._connections:
                inbound.close(reason, failed=failed)
            self._connections.clear()
            self.changed.notify_all()
            return True

    def _forget(self, inbound: Inbound) -> None:
        self._connections.remove(inbound)
        if inbound.kind == TRAIN:
            self._fed.setdefault(inbound.partition, set()).update(inbound.numbers)


class FeedServer(Handler):
    def __init__(self, worker: Worker, port: int) -> None:
        self.worker = worker
        self._changed = threading.Condition()
        self._inboxes: dict[str, Inbox] = {}
        self._ended = False
        self._over: tuple[str, bool] | None = None
        address = worker.members[worker.rank].outside_address
        self._server = Server(
            listen_on(address, port, backlog=_EXPECTED),
            worker.secret,
            self,
            expected=_EXPECTED,
            name="kindler-feed-server",
            timeout_s=limits.TASK_GREETING_S,
            leaves_large=True,  # Arrow and pickle read bytearrays as they read bytes
        )
        self._server.start()
        threading.Thread(target=self._obey, name="kindler-feed-control", daemon=True).start()

    def inbox(self, name: str) -> Inbox:
        with self._changed:
            if name not in self._inboxes:
                inbox = Inbox(name, self._changed, self.worker.scratch, self.worker.tick)
                inbox.ended = self._ended
                self._inboxes[name] = inbox
            return self._inboxes[name]

    def terminate(self, name: str) -> None:
        if self.inbox(name).close("the program has terminated the feed"):
            self.worker.report("feed_closed", feed=name)

    def close(self, reason: str, *, failed: bool = False) -> None:
        with self._changed:
            self._over = (reason, failed)
            inboxes = list(self._inboxes.values())
        for inbox in inboxes:
            inbox.close(reason, failed=failed)
        self._server.drain(limits.SEND_S)  # results, which the process must not take with it

    def received(self, peer: Peer, frame: Frame) -> None:
        inbound: Inbound | None = peer.id
        if inbound is not None:
            if is_feed(frame.kind):
                inbound.received(frame)
            if inbound.kind == SPOOL:
                inbound.inbox.keep(inbound)
            return
        fields = frame.fields
        inbox = self.inbox(str(fields["feed"]))
        with self._changed:
            if frame.kind == "resume":
                partition = (str(fields["job"]), int(fields["partition"]))
                peer.send("blocks", numbers=sorted(inbox.resume(partition, int(fields["attempt"]))))
                return
            inbound = peer.id = Inbound(peer, inbox, frame)
            if self._over is not None:
                inbound.close(self._over[0], failed=self._over[1])
            else:
                inbox.add(inbound)

    def closed(self, peer: Peer, why: str) -> None:
        if peer.id is not None:
            with self._changed:
                peer.id.gone()
                self._changed.notify_all()

    def _obey(self) -> None:
        for words in self.worker.feed(CONTROL):
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
