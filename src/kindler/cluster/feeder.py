"""The sending end of a feed: how a Spark task, or a thread of the driver, pushes its rows to nodes.

A block goes to the node on the task's own machine that has had fewest rows and is not too far behind; without
one there, to the nearest others. Nothing passes through the driver.
"""

from __future__ import annotations

import ipaddress
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pyarrow as pa

from kindler import limits
from kindler.cluster.blocks import (
    DEFAULT_NAME,
    SPOOL,
    block_number,
    columns_of,
    encode_batches,
    encode_items,
    numbered,
    row_count,
    table_of,
)
from kindler.cluster.failures import why
from kindler.engine.feeds import Feeds, is_feed
from kindler.engine.placement import address_towards
from kindler.engine.wire import Address, Channel, connect
from kindler.errors import FeedError
from kindler.frame import ChannelClosed, Piece

WINDOW_BYTES = 8 << 20  # of unread rows, for each task and node


@dataclass(frozen=True, slots=True)
class NodeAddress:
    rank: int
    host: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"node {self.rank} on {self.host}"


class NodeGoneError(FeedError):
    """A node cannot be reached, went away, or has failed; only the driver knows why."""

    def __init__(self, message: str, *, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True, kw_only=True)
class Feeder:
    """What tasks push, and to whom. Built on the driver, pickled with the job.

    Rows are record batches, or any objects if `items`.
    """

    nodes: tuple[NodeAddress, ...]  # those that are fed
    secret: bytes  # what the tasks prove themselves with
    job: str  # a name for the job
    feed: str  # the feed's name
    kind: str  # TRAIN, INFER, or SPOOL, of which every node gets all rows
    items: bool = False
    pass_number: int | None = None  # which pass over the data it is; None for an inference
    fields: pa.Schema | None = None  # the columns of an inference's results
    flat: bool = False  # whether each row has a list of results
    columns: tuple[str, ...] | None = None  # the columns that are sent to nodes; None is all
    # Where tasks ask why a node is gone; None on the driver, which knows by itself.
    failures: Address | None = None
    failure_timeout_s: float = 0.0  # how long that may take

    def push(self, rows: Iterable[Any], *, partition: int, attempt: int = 0) -> int:
        """Returns how many rows were sent: those that earlier attempts brought are not sent again."""
        rows, schema = self._with_schema(rows)
        if schema is None and not self.items:
            return 0
        if self.items:
            blocks = numbered(encode_items(rows))
        else:
            blocks = numbered(encode_batches(map(self._chosen, rows), evenly=self.kind != SPOOL))
        before = self.blocks_before(partition, attempt) if attempt and self.kind != SPOOL else ()
        pushed = 0
        with self._naming_the_cause(), _Links(self, schema, partition, attempt) as links:
            for block in blocks:
                if block_number(block) in before:
                    continue
                if not links.put(block):
                    break
                pushed += row_count(block)
            links.finish()
        return pushed

    def infer(self, rows: Iterable[Any], *, partition: int, attempt: int = 0) -> Iterator[Any]:
        """Record batches with the columns of their results; of items, the results alone."""
        rows, schema = self._with_schema(rows)
        waiting: deque[pa.RecordBatch] = deque()

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in rows:
                if batch.num_rows:
                    waiting.append(batch)
                    yield self._chosen(batch)

        parts = encode_items(rows) if self.items else encode_batches(batches(), evenly=False)
        for results in self._answers(numbered(parts), schema, partition, attempt):
            if self.items:
                yield from results
            else:
                for chunk in results.chunks:
                    yield from self._joined(waiting, chunk)

    def blocks_before(self, partition: int, attempt: int) -> set[int]:
        numbers: set[int] = set()
        for node in self.nodes:
            channel = _connected(node, self.secret)
            try:
                channel.send("resume", feed=self.feed, job=self.job, partition=partition, attempt=attempt)
                numbers.update(channel.receive(limits.CONNECT_S).fields["numbers"])
            except (ChannelClosed, TimeoutError) as exc:
                raise NodeGoneError(f"{node} disconnected ({exc}).", rank=node.rank) from exc
            finally:
                channel.close()
        return numbers

    def _with_schema(self, rows: Iterable[Any]) -> tuple[Iterator[Any], pa.Schema | None]:
        rows = iter(rows)
        if self.items:
            return rows, None
        first = next((batch for batch in rows if batch.num_rows), None)
        if first is None:
            return iter(()), None
        return chain([first], rows), self._chosen(first).schema

    def _chosen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch if self.columns is None else batch.select(list(self.columns))

    def _answers(
        self,
        blocks: Iterator[tuple[Piece, Piece]],
        schema: pa.Schema | None,
        partition: int,
        attempt: int,
    ) -> Iterator[Any]:
        first = next(blocks, None)
        if first is None:
            return
        node = nearest(self.nodes, partition)[0][0]
        with self._naming_the_cause(), _Link(self, node, schema, partition, attempt) as link:
            for block in chain([first], blocks):
                while not link.has_room(block):
                    yield from link.answers(wait=True)
                link.put(block)
                yield from link.answers(wait=False)
            link.end()
            while link.answered < link.rows:
                yield from link.answers(wait=True)

    def _joined(self, waiting: deque[pa.RecordBatch], values: pa.Array) -> Iterator[pa.RecordBatch]:
        kind = values.type.value_type if self.flat else values.type
        fields = pa.schema([pa.field(DEFAULT_NAME, kind)]) if self.fields is None else self.fields
        while len(values):
            rows = waiting.popleft()
            if rows.num_rows > len(values):
                waiting.appendleft(rows.slice(len(values)))
                rows = rows.slice(0, len(values))
            arrays = columns_of(values.slice(0, rows.num_rows), list(fields), rows, flat=self.flat)
            yield pa.RecordBatch.from_arrays(arrays, [*rows.schema.names, *fields.names])
            values = values.slice(rows.num_rows)

    @contextmanager
    def _naming_the_cause(self) -> Iterator[None]:
        """Replace what a task sees of a node's end by its cause."""
        try:
            yield
        except NodeGoneError as exc:
            if self.failures is None:
                raise
            cause = why(self.failures, self.secret, exc.rank, timeout_s=self.failure_timeout_s)
            if cause is None:
                raise
            raise FeedError(cause) from None


