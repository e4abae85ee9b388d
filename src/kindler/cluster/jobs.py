"""Feeding from the driver's own memory: the counterpart, without Spark, of a job whose tasks push rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

from kindler.cluster.feeder import Feeder
from kindler.cluster.tables import table_of


class FeedingJob(Protocol):
    """What pushes rows, on threads of its own."""

    error: BaseException | None

    def start(self) -> None: ...
    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...
    def stop(self) -> None: ...


class LocalJob(threading.Thread):
    """Pushes a table, or any sequence of objects, from this process.

    Args:
        data: The data.
        feeder: Whom to push to.
        done: Called at the end.
    """

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
    """Rows with the program's results, in their order; of a sequence of objects the results alone."""
    table = table_of(data)
    if table is None:
        return list(feeder.infer_items(data, partition=0))
    parts = _parts(table, len(feeder.nodes))
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


def _parts(table: pa.Table, count: int) -> Sequence[pa.Table]:
    return list(_cut(table, count))


def _cut(table: pa.Table, count: int) -> Iterator[pa.Table]:
    step = -(-table.num_rows // count)
    for start in range(0, table.num_rows, max(step, 1)):
        yield table.slice(start, step)
