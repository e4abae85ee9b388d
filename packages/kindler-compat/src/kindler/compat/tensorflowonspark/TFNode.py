"""`hdfs_path`, and the feed of a node with TensorFlowOnSpark's names."""

from __future__ import annotations

import getpass
import logging
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import Thread
from typing import Any

from kindler.cluster.feed import DataFeed as ClusterFeed
from kindler.compat.tensorflowonspark.marker import Marker
from kindler.errors import ConfigError

__all__ = ["DataFeed", "NodeManager", "hdfs_path"]

_SCHEMES = (
    *("abfs", "abfss", "adl", "dbfs", "file", "gs", "hdfs", "oss", "s3", "s3a", "s3n", "swift", "viewfs"),
    *("wasb", "wasbs"),
)
_DRAIN_S = 0.5
_GLANCE_S = 0.1  # what a look at a feed takes that has a row
_log = logging.getLogger(__name__)


def hdfs_path(ctx: Any, path: str) -> str:
    """A path with a scheme as it is; otherwise on `ctx.defaultFS`, relative to the user's folder there."""
    if path.partition("://")[0] in _SCHEMES and "://" in path:
        return path
    if path.startswith("/"):
        return str(ctx.defaultFS) + path
    if str(ctx.defaultFS).startswith(("hdfs://", "viewfs://")):
        return f"{ctx.defaultFS}/user/{getpass.getuser()}/{path}"
    if str(ctx.defaultFS).startswith("file://"):
        return f"{ctx.defaultFS}/{ctx.working_dir[1:]}/{path}"
    _log.warning("unknown scheme %s with relative path: %s", ctx.defaultFS, path)
    return f"{ctx.defaultFS}/{path}"


class NodeManager:
    """What `ctx.mgr` is: the feeds of this node, and values of the program, with a manager's names."""

    def __init__(self, feed: Callable[[str], ClusterFeed]) -> None:
        self.feed = feed
        self._values: dict[str, Any] = {"state": "running"}
        self._queues: dict[str, _FeedQueue] = {}

    def get_queue(self, name: str) -> _FeedQueue:
        """A feed as a queue of rows, which ends with None."""
        return self._queues.setdefault(name, _FeedQueue(self.feed(name)))

    def get(self, key: str) -> Any:
        """What was set; None where nothing was."""
        return self._values.get(key)

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value


class _FeedQueue:
    """The reading end of a queue."""

    def __init__(self, feed: ClusterFeed) -> None:
        self._feed = feed
        self._coming: Future[Any] | None = None  # a row that somebody has waited for in vain

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next row, None at the end; `queue.Empty` if none came in time."""
        if self._coming is None and block and timeout is None:
            rows = self._feed.next_batch(1)
            return rows[0] if rows else None
        if self._coming is None:
            self._coming = Future()
            Thread(target=self._read, args=(self._coming,), daemon=True).start()
        coming, wait_s = self._coming, timeout if block else _GLANCE_S
        if not wait([coming], wait_s).done:  # the row stays the next one
            raise queue.Empty
        self._coming = None
        rows = coming.result()
        return rows[0] if rows else None

    def _read(self, coming: Future[Any]) -> None:
        try:
            coming.set_result(self._feed.next_batch(1))
        except BaseException as exc:  # noqa: BLE001 - raised where the row is asked for
            coming.set_exception(exc)

    def task_done(self) -> None:
        """Not needed."""


class DataFeed:
    """The feed of a node. Batches are lists of items, or dicts of lists with an input mapping.

    Args:
        mgr: `ctx.mgr`, or a manager that `TFManager.start` gave.
        train_mode: Whether nothing is answered: batches go over the ends of partitions then.
        qname_in, qname_out: The feed, or the queues of the manager for rows and results.
        input_mapping: Column -> tensor.
    """

    def __init__(
        self,
        mgr: Any,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self.done_feeding = False
        self.mgr = mgr
        self.train_mode = train_mode
        self.input_tensors = [name for _, name in sorted(input_mapping.items())] if input_mapping else None
        self._rows: _NodeRows | _QueuedRows = (
            _NodeRows(mgr.feed(qname_in))
            if isinstance(mgr, NodeManager)
            else _QueuedRows(mgr, qname_in, qname_out, train_mode)
        )

    def next_batch(self, batch_size: int) -> Any:
        """The next rows; fewer at the end of the data, and for an inference at the end of a partition."""
        rows = self._rows.take(batch_size)
        self.done_feeding = self.done_feeding or self._rows.ended
        if self.input_tensors is None:
            return rows
        return {name: [row[place] for row in rows] for place, name in enumerate(self.input_tensors)}

    def should_stop(self) -> bool:
        self.done_feeding = self.done_feeding or self._rows.has_ended()
        return self.done_feeding

    def batch_results(self, results: Any) -> None:
        """One result for each row of the last batch."""
        self._rows.answer(results)

    def terminate(self) -> None:
        """Read no more; the feeding job stops."""
        self.done_feeding = True
        self.mgr.set("state", "terminating")
        self._rows.stop()


class _NodeRows:
    """Rows that tasks push to a node of a cluster."""

    def __init__(self, feed: ClusterFeed) -> None:
        self.ended = False
        self._feed = feed

    def take(self, count: int) -> list[Any]:
        rows: list[Any] = self._feed.next_batch(count)
        self.ended = not rows
        return rows

    def has_ended(self) -> bool:
        self.ended = self.ended or self._feed.should_stop()
        return self.ended

    def answer(self, results: Any) -> None:
        self._feed.batch_results(results)

    def stop(self) -> None:
        self._feed.terminate()


class _QueuedRows:
    """Rows of a manager's queue: None ends them, EndPartition ends a batch that is to be answered."""

    def __init__(self, mgr: Any, qname_in: str, qname_out: str, train_mode: bool) -> None:
        self.ended = False
        self._in, self._out = mgr.get_queue(qname_in), mgr.get_queue(qname_out)
        if self._in is None:
            raise ConfigError(f"the manager has no queue {qname_in!r}.")
        self._train_mode = train_mode

    def take(self, count: int) -> list[Any]:
        rows: list[Any] = []
        while len(rows) < count and not self.ended:
            row = self._in.get()
            self._in.task_done()
            if row is None:
                self.ended = True
            elif not isinstance(row, Marker):
                rows.append(row)
            elif rows and not self._train_mode:
                break
        return rows

    def has_ended(self) -> bool:
        return self.ended

    def answer(self, results: Any) -> None:
        for result in results:
            self._out.put(result)

    def stop(self) -> None:
        self.ended = True
        with suppress(queue.Empty):
            while True:
                self._in.get(True, _DRAIN_S)
                self._in.task_done()


def _deprecated(*_: Any, **__: Any) -> Any:
    raise ConfigError("this is a method of TFNode.DataFeed.\nHint: feed = TFNode.DataFeed(ctx.mgr, ...).")


next_batch = batch_results = terminate = _deprecated
