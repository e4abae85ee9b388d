"""Scores Parquet files into a folder of Parquet files without Spark, part by part.

A part is a range of the input's rows that depends on the rows and the options alone. A worker computes it as
if there were no other, and writes it whole or not at all; so whoever scores the same again adds what is
missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq

from kindler.data import parquet
from kindler.data.paths import file_system
from kindler.data.rejoin import OutputJoiner
from kindler.engine.placement import TaskPlace, gpus_of_task
from kindler.errors import ConfigError
from kindler.files import folder_at, place
from kindler.group import Group
from kindler.inference.outputs import refuse_taken, to_columns
from kindler.inference.predictor import Predictor
from kindler.inference.row_errors import Failures

MANIFEST, DONE = "_manifest.json", "_SUCCESS"

_WRITE_ROWS = 1 << 16
_PART_BATCHES = 16  # as many are sorted by length together
_PART_BYTES = 64 << 20
_MOST_PARTS = 1024  # unless they would be too large
_FAILED = b"kindler.failed"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The ranges of rows that are written as a file each."""

    rows: int
    size: int

    @classmethod
    def of(cls, files: parquet.ParquetFiles, batch_size: int) -> Parts:
        batches = -(-files.rows // batch_size)
        # Small data makes parts enough for some workers, large data does not make too many files.
        wanted = max(min(batches // _PART_BATCHES, _PART_BATCHES), batches // _MOST_PARTS)
        fitting = _PART_BYTES * files.rows // max(files.nbytes, 1) // batch_size
        return cls(rows=files.rows, size=batch_size * max(1, min(wanted, fitting)))

    def __len__(self) -> int:
        return math.ceil(self.rows / self.size)

    def span(self, number: int) -> tuple[int, int]:
        return number * self.size, min((number + 1) * self.size, self.rows)

    @staticmethod
    def name(number: int) -> str:
        return f"part-{number:05d}.parquet"


class OutputFolder:
    """Where the parts are written. Its manifest says of which rows, by which model and how they are made."""

    def __init__(self, path: str | PathLike[str], parts: Parts) -> None:
        self.path = place(path)
        self._folder, self._parts = folder_at(self.path), parts

    def begin(self, manifest: Mapping[str, Any], *, overwrite: bool) -> list[int]:
        """The numbers of the parts that are missing."""
        names = self._folder.names()
        manifest = json.loads(json.dumps(manifest))
        if MANIFEST not in names:
            self._check_empty(names)
        elif overwrite:
            # A reader that sees the mark sees all; the manifest goes last, so that this can be done again.
            for name in sorted(names, key=lambda name: (name != DONE, name == MANIFEST)):
                if name in (DONE, MANIFEST) or self._number(name) is not None:
                    self._folder.remove(name)
            names = []
        else:
            self._check_same(json.loads(self._folder.read(MANIFEST)), manifest)
            return [number for number in range(len(self._parts)) if Parts.name(number) not in names]
        self._folder.write(MANIFEST, [json.dumps(manifest, indent=1).encode()])
        return list(range(len(self._parts)))

    def failures(self) -> Failures:
        """Of all parts that are there."""
        total = Failures()
        names = [name for name in self._folder.names() if self._number(name) is not None]
        for found in parquet.each_here(_failures_of, [self._folder.path(name) for name in names]):
            total = total.joined(found)
        return total

    def finish(self) -> None:
        self._folder.sweep()
        if DONE not in self._folder.names():
            self._folder.write(DONE, [b""])

    @staticmethod
    def _number(name: str) -> int | None:
        digits = name.removeprefix("part-").removesuffix(".parquet")
        return int(digits) if digits.isdecimal() and name == Parts.name(int(digits)) else None

    def _check_empty(self, names: Sequence[str]) -> None:
        local = Path(self.path)
        taken = [name for name in names if not name.startswith(".")]
        if "://" not in self.path and local.is_dir():
            taken = [entry.name for entry in local.iterdir() if not entry.name.startswith(".")]
        if taken or ("://" not in self.path and local.exists() and not local.is_dir()):
            raise ConfigError(
                f"output_path={self.path!r} exists already, and predict did not write it; it is not"
                " overwritten.\nHint: choose a new folder."
            )

    def _check_same(self, found: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        changed = list(_differences(found, manifest))
        if changed:
            raise ConfigError(
                f"output_path={self.path!r} exists already, and it differs:"
                f" {'; '.join(changed[:3])}.\n"
                "Hint: choose a new folder, or pass overwrite=True to begin anew."
            )


def _differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in sorted({*there, *here}):
            yield from _differences(there.get(key), here.get(key), f"{name}.{key}" if name else key)
    elif there != here:
        shown = [text if len(text) < 60 else f"{text[:57]}..." for text in map(json.dumps, (there, here))]
        yield f"{name} is {shown[0]} there and {shown[1]} now"


def input_record(files: parquet.ParquetFiles) -> dict[str, Any]:
    """The version of the rows: files with size, time and rows; those of a table never change."""
    records = []
    for number, file in enumerate(files.files):
        record: dict[str, Any] = {"path": file, "row_groups": list(files.row_groups[number])}
        if files.view(number) is None:
            system, path = file_system(file)
            info = system.get_file_info(path)
            record |= {"size": info.size, "modified_ns": info.mtime_ns}
        records.append(record)
    return {"rows": files.rows, "files": records}


def _failures_of(path: str) -> Failures:
    system, inside = file_system(path)
    stored = pq.read_metadata(inside, filesystem=system).metadata or {}
    return Failures(**json.loads(stored.get(_FAILED, b"{}")))


@dataclass(frozen=True, kw_only=True)
class FileTask:
    predictor: Predictor
    files: parquet.ParquetFiles
    parts: Parts
    missing: Sequence[int]
    folder: str


def run(worker: Group, task_bytes: bytes) -> Sequence[bytes]:
    task: FileTask = cloudpickle.loads(task_bytes)
    first, last = parquet.share(len(task.missing), worker.size, worker.rank)
    names = parquet.schema(task.files).names
    # By default every process would compute on all cores at once.
    predictor = task.predictor.with_threads(worker.threads)
    place = TaskPlace(worker.rank, tuple(gpus_of_task()))
    folder, done, failures = folder_at(task.folder), 0, Failures()
    for adjacent in _runs(task.missing[first:last]):
        start, stop = task.parts.span(adjacent[0])[0], task.parts.span(adjacent[-1])[1]
        with closing(parquet.scan(task.files, names, start, stop)) as batches:
            rows = _Rows(batches)
            for number in adjacent:
                begin, end = task.parts.span(number)
                predictor.failures = Failures()
                part = _scored(predictor, rows.take(end - begin), begin, names, place)
                folder.write(task.parts.name(number), [memoryview(part)])
                done, failures = done + end - begin, failures.joined(predictor.failures)
                worker.report("progress", step=done, failures=asdict(failures))
    return [json.dumps(asdict(failures)).encode()]


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Adjacent ones together, so that a file is read once."""
    placed = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    return [[number for _, number in pairs] for _, pairs in placed]


class _Rows:
    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    def take(self, count: int) -> Iterator[pa.RecordBatch]:
        while count:
            batch = next(self._batches) if self._rest is None else self._rest
            self._rest = batch.slice(count) if batch.num_rows > count else None
            batch = batch.slice(0, count)
            count -= batch.num_rows
            yield batch


def _scored(
    predictor: Predictor,
    batches: Iterator[pa.RecordBatch],
    first: int,
    names: Sequence[str],
    place: TaskPlace,
) -> pa.Buffer:
    """A whole file: parts are small, and a folder at a URL takes it in one piece."""
    rows = OutputJoiner(predictor.columns, first_row=first, lenient=predictor.lenient)
    scored = predictor.score(rows.features(batches), place)
    convert = partial(to_columns, predictor.added_types)
    joined = rows.joined(scored, names=_named(predictor, names), convert=convert)
    sink = pa.BufferOutputStream()
    writer: pq.ParquetWriter | None = None
    try:
        for table in _gathered(joined):
            writer = writer or pq.ParquetWriter(sink, table.schema)
            writer.write_table(table)
        if writer is not None and predictor.lenient:
            writer.add_key_value_metadata({_FAILED: json.dumps(asdict(predictor.failures))})
    finally:
        if writer is not None:
            writer.close()
    return sink.getvalue()


def _named(predictor: Predictor, taken: Sequence[str]) -> Callable[[int], Sequence[str]]:
    """Checked late: a model's own output names are known only once it has returned some."""

    def names(outputs: int) -> Sequence[str]:
        own = predictor.names(outputs)
        refuse_taken(own, taken)
        return own

    return names


def _gathered(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    pending: list[pa.Table] = []
    for table in tables:
        pending.append(table)
        if sum(t.num_rows for t in pending) >= _WRITE_ROWS:
            yield pa.concat_tables(pending)
            pending = []
    if pending:
        yield pa.concat_tables(pending)