def nearest(
    nodes: Sequence[NodeAddress], partition: int, *, host: str | None = None
) -> list[list[NodeAddress]]:
    """Group the nodes by distance: those of this machine first, then by similar addresses.

    Within a group the order depends on the partition, so that tasks do not all start with the same node.

    >>> nodes = [NodeAddress(0, "a", "10.0.0.1", 1), NodeAddress(1, "b", "10.0.0.2", 1)]
    >>> [[node.rank for node in group] for group in nearest(nodes, 0, host="b")]
    [[1], [0]]
    """
    here = host or socket.gethostname()
    groups: dict[int, list[NodeAddress]] = {}
    for node in nodes:
        far = 0 if node.host == here else 1 + _distance(node.address)
        groups.setdefault(far, []).append(node)
    ordered = [groups[far] for far in sorted(groups)]
    starts = [partition % len(group) for group in ordered]
    return [[*group[start:], *group[:start]] for group, start in zip(ordered, starts, strict=True)]


def _distance(address: str) -> int:
    """How many low bits of an address differ from this machine's."""
    try:
        theirs, mine = (ipaddress.ip_address(a) for a in (address, address_towards(address)))
    except ValueError:
        return 128
    if theirs.version != mine.version:
        return 128
    return (int(theirs) ^ int(mine)).bit_length()


def _connected(node: NodeAddress, secret: bytes) -> Channel:
    try:
        return connect((node.address, node.port), secret, timeout_s=limits.CONNECT_S)
    except ChannelClosed as exc:
        raise NodeGoneError(f"{node} cannot be reached: {exc}.", rank=node.rank) from exc


