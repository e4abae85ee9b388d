"""What a program knows of its node: `hdfs_path`, the feed, `TFNodeContext`, marks between rows."""

from __future__ import annotations

import getpass
import json
import logging
import os
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import Thread
from typing import Any

from kindler.cluster.context import Context
from kindler.cluster.feed import DataFeed as ClusterFeed
from kindler.errors import ConfigError

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


class Marker:
    """Stands between rows in a queue of `TFManager`; not a row."""


class EndPartition(Marker):
    """The rows of a partition end here."""


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
        return self._values.get(key)

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value


class _FeedQueue:
    def __init__(self, feed: ClusterFeed) -> None:
        self._feed = feed
        self._coming: Future[Any] | None = None  # a row that did not come in time

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
    """The feed of a node. Batches are lists of items, or dicts of lists with an input mapping."""

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
        own = isinstance(mgr, NodeManager)
        self._feed = mgr.feed(qname_in) if own else _QueueFeed(mgr, qname_in, qname_out, train_mode)

    def next_batch(self, batch_size: int) -> Any:
        """The next rows; fewer at the end of the data, and for an inference at the end of a partition."""
        rows = self._feed.next_batch(batch_size)
        self.done_feeding = self.done_feeding or not rows or getattr(self._feed, "ended", False)
        if self.input_tensors is None:
            return rows
        return {name: [row[place] for row in rows] for place, name in enumerate(self.input_tensors)}

    def should_stop(self) -> bool:
        self.done_feeding = self.done_feeding or self._feed.should_stop()
        return self.done_feeding

    def batch_results(self, results: Any) -> None:
        self._feed.batch_results(results)

    def terminate(self) -> None:
        self.done_feeding = True
        self.mgr.set("state", "terminating")
        self._feed.terminate()


class _QueueFeed:
    """Rows of a manager's queue: None ends them, EndPartition ends a batch that is to be answered."""

    def __init__(self, mgr: Any, qname_in: str, qname_out: str, train_mode: bool) -> None:
        self.ended = False
        self._in, self._out = mgr.get_queue(qname_in), mgr.get_queue(qname_out)
        if self._in is None:
            raise ConfigError(f"the manager has no queue {qname_in!r}.")
        self._train_mode = train_mode

    def next_batch(self, count: int) -> list[Any]:
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

    def should_stop(self) -> bool:
        return self.ended

    def batch_results(self, results: Any) -> None:
        for result in results:
            self._out.put(result)

    def terminate(self) -> None:
        self.ended = True
        with suppress(queue.Empty):
            while True:
                self._in.get(True, _DRAIN_S)
                self._in.task_done()


class TFNodeContext:
    """The `ctx` of `map_fun(args, ctx)`, with TensorFlowOnSpark's names."""

    def __init__(
        self,
        executor_id: int = 0,
        job_name: str = "",
        task_index: int = 0,
        cluster_spec: Mapping[str, list[str]] | None = None,
        defaultFS: str = "file://",
        working_dir: str = ".",
        mgr: Any = None,
        tmp_socket: Any = None,
        *,
        context: Context | None = None,
    ) -> None:
        self.worker_num = executor_id
        self.executor_id = executor_id
        self.job_name = job_name
        self.task_index = task_index
        self.cluster_spec = dict(cluster_spec or {})
        self.num_workers = sum(len(self.cluster_spec.get(role, ())) for role in ("master", "chief", "worker"))
        self.defaultFS = defaultFS
        self.working_dir = working_dir
        self.mgr = mgr
        self.tmp_socket = tmp_socket
        self._context = context

    @classmethod
    def of(cls, context: Context, *, hold_port: bool, master_node: str = "chief") -> TFNodeContext:
        """That of a node of a cluster, whose first node has the role `master_node`."""
        names = {"chief": master_node}
        if master_node != "chief" and "TF_CONFIG" in os.environ:
            os.environ["TF_CONFIG"] = os.environ["TF_CONFIG"].replace('"chief"', json.dumps(master_node))
        return cls(
            executor_id=context.rank,
            job_name=names.get(context.role, context.role),
            task_index=context.task_index,
            cluster_spec={names.get(role, role): nodes for role, nodes in context.cluster_spec.items()},
            defaultFS=context.default_fs,
            working_dir=os.getcwd(),
            mgr=NodeManager(context.data_feed),
            tmp_socket=_HeldPort(context) if hold_port else None,
            context=context,
        )

    def absolute_path(self, path: str) -> str:
        return hdfs_path(self, path)

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> DataFeed:
        """The rows that `TFCluster.train` and `inference` push to this node."""
        return DataFeed(self.mgr, train_mode, qname_in, qname_out, input_mapping)

    def export_saved_model(self, model: Any, export_dir: str, *_: Any, **__: Any) -> str:
        """Write a SavedModel, once for the whole cluster."""
        return self._running().export_saved_model(model, export_dir)

    def start_cluster_server(self, num_gpus: int = 1, rdma: bool = False) -> Any:
        """As in TensorFlowOnSpark with TensorFlow 2: it is not available."""
        raise ConfigError("start_cluster_server is for TensorFlow 1.\nHint: tf.distribute reads TF_CONFIG.")

    def release_port(self) -> None:
        if self.tmp_socket is not None:
            self.tmp_socket.close()
            self.tmp_socket = None

    def _running(self) -> Context:
        if self._context is None:
            raise ConfigError("this context does not belong to a running cluster.")
        return self._context


class _HeldPort:
    """The port that is held for a node, as the socket that TensorFlowOnSpark would have."""

    def __init__(self, context: Context) -> None:
        self._context = context
        address, _, port = context.cluster_spec[context.role][context.task_index].rpartition(":")
        self._name = (address.strip("[]"), int(port))

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def close(self) -> None:
        self._context.release_ports()


def _deprecated(*_: Any, **__: Any) -> Any:
    raise ConfigError("this is a method of TFNode.DataFeed.\nHint: feed = TFNode.DataFeed(ctx.mgr, ...).")


next_batch = batch_results = terminate = _deprecated
