"""The local engine: shards are mapped files, and user functions run in worker processes. Kindler's own
operations run in this process, as Arrow on mapped tables. Only user code goes to workers, so that it
can neither break nor block this process. And files that outlive it: pickles and Parquet."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq

from kindler.data.shards import frames
from kindler.data.shards.backend import (
    Cut,
    Query,
    ShardBackend,
    ShardFolder,
    Work,
    shard_error,
    shard_path,
    unsendable,
)
from kindler.data.shards.codec import Info, Packed, from_table, joined, pack, read, unpack, write
from kindler.data.shards.pytree import even_bounds
from kindler.engine import local
from kindler.engine.fork_server import print_line
from kindler.engine.gang import Listener
from kindler.engine.hub import Event
from kindler.engine.job import Job, equal_ranks
from kindler.engine.worker import describe
from kindler.errors import ConfigError, DataError
from kindler.group import Group
from kindler.temporary import beside
from kindler.xshards.shared_value import session, shipping_to

_NEVER_S = 1e9  # how long a user's function may take is the user's business
_STOP = "stop"
_MANIFEST, _FORMAT = "shards.json", 1
_TARGET = "kindler.xshards.local:work_on_shards"


class LocalShards:
    """The `ShardBackend` of the local engine."""

    engine = "local"

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

    def mapped(self, work: Work, *, by_user: bool = False) -> LocalShards:
        if by_user:
            job = Job(ranks=equal_ranks(_TARGET, local.slots()), preload=("kindler.xshards.local",))
            return self.mapped_by(job, work, _print)
        return LocalShards.of(work(number, packed) for number, packed in self._all())

    def mapped_by(self, job: Job, work: Work, listener: Listener) -> LocalShards:
        """Lets the workers of `job` map the shards; raises the first error of the user's code."""
        self.check()
        folder = ShardFolder()
        done: dict[int, Info | dict[str, Any]] = {}
        infos: list[Info] = []
        try:
            job = replace(
                job,
                ranks=equal_ranks(_TARGET, max(1, min(job.size, len(self.infos)))),
                buffers=(_new_task(self, folder, work),),
                settings=replace(job.settings, stall_timeout_s=_NEVER_S),
            )
            for outcome in local.run(job, listener=listener):
                done |= pickle.loads(outcome.buffers[0])
            for number, made in sorted(done.items(), key=itemgetter(0)):
                if isinstance(made, dict):  # shards are taken in order: the first that fails is among them
                    raise shard_error(made, number)
                infos.append(made)
        except BaseException:
            folder.delete()
            raise
        return LocalShards(folder, infos)

    def exchanged(self, cut: Cut, count: int) -> LocalShards:
        pieces: list[list[Packed]] = [[] for _ in range(count)]
        for number, packed in self._all():
            for target, piece in cut(number, packed):
                pieces[target].append(piece)
        return LocalShards.of(joined(parts) for parts in pieces)

    def zipped(self, other: LocalShards) -> LocalShards:
        pairs = zip(self._all(), other._all(), strict=True)
        return LocalShards.of(pack((unpack(ours), unpack(theirs))) for (_, ours), (_, theirs) in pairs)

    def queried(self, operation: Query, *arguments: Any) -> LocalShards:
        tables = [value._table() if isinstance(value, LocalShards) else value for value in arguments]
        made: pa.Table = getattr(frames, operation)(self._table(), *tables)
        bounds = even_bounds(made.num_rows, max(1, min(len(self.infos), made.num_rows)))
        return LocalShards.of(from_table(made.slice(start, stop - start)) for start, stop in bounds)

    def described(self, names: Sequence[str]) -> Any:
        return frames.described(self._table(), names)

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


def _new_task(shards: LocalShards, folder: ShardFolder, work: Work) -> bytes:
    try:
        with shipping_to("local"):
            data: bytes = cloudpickle.dumps((shards.folder.path, folder.path, shards.infos, work))
    except (TypeError, AttributeError, pickle.PicklingError) as exc:
        raise unsendable(exc) from exc
    return data


def _print(event: Event) -> None:
    if event.kind == "log":
        print_line(event.fields["line"])


def work_on_shards(worker: Group, task: bytes) -> list[bytes]:
    """Runs in each worker: take shards that nobody has taken, until none is left or one has failed."""
    source, target, infos, work = cloudpickle.loads(task)
    done: dict[int, Info | dict[str, Any]] = {}
    for number, info in enumerate(infos):
        if (target / _STOP).exists() or not _claimed(target, number):
            continue
        try:
            made = work(number, read(info, shard_path(source, number)))
            write(made, shard_path(target, number))
        except Exception as exc:  # noqa: BLE001 - the edge of the worker: raised again by the caller
            (target / _STOP).touch()
            said = {**describe(exc), "host": socket.gethostname()}
            done[number] = json.loads(json.dumps(said, default=str))  # without objects of the user's code
            break
        done[number] = made.info
    return [pickle.dumps(done)]


def _claimed(folder: Path, number: int) -> bool:
    try:
        os.close(os.open(folder / f"{number}.taken", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def write_pickles(held: ShardBackend, path: str | os.PathLike[str], *, overwrite: bool) -> None:
    with _new_folder(Path(path), overwrite) as folder:
        for number in range(len(held.infos)):
            thing = unpack(next(iter(held.load([number]))))
            (folder / _part(number, "pickle")).write_bytes(pickle.dumps(thing, protocol=5))
        (folder / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "shards": len(held.infos)}))


def read_pickles(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Unpickling runs any code in the files: the caller has checked that they are trusted."""
    folder = Path(path)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except FileNotFoundError as exc:
        raise DataError(f"load_pickle: no saved shards in {folder}: {_MANIFEST} is missing.") from exc
    if manifest.get("format") != _FORMAT:
        raise DataError(f"load_pickle: {folder} has format {manifest.get('format')!r}; expected {_FORMAT}.")
    numbers = range(manifest["shards"])
    return (pickle.loads((folder / _part(number, "pickle")).read_bytes()) for number in numbers)


def write_parquet(held: ShardBackend, path: str | os.PathLike[str], *, overwrite: bool) -> None:
    schema = frames.schema_of(held.infos)
    with _new_folder(Path(path), overwrite) as folder:
        for number, packed in enumerate(held.load(range(len(held.infos)))):
            table = frames.conform(frames.plain(packed), schema)
            pq.write_table(table, folder / _part(number, "parquet"))


def read_parquet(path: str | os.PathLike[str]) -> Iterator[Packed]:
    folder = Path(path)
    files = sorted(folder.glob("*.parquet")) if folder.is_dir() else [folder]
    if not files:
        raise DataError(f"load_parquet: no Parquet files in {folder}.")
    # Without the file's own metadata, which could name cells to unpickle.
    tables = (pq.read_table(file).replace_schema_metadata(None) for file in files)
    return (from_table(frames.plain(from_table(table))) for table in tables)


def _part(number: int, ending: str) -> str:
    return f"part-{number:05d}.{ending}"


@contextmanager
def _new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} already exists.\nHint: overwrite=True replaces it.")
    with beside(path, overwrite=overwrite) as folder:
        folder.mkdir()
        yield folder