class _Link:
    def __init__(
        self,
        feeder: Feeder,
        node: NodeAddress,
        schema: pa.Schema | None,
        partition: int,
        attempt: int,
        changed: threading.Condition | None = None,
    ) -> None:
        self.stopped = False  # whether the node has said that it takes no more
        self.rows = 0  # how many rows it has got
        self.answered = 0  # and how many results have come back
        self._node = node
        self._items = schema is None
        self._error: FeedError | None = None  # why it takes no more, or is gone
        self._received = False  # whether it has got everything
        self._channel = _connected(node, feeder.secret)
        self._feeds = Feeds(f"node {node.rank}", self._channel.send, changed=changed)
        self._changed = self._feeds.changed
        try:
            self._channel.send(
                "open",
                b"" if schema is None else memoryview(schema.serialize()),
                b"" if feeder.fields is None else memoryview(feeder.fields.serialize()),
                feed=feeder.feed,
                job=feeder.job,
                work=feeder.kind,
                partition=partition,
                attempt=attempt,
                flat=feeder.flat,
                items=self._items,
                **{"pass": feeder.pass_number},
            )
            self._writer = self._feeds.writer("rows", WINDOW_BYTES)
        except ChannelClosed as exc:
            self._channel.close()
            raise NodeGoneError(f"{node} disconnected ({exc}).", rank=node.rank) from exc
        self._results = self._feeds.reader("results")
        self._thread = threading.Thread(target=self._listen, name="kindler-feeding", daemon=True)
        self._thread.start()

    def __enter__(self) -> _Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ahead(self) -> int:
        return self._writer.ahead

    def has_room(self, block: Sequence[Piece]) -> bool:
        return self._error is not None or self._writer.has_room(*block)

    def put(self, block: Sequence[Piece]) -> None:
        self._check()
        try:
            self._writer.put(*block)
        except (FeedError, ChannelClosed) as exc:
            self._thread.join(limits.WAKE_S)  # it may be reading the node's last words
            self._check()
            raise NodeGoneError(str(exc), rank=self._node.rank) from exc
        self.rows += row_count(block)

    def end(self) -> None:
        with suppress(ChannelClosed):  # `_check` says so
            self._writer.end()

    def finish(self) -> None:
        self.end()
        with self._changed:
            while not self._received and self._error is None:
                self._changed.wait(limits.WAKE_S)
        if not self._received and not self.stopped:
            self._check()

    def answers(self, *, wait: bool) -> Iterator[Any]:
        """Yield the results so far; with `wait`, wait for one or for room to send more rows."""
        with self._changed:
            while wait and not self._results.has_batch and self._error is None:
                if self._writer.ahead < WINDOW_BYTES // 2 and not self._writer.has_ended:
                    break
                self._changed.wait(limits.WAKE_S)
        while self._results.has_batch:
            buffers = self._results.get()
            assert buffers is not None
            if self._items:
                results = pickle.loads(buffers[0])
            else:
                results = pa.ipc.open_stream(pa.py_buffer(buffers[0])).read_all().column(0)
            self.answered += len(results)
            yield results
        if self.answered < self.rows:
            self._check()

    def close(self) -> None:
        self._channel.close()
        self._thread.join(limits.WAKE_S)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _listen(self) -> None:
        rank = self._node.rank
        try:
            while True:
                frame = self._channel.receive()
                if is_feed(frame.kind):
                    self._feeds.received(frame)
                    continue
                with self._changed:
                    self._received = self._received or frame.kind == "received"
                    if frame.kind == "stopped":
                        reason = f"{self._node} accepts no more rows: {frame.fields['reason']}"
                        failed = frame.fields["failed"]
                        self._error = NodeGoneError(reason, rank=rank) if failed else FeedError(reason)
                        self.stopped = True
                        self._feeds.close(frame.fields["reason"])
                    self._changed.notify_all()
        except ChannelClosed as exc:
            with self._changed:
                self._error = self._error or NodeGoneError(
                    f"{self._node} disconnected ({exc}).\nHint: it failed, or was stopped because another "
                    f"node "
                    "failed; the cluster's shutdown() says why.",
                    rank=rank,
                )
                self._feeds.close(str(exc))
                self._changed.notify_all()


