"""What a program reads: rows that Spark jobs push to its node, in batches of the program's own size."""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kindler import limits
from kindler.cluster.blocks import INFER, Block
from kindler.cluster.feed_server import END, PASS_END, FeedServer, Inbound
from kindler.errors import ConfigError, DataError
from kindler.temporary import beside

if TYPE_CHECKING:
    import tensorflow as tf
    import torch

InputMapping = Mapping[str, str] | Sequence[str]
_Pieces = list[tuple[Block, int, int]]  # rows of a block, from one up to another

VALIDATION = "validation"
_SKIP_ROWS = 1 << 16


class DataFeed:
    """One feed of a node, from `ctx.data_feed()`.

        feed = ctx.data_feed(input_mapping={"pixels": "x", "digit": "y"})
        while not feed.should_stop():
            batch = feed.next_batch(100)
            model.train_on_batch(batch["x"], batch["y"])

    Only one thread at a time may read it.
    """

    def __init__(
        self,
        server: FeedServer,
        name: str = "input",
        *,
        input_mapping: InputMapping | None = None,
        in_step: bool = False,
    ) -> None:
        self.name = name
        self._server = server
        self._worker = server.worker
        self._inbox = server.inbox(name)
        self._mapping = _mapping(input_mapping)
        self._in_step = in_step
        self._lock = threading.RLock()
        self._block: Block | None = None
        self._offset = 0
        self._source: Inbound | None = None
        self._ended = False
        self._unanswered: deque[tuple[Inbound, int]] = deque()
        self._vote: bool | None = None
        self._current = -1
        self._restored = -1

    def next_batch(self, batch_size: int) -> Any:
        """Return the next `batch_size` rows, or fewer at the end of the data.

        In an inference, all rows of a batch belong to one partition, so the last batch of each may be short;
        answer each batch with `batch_results`.

        Returns:
            A list of rows (named tuples for frames and tables), or a dict of arrays with an input mapping.
            Empty only once `should_stop()` is true.
        """
        self._check_size(batch_size)
        with self._lock:
            go_on = self._may_read()
            self._vote = None
            return self._assembled(self._pieces(batch_size, within_pass=False) if go_on else [])

    def should_stop(self) -> bool:
        """Whether there are no more rows. Waits until one arrives or none will."""
        with self._lock:
            return not self._may_read()

    def batches(self, batch_size: int, *, drop_last: bool = False) -> Iterator[Any]:
        """Iterate over the batches of one pass: an epoch, or a micro-batch of a stream.

        The next call continues with the next pass.

        Args:
            batch_size: Rows per batch.
            drop_last: Whether to drop a last batch that is not full.
        """
        self._check_size(batch_size)
        while True:
            with self._lock:
                pieces = self._pieces(batch_size, within_pass=True)
                rows = _count(pieces)
                if not rows or (drop_last and rows < batch_size):
                    return
                batch = self._assembled(pieces)
                answers = self._source is not None and self._source.kind == INFER
            yield batch
            if rows < batch_size and not answers:
                return  # the pass has ended with it

    def remaining(self, batch_size: int, *, drop_last: bool = False) -> Iterator[Any]:
        """Iterate over the batches of the rest of the feed."""
        while not self.should_stop():
            batch = self.next_batch(batch_size)
            size = len(batch) if self._mapping is None else len(next(iter(batch.values())))
            if size == batch_size or not drop_last:
                yield batch

    def full_batches(self, batch_size: int) -> Iterator[Any]:
        """Iterate as `remaining` does, without a last batch that is not full."""
        return self.remaining(batch_size, drop_last=True)

    def micro_batches(self) -> Iterator[int]:
        """Iterate over the numbers of a stream's micro-batches; `batches` reads the rows of the current one.

        Micro-batches that `restore` found to be trained already are skipped. Call `commit` or `checkpoint`
        for each.
        """
        while (current := self._await_micro_batch()) is not None:
            number, micro_batch = current
            if micro_batch > self._restored:
                yield micro_batch
            self._skip_pass(number)  # what the program has left
            if micro_batch <= self._restored:
                self._worker.report("committed", feed=self.name, number=number)

    def commit(self) -> None:
        """Mark the current micro-batch as processed by this node; the stream waits for all nodes."""
        self._skip_pass(self._current)
        self._worker.report("committed", feed=self.name, number=self._current)

    def restore(self, folder: str) -> str | None:
        """Return the newest checkpoint that `checkpoint` wrote to `folder`, or None.

        Micro-batches up to that of the checkpoint are not delivered again.
        """
        checkpoints = _checkpoints(Path(folder))
        if not checkpoints:
            return None
        self._restored, path = checkpoints[-1]
        return str(path)

    @contextmanager
    def checkpoint(self, folder: str) -> Iterator[str]:
        """A folder to save the model in; the model and the current micro-batch are committed together.

        All nodes call it; only the first node's files are kept.
        """
        micro_batch = self._inbox.micro_batches[self._current]
        with _checkpoint_folder(folder, micro_batch, keep=self._worker.rank == 0) as path:
            yield path
        self.commit()

    @property
    def epoch(self) -> int:
        """The number of the current pass, from 0; for a stream, that of its micro-batch."""
        return self._inbox.pass_number

    def batch_results(self, results: Any) -> None:
        """Answer the oldest unanswered batch: one result per row, in order.

        Args:
            results: A list or an array; with `flat_map`, each entry is a list of results.

        Raises:
            DataError: The number of results is wrong, or they do not have the declared type.
        """
        with self._lock:
            if not self._unanswered:
                raise DataError(
                    "batch_results: no batch is waiting for results.\n"
                    "Hint: results are for inference(); rows of train() need none."
                )
            source, count = self._unanswered[0]
            received = len(results)
            if received != count:
                raise DataError(
                    f"batch_results: {received} results for a batch of {count} rows; every row needs one.\n"
                    "Hint: inference(data, flat_map=True) takes a list of results for each row, empty to drop"
                    " the row."
                )
            self._unanswered.popleft()
            more = any(other is source for other, _ in self._unanswered) or self._has_unread(source)
            source.answer(results, count, more=more)

    def terminate(self) -> None:
        """Stop reading; the job that feeds this node stops too."""
        self._server.terminate(self.name)  # wakes a thread that waits for rows, and has the lock
        with self._lock:
            self._ended = True
            self._block = None

    def as_tf_dataset(self, batch_size: int, *, drop_last: bool = False) -> tf.data.Dataset:
        """Return the rest of the feed as a `tf.data.Dataset` of batches; needs an input mapping."""
        import tensorflow as tf

        if self._mapping is None:
            raise ConfigError(
                "as_tf_dataset needs to know which columns become tensors.\n"
                'Hint: ctx.data_feed(input_mapping={"pixels": "x", "digit": "y"}).'
            )
        batches = self.remaining(batch_size, drop_last=drop_last)
        first = next(batches, None)  # a dataset must know shapes and dtypes
        if first is None:
            return tf.data.Dataset.from_tensors({"": np.empty(0)}).take(0)
        rows = batch_size if drop_last else None
        signature = {
            name: tf.TensorSpec((rows, *array.shape[1:]), tf.string if array.dtype == object else array.dtype)
            for name, array in first.items()
        }
        left = chain([first], batches)  # an iteration that is begun anew goes on: rows come once
        return tf.data.Dataset.from_generator(lambda: left, output_signature=signature).prefetch(2)

    def as_torch_iterable(
        self, batch_size: int, *, drop_last: bool = False
    ) -> torch.utils.data.IterableDataset[Any]:
        """Return the rest of the feed as an iterable dataset of batches.

        Pass it to a DataLoader with `batch_size=None`.
        """
        import torch

        def tensor(array: np.ndarray[Any, Any]) -> Any:
            if array.dtype == object:
                return array.tolist()
            return torch.from_numpy(array if array.flags.writeable else array.copy())

        class Batches(torch.utils.data.IterableDataset[Any]):
            def __iter__(_) -> Iterator[Any]:
                for batch in self.remaining(batch_size, drop_last=drop_last):
                    yield batch if self._mapping is None else {k: tensor(v) for k, v in batch.items()}

        return Batches()

    def check_answered(self) -> None:
        rows = sum(count for source, count in self._unanswered if not source.broken)
        if rows:
            raise DataError(
                f"the program returned without results for {rows} rows that it has read.\n"
                "Hint: call feed.batch_results(...) once for each batch."
            )

    def _may_read(self) -> bool:
        """With `in_step`, whether every node has a row; nodes must ask in the same order."""
        if not self._in_step:
            return self._has_rows(within_pass=False)
        if self._vote is None:
            votes = self._worker.total([int(self._has_rows(within_pass=False))])[0]
            self._vote = votes == self._worker.size
            if not self._vote:
                self.terminate()
        return self._vote

    def _await_micro_batch(self) -> tuple[int, int] | None:
        with self._inbox.changed:
            while self._inbox.pass_number not in self._inbox.micro_batches:
                if self._inbox.ended or self._inbox.closed:
                    return None
                self._inbox.wait()
            self._current = self._inbox.pass_number
            return self._current, self._inbox.micro_batches[self._current]

    def _skip_pass(self, number: int) -> None:
        while self._inbox.pass_number == number and not self._ended:
            with self._lock:
                self._pieces(_SKIP_ROWS, within_pass=True)

    def _check_size(self, batch_size: int) -> None:
        if not isinstance(batch_size, (int, np.integer)) or isinstance(batch_size, bool) or batch_size < 1:
            raise ConfigError(f"batch_size={batch_size!r}: it must be a whole number, 1 or more.")

    def _pieces(self, wanted: int, *, within_pass: bool) -> _Pieces:
        pieces: _Pieces = []
        source: Inbound | None = None
        while wanted and self._has_rows(within_pass=within_pass, only=source):
            assert self._block is not None
            stop = min(self._block.size, self._offset + wanted)
            pieces.append((self._block, self._offset, stop))
            wanted -= stop - self._offset
            self._offset = stop
            if self._source is not None and self._source.kind == INFER:
                source = self._source
        if source is not None:
            source.unanswered += _count(pieces)
            self._unanswered.append((source, _count(pieces)))
        return pieces

    def _has_rows(self, *, within_pass: bool, only: Inbound | None = None) -> bool:
        """Whether there is a row at the cursor; waits for one. False at an end, which is passed once."""
        while self._block is None or self._offset >= self._block.size:
            self._block = None
            if self._ended or not self._open_next(within_pass=within_pass, only=only):
                return False
        return True

    def _open_next(self, *, within_pass: bool, only: Inbound | None) -> bool:
        source = self._next(only)
        if isinstance(source, str):
            self._ended = self._ended or (source == END and only is None)
            return source == PASS_END and not within_pass
        self._source = source
        self._block, self._offset = source.block(), 0
        return True

    def _next(self, only: Inbound | None) -> Inbound | str:
        """The inbox's next source; raises if everybody waits for the program's own results."""
        since = time.monotonic()
        while True:
            with self._inbox.changed:
                source = self._inbox.ready(only)
                if source is not None:
                    return source
                self._inbox.wait()
            if not (self._unanswered and self._inbox.waits_for_results()):
                since = time.monotonic()
            elif time.monotonic() - since > limits.RESULTS_S:
                rows = sum(count for _, count in self._unanswered)
                raise DataError(
                    f"the program asks for more rows, but {rows} that it has read have no result, and no "
                    f"more "
                    "are sent until they do.\nHint: call feed.batch_results(...) once for each batch."
                )

    def _has_unread(self, source: Inbound) -> bool:
        here = self._source is source and self._block is not None and self._offset < self._block.size
        return here or source.reader.has_batch

    def _assembled(self, pieces: _Pieces) -> Any:
        if self._mapping is None:
            return [row for block, start, stop in pieces for row in block.rows(start, stop)]
        parts = [block.arrays(self._mapping, start, stop) for block, start, stop in pieces]
        if len(parts) == 1:
            return parts[0]
        names = self._mapping.values()
        return {
            name: np.concatenate([part[name] for part in parts]) if parts else np.empty(0) for name in names
        }


