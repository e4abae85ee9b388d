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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import pyarrow as pa

from kindler import limits
from kindler.cluster.blocks import (
    ARROW,
    DEFAULT_NAME,
    PICKLE,
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
    """What tasks push, and to whom. Built on the driver, pickled with the job."""

    nodes: tuple[NodeAddress, ...]  # those that are fed
    secret: bytes  # what the tasks prove themselves with
    job: str  # a name for the job
    feed: str  # the feed's name
    kind: str  # TRAIN, INFER or SPOOL
    pass_number: int | None = None  # which pass over the data it is; None for an inference
    fields: pa.Schema | None = None  # the columns of an inference's results
    flat: bool = False  # whether each row has a list of results
    columns: tuple[str, ...] | None = None  # the columns that are sent to nodes; None is all
    copies: bool = False  # whether every node gets all rows, rather than its part
    # Where tasks ask why a node is gone; None on the driver, which knows by itself.
    failures: Address | None = None
    failure_timeout_s: float = 0.0  # how long that may take

    def push(self, batches: Iterable[pa.RecordBatch], *, partition: int, attempt: int = 0) -> int:
        batches = iter(batches)
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            return 0
        all_batches = map(self._chosen, chain([first], batches))
        schema = self._chosen(first).schema
        blocks = numbered(encode_batches(all_batches, evenly=not self.copies))
        return self._push(blocks, schema, partition, attempt)

    def push_items(self, items: Iterable[Any], *, partition: int, attempt: int = 0) -> int:
        return self._push(numbered(encode_items(iter(items))), None, partition, attempt)

    def infer(
        self, batches: Iterable[pa.RecordBatch], *, partition: int, attempt: int = 0
    ) -> Iterator[pa.RecordBatch]:
        batches = iter(batches)
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            return
        rejoin = _Rejoin(self.fields, self.flat)

        def blocks() -> Iterator[tuple[Piece, Piece]]:
            for batch in chain([first], batches):
                if batch.num_rows:
                    rejoin.sent(batch)
                    yield from numbered(encode_batches([self._chosen(batch)], evenly=False))

        schema = self._chosen(first).schema
        for data in self._answers(blocks(), schema, partition, attempt, lambda: rejoin.waits):
            yield from rejoin.joined(pa.ipc.open_stream(pa.py_buffer(data)).read_all().column(0))

    def infer_items(self, items: Iterable[Any], *, partition: int, attempt: int = 0) -> Iterator[Any]:
        parts = numbered(encode_items(iter(items)))
        first = next(parts, None)
        if first is None:
            return
        rows = {"sent": 0, "answered": 0}

        def blocks() -> Iterator[tuple[Piece, Piece]]:
            for block in chain([first], parts):
                rows["sent"] += row_count(block)
                yield block

        def waits() -> bool:
            return rows["answered"] < rows["sent"]

        for data in self._answers(blocks(), None, partition, attempt, waits):
            results = pickle.loads(data)
            rows["answered"] += len(results)
            yield from results

    def _answers(
        self,
        blocks: Iterator[tuple[Piece, Piece]],
        schema: pa.Schema | None,
        partition: int,
        attempt: int,
        waits: Callable[[], bool],
    ) -> Iterator[bytes]:
        node = nearest(self.nodes, partition)[0][0]
        with self._naming_the_cause(), _Link(self, node, schema, partition, attempt) as link:
            for block in blocks:
                while not link.has_room(block):
                    yield from link.answers(wait=True)
                link.put(block)
                yield from link.answers(wait=False)
            link.end()
            while waits():
                yield from link.answers(wait=True)

    def blocks_before(self, partition: int, attempt: int) -> set[int]:
        numbers: set[int] = set()
        for node in self.nodes:
            channel = _connected(node, self.secret)
            try:
                channel.send("resume", feed=self.feed, job=self.job, partition=partition, attempt=attempt)
                numbers.update(channel.receive(limits.CONNECT_S).fields["numbers"])
            except (ChannelClosed, TimeoutError) as exc:
                raise NodeGoneError(f"{node} went away ({exc}).", rank=node.rank) from exc
            finally:
                channel.close()
        return numbers

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

    def _push(
        self, blocks: Iterator[tuple[Piece, Piece]], schema: pa.Schema | None, partition: int, attempt: int
    ) -> int:
        with self._naming_the_cause():
            if self.copies:
                return self._push_copies(blocks, schema, partition, attempt)
            return self._push_shares(blocks, schema, partition, attempt)

    def _push_shares(
        self, blocks: Iterator[tuple[Piece, Piece]], schema: pa.Schema | None, partition: int, attempt: int
    ) -> int:
        before = self.blocks_before(partition, attempt) if attempt else ()
        pushed = 0
        with _Links(self, schema, partition, attempt) as links:
            for block in blocks:
                if block_number(block) in before:
                    continue
                if not links.put(block):
                    return pushed
                pushed += row_count(block)
            links.finish()
        return pushed

    def _push_copies(
        self, blocks: Iterator[tuple[Piece, Piece]], schema: pa.Schema | None, partition: int, attempt: int
    ) -> int:
        with ExitStack() as stack:
            links = [
                stack.enter_context(_Link(self, node, schema, partition, attempt)) for node in self.nodes
            ]
            rows = 0
            for block in blocks:
                rows += row_count(block)
                for link in links:
                    link.put(block)
            for link in links:
                link.finish()
        return rows

    def _chosen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch if self.columns is None else batch.select(list(self.columns))


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
        self.node = node
        self.stopped: str | None = None  # why the node takes no more, once it has said so
        self._failed = False
        self._lost: str | None = None
        self._received = False
        self.rows = 0  # how many rows it has got
        self._channel = _connected(node, feeder.secret)
        self._feeds = Feeds(f"node {node.rank}", self._channel.send, changed=changed)
        self.changed = self._feeds.changed
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
                format=PICKLE if schema is None else ARROW,
                **{"pass": feeder.pass_number},
            )
            self._writer = self._feeds.writer("rows", WINDOW_BYTES)
        except ChannelClosed as exc:
            self._channel.close()
            raise NodeGoneError(f"{node} went away ({exc}).", rank=node.rank) from exc
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
        return self.stopped is not None or self._lost is not None or self._writer.has_room(*block)

    def put(self, block: Sequence[Piece]) -> None:
        self.check()
        try:
            self._writer.put(*block)
        except (FeedError, ChannelClosed) as exc:
            self._thread.join(limits.WAKE_S)  # it may be reading the node's last words
            self.check()
            raise NodeGoneError(str(exc), rank=self.node.rank) from exc
        self.rows += row_count(block)

    def end(self) -> None:
        with suppress(ChannelClosed):  # `check` says so
            self._writer.end()

    def finish(self) -> None:
        self.end()
        with self.changed:
            while not (self._received or self.stopped is not None or self._lost is not None):
                self.changed.wait(limits.WAKE_S)
        if not self._received and self.stopped is None:
            self.check()

    def answers(self, *, wait: bool) -> Iterator[bytes]:
        """Yield the results so far; with `wait`, wait for one or for room to send more rows."""
        with self.changed:
            while wait and not self._results.has_batch and self.stopped is None and self._lost is None:
                if self._writer.ahead < WINDOW_BYTES // 2 and not self._writer.has_ended:
                    break
                self.changed.wait(limits.WAKE_S)
        while self._results.has_batch:
            buffers = self._results.get()
            assert buffers is not None
            yield buffers[0]
        if not self._results.has_batch:
            self.check()

    def check(self) -> None:
        if self.stopped is not None:
            message = f"{self.node} takes no more rows: {self.stopped}"
            raise NodeGoneError(message, rank=self.node.rank) if self._failed else FeedError(message)
        if self._lost is not None:
            raise NodeGoneError(
                f"{self.node} went away ({self._lost}).\n"
                "Hint: it failed, or was stopped because another one did; the cluster's shutdown() says why.",
                rank=self.node.rank,
            )

    def close(self) -> None:
        self._channel.close()
        self._thread.join(limits.WAKE_S)

    def _listen(self) -> None:
        try:
            while True:
                frame = self._channel.receive()
                if is_feed(frame.kind):
                    self._feeds.received(frame)
                    continue
                with self.changed:
                    if frame.kind == "received":
                        self._received = True
                    elif frame.kind == "stopped":
                        self._failed = bool(frame.fields["failed"])
                        self.stopped = str(frame.fields["reason"])
                        self._feeds.close(self.stopped)
                    self.changed.notify_all()
        except ChannelClosed as exc:
            with self.changed:
                self._lost = str(exc)
                self._feeds.close(self._lost)
                self.changed.notify_all()


