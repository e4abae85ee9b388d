"""`hdfs_path`, and the feed of a node with TensorFlowOnSpark's names."""

from __future__ import annotations

import getpass
import logging
from collections.abc import Mapping
from typing import Any

from kindler.cluster.feed import DataFeed as ClusterFeed

__all__ = ["DataFeed", "hdfs_path"]

_SCHEMES = (
    *("abfs", "abfss", "adl", "dbfs", "file", "gs", "hdfs", "oss", "s3", "s3a", "s3n", "swift", "viewfs"),
    *("wasb", "wasbs"),
)
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


class DataFeed:
    """The feed of a node. Batches are lists of items, or dicts of lists with an input mapping.

    Attributes:
        done_feeding: Whether the end of the data was read.
    """

    def __init__(
        self, feed: ClusterFeed, train_mode: bool = True, input_mapping: Mapping[str, str] | None = None
    ) -> None:
        self.done_feeding = False
        self._feed = feed
        self._train_mode = train_mode
        self._tensors = [input_mapping[column] for column in sorted(input_mapping)] if input_mapping else None

    def next_batch(self, batch_size: int) -> Any:
        """The next rows; fewer at the end of the data, and for an inference at the end of a partition."""
        if self._feed.should_stop():
            self.done_feeding = True
            return [] if self._tensors is None else {name: [] for name in self._tensors}
        rows = self._feed.next_batch(batch_size)
        if self._tensors is None:
            return rows
        return {name: [row[place] for row in rows] for place, name in enumerate(self._tensors)}

    def should_stop(self) -> bool:
        """Whether there are no more rows."""
        self.done_feeding = self.done_feeding or self._feed.should_stop()
        return self.done_feeding

    def batch_results(self, results: Any) -> None:
        """One result for each row of the last batch."""
        self._feed.batch_results(results)

    def terminate(self) -> None:
        """Read no more; the feeding job stops."""
        self.done_feeding = True
        self._feed.terminate()