class KeptFeed(DataFeed):
    """A feed kept on the node's disk ("validation"), which can be read any number of times.

    `batches` starts over each time; `next_batch` and `should_stop` go through it once, and again after
    `rewind`.
    """

    _blocks: Iterator[Block] | None = None

    def rewind(self) -> None:
        """Start again with the first row."""
        with self._lock:
            self._blocks = self._block = None
            self._ended = False

    def batches(self, batch_size: int, *, drop_last: bool = False) -> Iterator[Any]:
        """Iterate over the batches of the whole feed, from its start."""
        self.rewind()
        return super().batches(batch_size, drop_last=drop_last)

    def _open_next(self, *, within_pass: bool, only: Inbound | None) -> bool:
        if self._blocks is None:
            self._blocks = self._inbox.kept()
        self._block, self._offset = next(self._blocks, None), 0
        self._ended = self._block is None
        return not self._ended


def _count(pieces: _Pieces) -> int:
    return sum(stop - start for _, start, stop in pieces)


def _mapping(columns: InputMapping | None) -> dict[str, str] | None:
    if columns is None:
        return None
    if isinstance(columns, str):
        raise ConfigError(
            f"input_mapping={columns!r}: must be a dict of columns and names, or a list of columns."
        )
    mapping = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    if not mapping or not all(isinstance(word, str) for pair in mapping.items() for word in pair):
        raise ConfigError(f"input_mapping={columns!r}: it must name at least one column, by strings.")
    if len(set(mapping.values())) < len(mapping):
        raise ConfigError(f"input_mapping={columns!r}: two columns have the same name in a batch.")
    return mapping


_CHECKPOINT = re.compile(r"micro-batch-(\d+)")
_KEPT_CHECKPOINTS = 2


@contextmanager
def _checkpoint_folder(folder: str, micro_batch: int, *, keep: bool) -> Iterator[str]:
    """A folder for a checkpoint, moved into place once the block succeeds.

    Its name has the micro-batch's number, so the model and the stream's position cannot disagree.
    """
    if not keep:
        with tempfile.TemporaryDirectory() as temporary:
            yield temporary
        return
    with beside(Path(folder) / f"micro-batch-{micro_batch:012d}", overwrite=True) as unfinished:
        unfinished.mkdir()
        yield str(unfinished)
    for _, path in _checkpoints(Path(folder))[:-_KEPT_CHECKPOINTS]:
        shutil.rmtree(path, ignore_errors=True)


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = ((_CHECKPOINT.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)