class _Links:
    """Connections of one task to several nodes.

    Each block goes to the node with the fewest rows among those with room: nodes that train in step need
    equal shares, and a slow reader has no room.
    """

    def __init__(self, feeder: Feeder, schema: pa.Schema | None, partition: int, attempt: int) -> None:
        self._changed = threading.Condition()
        self._open: Callable[[NodeAddress], _Link] = lambda node: _Link(
            feeder, node, schema, partition, attempt, self._changed
        )
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
        while True:
            link = self._free(block)
            if link is None:
                return False
            try:
                link.put(block)
                return True
            except FeedError:
                if link.stopped is None:
                    raise

    def finish(self) -> None:
        for link in self._links:
            link.finish()

    def _free(self, block: Sequence[Piece]) -> _Link | None:
        while True:
            active = [link for link in self._links if link.stopped is None]
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
            time.sleep(
                limits.RETRY_NODES_S
            )  # programs that have all returned: the driver is about to stop this job
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


class _Rejoin:
    def __init__(self, fields: pa.Schema | None, flat: bool) -> None:
        self._fields = fields
        self._flat = flat
        self._rows: deque[pa.RecordBatch] = deque()

    @property
    def waits(self) -> bool:
        return bool(self._rows)

    def sent(self, batch: pa.RecordBatch) -> None:
        self._rows.append(batch)

    def joined(self, results: pa.ChunkedArray) -> Iterator[pa.RecordBatch]:
        for chunk in results.chunks:
            yield from self._chunk(chunk)

    def _chunk(self, values: pa.Array) -> Iterator[pa.RecordBatch]:
        done = 0
        while done < len(values):
            rows = self._rows[0]
            count = min(rows.num_rows, len(values) - done)
            yield self._batch(rows.slice(0, count), values.slice(done, count))
            done += count
            if count == rows.num_rows:
                self._rows.popleft()
            else:
                self._rows[0] = rows.slice(count)

    def _batch(self, rows: pa.RecordBatch, values: pa.Array) -> pa.RecordBatch:
        kind = values.type.value_type if self._flat else values.type
        fields = pa.schema([pa.field(DEFAULT_NAME, kind)]) if self._fields is None else self._fields
        arrays = columns_of(values, list(fields), rows, flat=self._flat)
        return pa.RecordBatch.from_arrays(arrays, [*rows.schema.names, *fields.names])


