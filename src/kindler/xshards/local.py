"""The local home: shards are mapped files, and user functions run in worker processes. Kindler's own
operations run in this process, as Arrow on mapped tables. Only user code goes to workers, so that it
can neither break nor block this process."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa

from kindler.data.shards import frames, rows
from kindler.data.shards.backend import (
    Cut,
    Query,
    ShardFolder,
    Work,
    shard_error,
    shard_path,
    unsendable,
)
from kindler.data.shards.codec import Info, Packed, from_table, pack, read, unpack, write
from kindler.data.shards.pytree import even_bounds
from kindler.engine import local
from kindler.engine.fork_server import print_line
from kindler.engine.gang import Listener
from kindler.engine.hub import Event
from kindler.engine.job import Job, equal_ranks
from kindler.engine.worker import describe
from kindler.errors import ConfigError
from kindler.group import Group
from kindler.xshards.shared_value import session, shipping_to

_NEVER_S = 1e9  # how long a user's function may take is the user's business
_STOP = "stop"
_TARGET = "kindler.xshards.local:work_on_shards"


class LocalShards:
    """The `ShardBackend` of the local home."""

    home = "local"

    def __init__(self, folder: ShardFolder, infos: Iterable[Info]) -> None:
        self.folder, self._infos, self.is_kept = folder, tuple(infos), True

    @staticmethod
    def of(shards: Iterable[Packed]) -> LocalShards:
        folder = ShardFolder()
        infos = []
        try:
            for number, packed in enumerate(shards):
                write(packed, shard_path(folder.path, number))
                infos.append(packed.info)
                del packed  # before the next one is made
        except BaseException:
            folder.delete()
            raise
        pa.default_memory_pool().release_unused()  # Arrow would keep the size of a few shards
        return LocalShards(folder, infos)

    @property
    def infos(self) -> tuple[Info, ...]:
        return self._infos

    def load(self, numbers: Sequence[int]) -> Iterator[Packed]:
        for number in numbers:
            self.check()
            yield read(self._infos[number], shard_path(self.folder.path, number))

    def check(self) -> None:
        if not self.is_kept:
            raise ConfigError(
                "these shards were freed by uncache().\n"
                "Hint: keep what you need later, or create the collection again."
            )

    def worked(self, work: Work, job: Job, listener: Listener) -> LocalShards:
        return _in_workers(self, work, job, listener)

    def mapped(self, work: Work, *, by_user: bool = False) -> LocalShards:
        if by_user:
            return self.worked(work, _plain_job(), _print)
        return LocalShards.of(work(number, packed) for number, packed in self._all())

    def exchanged(self, cut: Cut, count: int) -> LocalShards:
        pieces: list[list[Packed]] = [[] for _ in range(count)]
        for number, packed in self._all():
            for target, piece in cut(number, packed):
                pieces[target].append(piece)
        return LocalShards.of(rows.joined(parts) for parts in pieces)

    def zipped(self, other: LocalShards) -> LocalShards:
        pairs = zip(self._all(), other._all(), strict=True)
        return LocalShards.of(pack((unpack(ours), unpack(theirs))) for (_, ours), (_, theirs) in pairs)

    def queried(self, operation: Query, *arguments: Any) -> LocalShards:
        tables = [value._table() if isinstance(value, LocalShards) else value for value in arguments]
        return self._again(getattr(frames, operation)(self._table(), *tables))

    def described(self, names: Sequence[str]) -> Any:
        return frames.described(self._table(), names)

    def schema(self) -> pa.Schema:
        return frames.schema_of(self.infos)

    def spark_frame(self) -> Any:
        from kindler.spark.shards import frame_of_table

        return frame_of_table(session(), self._table())

    def keep(self) -> None: ...

    def free(self) -> None:
        self.is_kept = False
        self.folder.delete()

    def _all(self) -> Iterator[tuple[int, Packed]]:
        return enumerate(self.load(range(len(self.infos))))

    def _table(self) -> pa.Table:
        return frames.whole([frames.plain(packed) for _, packed in self._all()])

    def _again(self, table: pa.Table) -> LocalShards:
        count = max(1, min(len(self.infos), table.num_rows))
        bounds = even_bounds(table.num_rows, count)
        return LocalShards.of(from_table(table.slice(start, stop - start)) for start, stop in bounds)


@dataclass(frozen=True, kw_only=True)
class _ShardTask:
    source: str
    target: str
    infos: tuple[bytes, ...]
    work: Work


def _in_workers(shards: LocalShards, work: Work, job: Job, listener: Listener) -> LocalShards:
    """Raises the first error of the user's code."""
    folder = ShardFolder()
    shards.check()
    task = _ShardTask(
        source=str(shards.folder.path),
        target=str(folder.path),
        infos=tuple(info.to_bytes() for info in shards.infos),
        work=work,
    )
    try:
        settings = replace(job.settings, stall_timeout_s=_NEVER_S)
        job = replace(
            job,
            ranks=equal_ranks(_TARGET, max(1, min(job.size, len(shards.infos)))),
            buffers=(_pickled(task),),
            settings=settings,
        )
        outcomes = local.run(job, listener=listener)
        reports = [json.loads(outcome.buffers[0]) for outcome in outcomes]
        failed = {said["shard"]: said["error"] for said in reports if said["error"] is not None}
        if failed:
            # Shards are taken in order, so the first of those that fail is always among them.
            raise shard_error(failed[min(failed)], min(failed))
        infos: dict[int, Info] = {}
        for said, outcome in zip(reports, outcomes, strict=True):
            infos |= dict(zip(said["done"], map(Info.from_bytes, outcome.buffers[1:]), strict=True))
    except BaseException:
        folder.delete()
        raise
    return LocalShards(folder, [infos[number] for number in range(len(shards.infos))])


def _pickled(task: _ShardTask) -> bytes:
    try:
        with shipping_to("local"):
            data: bytes = cloudpickle.dumps(task)
    except (TypeError, AttributeError, pickle.PicklingError) as exc:
        raise unsendable(exc) from exc
    return data


def _plain_job() -> Job:
    return Job(
        ranks=equal_ranks(_TARGET, local.slots()),
        preload=("kindler.xshards.local",),
    )


def _print(event: Event) -> None:
    if event.kind == "log":
        print_line(event.fields["line"])


def work_on_shards(worker: Group, task_bytes: bytes) -> list[bytes]:
    """Runs in each worker: take shards that nobody has taken, until none is left or one has failed."""
    task: _ShardTask = cloudpickle.loads(task_bytes)
    done: list[int] = []
    infos: list[bytes] = []
    for number, info in enumerate(task.infos):
        if (Path(task.target) / _STOP).exists() or not _claimed(task.target, number):
            continue
        try:
            made = task.work(number, read(Info.from_bytes(info), shard_path(task.source, number)))
            write(made, shard_path(task.target, number))
        except Exception as exc:  # noqa: BLE001 - the edge of the worker: raised again by the caller
            (Path(task.target) / _STOP).touch()
            said = {**describe(exc), "host": socket.gethostname()}
            return [json.dumps({"done": [], "error": said, "shard": number}, default=str).encode()]
        done.append(number)
        infos.append(made.info.to_bytes())
    return [json.dumps({"done": done, "error": None}).encode(), *infos]


def _claimed(folder: str, number: int) -> bool:
    try:
        os.close(os.open(Path(folder) / f"{number}.taken", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