class _Links:
    """Connections of one task to several nodes.

    Each block goes to the node with the fewest rows among those with room: nodes that train in step need
    equal shares, and a slow reader has no room. Of kind SPOOL, each goes to all of them.
    """

    def __init__(self, feeder: Feeder, schema: pa.Schema | None, partition: int, attempt: int) -> None:
        self._changed = threading.Condition()
        self._open: Callable[[NodeAddress], _Link] = lambda node: _Link(
            feeder, node, schema, partition, attempt, self._changed
        )
        self._nodes = feeder.nodes if feeder.kind == SPOOL else ()  # each of which gets everything
        self._groups = deque(nearest(feeder.nodes, partition))
        self._links: list[_Link] = []
        self._tried: list[list[NodeAddress]] = []
        self._unreached = ""
        self._deadline = time.monotonic() + limits.UNREACHED_S

    def __enter__(self) -> _Links:
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            link.close()

    def put(self, block: Sequence[Piece]) -> bool:
        """Returns whether any node takes rows."""
        if self._nodes:
            for node in self._nodes[len(self._links) :]:
                self._links.append(self._open(node))
            for link in self._links:
                link.put(block)
            return True
        while (free := self._free(block)) is not None:
            try:
                free.put(block)
                return True
            except FeedError:
                if not free.stopped:
                    raise
        return False

    def finish(self) -> None:
        for link in self._links:
            link.finish()

    def _free(self, block: Sequence[Piece]) -> _Link | None:
        while True:
            active = [link for link in self._links if not link.stopped]
            if not active:
                if not self._open_more():
                    return None
                continue
            with self._changed:
                ready = [link for link in active if link.has_room(block)]
                if ready:
                    return min(ready, key=lambda link: (link.rows, link.ahead))
                self._changed.wait(limits.WAKE_S)

    def _open_more(self) -> bool:
        """Connect to the next group of nodes; return whether there is one."""
        if not self._groups:
            if self._links:
                return False
            if time.monotonic() > self._deadline:
                raise NodeGoneError(
                    f"no node can be reached: {self._unreached}", rank=self._tried[-1][-1].rank
                )
            # Programs that have all returned: the driver is about to stop this job.
            time.sleep(limits.RETRY_NODES_S)
            self._groups.extend(self._tried)
            self._tried.clear()
            return True
        group = self._groups.popleft()
        self._tried.append(group)
        for node in group:
            try:
                self._links.append(self._open(node))
            except FeedError as exc:
                self._unreached = str(exc)
        return True


class FeedJob(threading.Thread):
    """Runs `work`, which feeds; `done` is called at its end, and `error` says how it failed."""

    def __init__(
        self, work: Callable[[], object], *, stop: Callable[[], None], done: Callable[[], None]
    ) -> None:
        super().__init__(name="kindler-feed-job", daemon=True)
        self.error: BaseException | None = None
        self.stop = stop
        self._work, self._done = work, done

    def run(self) -> None:
        try:
            self._work()
        except BaseException as exc:  # noqa: BLE001 - raised again on the thread that waits
            self.error = exc
        finally:
            self._done()


def push_local(data: Any, feeder: Feeder) -> None:
    table = table_of(data)
    if table is None:
        replace(feeder, items=True).push(data, partition=0)
    else:
        feeder.push(table.to_batches(), partition=0)


def answers_of(data: Any, feeder: Feeder) -> pa.Table | list[Any]:
    table = table_of(data)
    if table is None:
        return list(replace(feeder, items=True).infer(data, partition=0))
    step = max(1, -(-table.num_rows // len(feeder.nodes)))
    starts = range(0, table.num_rows, step)

    def answered(number: int) -> list[pa.RecordBatch]:
        part = table.slice(starts[number], step)
        return list(feeder.infer(part.to_batches(), partition=number))

    pool = ThreadPoolExecutor(max(1, len(starts)), "kindler-inference")
    try:
        tables = [pa.Table.from_batches(batches) for batches in pool.map(answered, range(len(starts)))]
    finally:
        pool.shutdown(wait=False)
    return pa.concat_tables(tables, promote_options="permissive") if tables else table
