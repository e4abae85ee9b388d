"""What feeding tasks send to a node, until the program reads it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa

from kindler.cluster.blocks import ARROW, Block, block_number, decode
from kindler.cluster.results import to_arrow
from kindler.cluster.spool import BlockFile
from kindler.data.arrow import stream
from kindler.engine.channel import Channel, ChannelClosed, Frame
from kindler.engine.feeds import Feeds
from kindler.errors import FeedError

__all__ = ["END", "INFER", "PASS_END", "SPOOL", "TRAIN", "Inbound", "Inbox"]

TRAIN, INFER, SPOOL = "train", "infer", "spool"
PASS_END, END = "the end of a pass over the data", "the end of the feed"
_LOOK_S = 1.0
_RESULT_ROWS = 1024


class Inbound:
    """One feeding task's connection.

    Attributes:
        kind: TRAIN, INFER, or SPOOL for rows that are kept on disk.
        pass_number: Which pass over the data it belongs to; None for an inference.
        partition: The job and the partition of the data that it reads.
        attempt: Spark may run a task again.
        superseded: Whether it has done so: this one's rows are no longer taken.
        broken: Whether the task went away before it had sent everything.
        numbers: The blocks that it has sent.
        unanswered: Of an inference: how many rows the program has read and not answered yet.
    """

    def __init__(self, channel: Channel, opened: Frame, changed: threading.Condition) -> None:
        fields = opened.fields
        self.kind: str = fields["work"]
        self.pass_number: int | None = fields["pass"]
        self.partition = (str(fields["job"]), int(fields["partition"]))
        self.attempt = int(fields["attempt"])
        self.superseded = False
        self.broken = False
        self.numbers: set[int] = set()
        self.unanswered = 0
        schema, declared = opened.buffers
        self.schema = pa.ipc.read_schema(pa.py_buffer(schema)) if fields["format"] == ARROW else None
        self._declared = list(pa.ipc.read_schema(pa.py_buffer(declared))) if declared else None
        self._flat = bool(fields["flat"])
        self._complete = False
        self._answers: list[Any] = []
        self._answered = 0
        self._channel = channel
        self._feeds = Feeds("a feeding task", self._send, changed=changed)
        self.reader = self._feeds.reader("rows")

    def heard(self, frame: Frame) -> None:
        """A frame of its feed came."""
        if frame.kind == "feed.data":
            if self.superseded:
                return
            self.numbers.add(block_number(frame.buffers))
        self._feeds.heard(frame)
        if frame.kind == "feed.end":
            self._complete = frame.fields["problem"] is None
            self._send("received")

    def block(self) -> Block | None:
        """The next block; None when there is none any more."""
        buffers = self.reader.get() if self.reader.has_batch else None
        return None if buffers is None else decode(buffers, self.schema)

    def answer(self, results: Any, count: int, *, more: bool) -> None:
        """Send results for `count` rows; they are put together while the program has more rows of this task.

        Raises:
            DataError: They are not what was declared.
        """
        if self.schema is None:
            self._answers.extend(results)
        else:
            self._answers.append(to_arrow(results, self._declared, flat=self._flat))
        self._answered += count
        self.unanswered -= count
        if more and self._answered < _RESULT_ROWS:
            return
        data = cloudpickle.dumps(self._answers) if self.schema is None else _streamed(self._answers)
        self._answers, self._answered = [], 0
        with suppress(FeedError):  # the task went away: Spark runs it again
            self._feeds.writer("results").put(data)

    def close(self, reason: str, *, failed: bool = False) -> None:
        """Take no more; the task is told why, and whether it is because the program failed."""
        self._send("stopped", reason=reason, failed=failed)
        self.reader.close(reason)

    def gone(self) -> None:
        """The connection is closed."""
        self.broken = not self._complete
        self._feeds.close(None)
        if self.broken and self.kind == INFER:
            self.reader.close()  # nobody waits for the answers

    def _send(self, kind: str, *buffers: Any, **fields: Any) -> None:
        with suppress(ChannelClosed):
            self._channel.send(kind, *buffers, **fields)


class Inbox:
    """What tasks send to one feed of this node.

    Args:
        name: The feed's name.
        changed: Held while anything here is looked at, and notified when something came.
        folder: Where rows are kept that are read several times.
        tick: Called about every second while the program waits.

    Attributes:
        closed: Whether the program wants no more.
        ended: Whether the driver has said that nothing more comes.
        pass_number: The pass over the data that is read now.
        finished: The passes of which everything has been sent.
        micro_batches: The number of a stream's micro-batch, by pass.
    """

    def __init__(self, name: str, changed: threading.Condition, folder: Path, tick: Any) -> None:
        self.name = name
        self.changed = changed
        self.closed = False
        self.ended = False
        self.pass_number = 0
        self.finished: set[int] = set()
        self.micro_batches: dict[int, int] = {}
        self._tick = tick
        self._spool = BlockFile(folder / f"feed-{name.replace('/', '_')}.blocks")
        self._schema: pa.Schema | None = None
        self._connections: deque[Inbound] = deque()
        self._fed: dict[tuple[str, int], set[int]] = {}  # blocks of attempts that are over, by partition
        self._attempts: dict[tuple[str, int], int] = {}  # the newest, of partitions whose task is run again

    def add(self, inbound: Inbound) -> None:
        """A task begins to feed."""
        if self.closed:
            inbound.close("the program wants no more")
            return
        if inbound.kind == SPOOL:
            self._schema = inbound.schema
        # The next attempt may have been faster.
        inbound.superseded = inbound.attempt < self._attempts.get(inbound.partition, 0)
        self._connections.append(inbound)

    def keep(self, inbound: Inbound) -> None:
        """Write to disk what a connection has sent."""
        while inbound.reader.has_batch:
            buffers = inbound.reader.get()
            assert buffers is not None
            with self.changed:  # other connections write to the same file
                self._spool.append(buffers)

    def kept(self) -> Iterator[Block]:
        """The blocks on disk; waits until all have come."""
        with self.changed:
            while not (self.finished or self.ended or self.closed):
                self.wait()
        for buffers in self._spool:
            yield decode(buffers, self._schema)

    def resume(self, partition: tuple[str, int], attempt: int) -> set[int]:
        """A task is run again: which blocks came from its earlier attempts, of which no more are taken."""
        self._attempts[partition] = max(attempt, self._attempts.get(partition, 0))
        numbers = set(self._fed.get(partition, ()))
        for inbound in self._connections:
            if inbound.partition == partition and inbound.attempt < attempt:
                inbound.superseded = True
                numbers |= inbound.numbers
        return numbers

    def ready(self) -> Inbound | str | None:
        """Who has the next block; PASS_END or END; None when nothing has come yet. `changed` is held."""
        if self.closed:
            return END
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

    def more_of(self, inbound: Inbound) -> bool:
        """Whether this task, which feeds an inference, has another block. Waits for it."""
        with self.changed:
            while not (inbound.reader.has_batch or inbound.reader.is_over or self.closed):
                self.wait()
            return inbound.reader.has_batch

    def waits_for_results(self) -> bool:
        """Whether all tasks have sent everything, and some have not got all their results."""
        with self.changed:
            open_ones = [c for c in self._connections if not c.reader.is_over or c.unanswered]
            return bool(open_ones) and all(c.reader.is_over and c.kind == INFER for c in open_ones)

    def wait(self) -> None:
        """Wait for something to change, for a second at most; `changed` is held."""
        self.changed.wait(_LOOK_S)
        self._tick()

    def close(self, reason: str, *, failed: bool = False) -> bool:
        """Take no more, from anybody; whether it was open."""
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


def _streamed(answers: list[pa.Array]) -> bytes:
    return stream(pa.table({"result": pa.chunked_array(answers)}))