class FeedingJob(Protocol):
    error: BaseException | None

    def start(self) -> None: ...
    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...
    def stop(self) -> None: ...


class LocalJob(threading.Thread):
    def __init__(self, data: Any, feeder: Feeder, *, done: Callable[[], None]) -> None:
        super().__init__(name="kindler-feed-job", daemon=True)
        self.error: BaseException | None = None
        self._data, self._feeder, self._done = data, feeder, done

    def run(self) -> None:
        try:
            table = table_of(self._data)
            if table is None:
                self._feeder.push_items(self._data, partition=0)
            else:
                self._feeder.push(table.to_batches(), partition=0)
        except BaseException as exc:  # noqa: BLE001 - raised again on the thread that waits
            self.error = exc
        finally:
            self._done()

    def stop(self) -> None:
        """It stops by itself when no node takes rows any more."""


def answers_of(data: Any, feeder: Feeder) -> pa.Table | list[Any]:
    table = table_of(data)
    if table is None:
        return list(feeder.infer_items(data, partition=0))
    step = max(1, -(-table.num_rows // len(feeder.nodes)))
    parts = [table.slice(start, step) for start in range(0, table.num_rows, step)]
    answers: dict[int, list[pa.RecordBatch]] = {}
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            answers[number] = list(feeder.infer(parts[number].to_batches(), partition=number))
        except BaseException as exc:  # noqa: BLE001 - raised again below
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    tables = [pa.Table.from_batches(answers[n]) for n in range(len(parts)) if answers[n]]
    return pa.concat_tables(tables, promote_options="permissive") if tables else table
