"""Some of the requests that models answer, as datasets of the store: off unless the settings say so.

The event loop draws a request, redacts it and copies what is left, in microseconds. A thread makes tables
of many requests, appends them to the dataset of their version, and removes what is too old or too much.
What cannot be kept is dropped and counted: no answer waits for the store, and none fails because of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kindler.data.statistics import as_predictions
from kindler.errors import ConfigError, DataError, NotFoundError
from kindler.models.signature import Array, Arrays, Signature
from kindler.serve.settings import EVERY_MODEL, ServeSettings
from kindler.serve.stats import shown_name
from kindler.shelves.datasets import Datasets
from kindler.shelves.tables import schema_of
from kindler.storage import Store
from kindler.store import OvertakenError, Version

FOLDER = "payloads"  # of the datasets' names
_OWN = {"_request_id", "_time", "_model", "_version", "_row"}  # columns beside those of the model
_ROWS, _BYTES, _OBJECTS = 1000, 1 << 20, 4096  # that are kept of one request
_OVERHEAD = 1000  # bytes of a request that is kept, beside its values
_MOST_WAITING = 32 << 20  # bytes, of all models together
_PARTS = 64  # files of a dataset, which then become one
_KEPT = 0.75  # of the most bytes, once there are more
_EXPIRE_S = 3600.0
_TRIES = 5
_TIME = pa.timestamp("ms", "UTC")
_T = TypeVar("_T")
_Columns: TypeAlias = dict[tuple[str, ...], Array]
_MARK, _OLDEST, _SIZE = "payloads_of", "oldest", "bytes"  # attributes of the datasets
_log = logging.getLogger("kindler.serve")


@dataclass(frozen=True, slots=True)
class _Request:
    """What is kept of one: rows at these places of it, by column, or by the columns of a matrix."""

    id: str
    time_ms: int
    places: Array
    columns: _Columns


class PayloadSample:
    """Draws requests of one version.

    Attributes:
        counts: Its rows by outcome; see `kindler_payload_rows`.
    """

    def __init__(
        self,
        version: Version,
        signature: Signature,
        settings: ServeSettings,
        counts: Counter[str],
        keep: Callable[[PayloadSample, _Request, int], bool],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.version, self.counts = version, counts
        self._columns = signature.columns or ()
        self._share = of_model(settings.log_payloads, version, 0.0)
        self._redacted = frozenset(of_model(settings.redact_columns, version, ()))
        self._keep, self._chance = keep, chance
        self._was_said = False
        if signature.outputs:  # else they are known with the first answer
            outputs = [spec.name for spec in signature.outputs]
            self._check({*signature.names, *self._columns, *outputs, *as_predictions(outputs)})

    def add(self, request_id: str, inputs: Arrays, outputs: Arrays, rows: int) -> None:
        """On the event loop."""
        if self._chance() >= self._share:
            return
        try:
            places, columns, size = _taken(self._redact(inputs, outputs), rows)
        except _DroppedError as dropped:
            self.counts[dropped.outcome] += rows
            return
        request = _Request(request_id, int(time.time() * 1000), places, columns)
        if not self._keep(self, request, size):
            self.counts["full"] += len(places)

    def _redact(self, inputs: Arrays, outputs: Arrays) -> _Columns:
        """The columns of a request without those that are redacted.

        Names are those of the model, whatever the request called them. A name to be redacted that is not
        among them could be in any column, so nothing of the request is kept.
        """
        hidden, columns = self._redacted, self._columns
        named = as_predictions(list(outputs.values()))
        names = [*inputs, *outputs, *named]
        kept: _Columns = {(name,): array for name, array in inputs.items() if name not in hidden}
        logged = [*inputs, *named]
        if columns and len(inputs) == 1 and inputs[names[0]].shape[1:] == (len(columns),):
            names, logged = [*names, *columns], [*columns, *named]
            places = [i for i, name in enumerate(columns) if name not in hidden]
            some: Any = places[0] if len(places) == 1 else places
            kept = {tuple(columns[i] for i in places): matrix[:, some] for matrix in kept.values()}
        for own, (name, array) in zip(outputs, named.items(), strict=True):
            if own not in hidden and name not in hidden:
                kept[name,] = array
        if not self._check({*names}) or len({*logged, *_OWN}) < len(logged) + len(_OWN):
            raise _DroppedError("columns")
        return kept

    def _check(self, names: set[str]) -> bool:
        """Whether all that is to be redacted is among the model's names."""
        missing = sorted(self._redacted - names)
        if missing and not self._was_said:
            self._was_said = True
            _log.warning(
                "payloads of %s are not logged: %s must be redacted, and the model has no such column; it"
                " has %s.\nHint: --redact-columns %s=... for columns of this model.",
                self.version,
                ", ".join(map(repr, missing)),
                ", ".join(map(repr, sorted(names)[:50])),
                shown_name(self.version),
            )
        return not missing


class PayloadLog:
    """What a server keeps of its requests, until it is in the store.

    Raises:
        ConfigError: A setting is for a model that is not in the store.
    """

    def __init__(
        self,
        storage: Store,
        settings: ServeSettings,
        threads: Executor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage, self._settings, self._threads, self._clock = storage, settings, threads, clock
        self._waiting: dict[PayloadSample, list[_Request]] = defaultdict(list)
        self._bytes = 0
        self._half_full = asyncio.Event()
        self._next_expiry, self._has_pruned = 0.0, False
        for name in sorted({*settings.log_payloads, *settings.redact_columns} - {EVERY_MODEL}):
            bucket, _, model = name.rpartition(":")
            if not storage[bucket or "default"].models.exists(model):
                raise ConfigError(
                    f"payloads: the store has no model {name!r}.\nHint: store it first; a model of another"
                    " bucket is BUCKET:NAME."
                )

    def sample(self, version: Version, signature: Signature, counts: Counter[str]) -> PayloadSample | None:
        """What draws the requests of a version; None if they are not logged."""
        if not of_model(self._settings.log_payloads, version, 0.0):
            return None
        return PayloadSample(version, signature, self._settings, counts, self._keep)

    async def run(self) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._half_full.wait(), self._settings.payload_s)
            await self.flush()

    async def flush(self) -> None:
        """Write what waits."""
        self._half_full.clear()
        waiting, self._waiting = self._waiting, defaultdict(list)
        size, loop = self._bytes, asyncio.get_running_loop()
        try:
            for sample, outcome, rows in await loop.run_in_executor(self._threads, self._write, waiting):
                sample.counts[outcome] += rows
        finally:
            self._bytes -= size

    async def close(self) -> None:
        """Write what waits, if the store lets us in time."""
        try:
            await asyncio.wait_for(self.flush(), max(1.0, self._settings.drain_s))
        except asyncio.TimeoutError:
            _log.warning("the last payloads were not written: the store did not answer in time")

    def _keep(self, sample: PayloadSample, request: _Request, size: int) -> bool:
        if self._bytes + size > _MOST_WAITING:
            return False
        self._bytes += size
        self._waiting[sample].append(request)
        if self._bytes > _MOST_WAITING // 2:
            self._half_full.set()
        return True

    def _write(
        self, waiting: Mapping[PayloadSample, Sequence[_Request]]
    ) -> list[tuple[PayloadSample, str, int]]:
        told = []
        for sample, requests in waiting.items():
            rows = sum(len(request.places) for request in requests)
            try:
                self._append(sample.version, _table(sample.version, requests))
            except Exception as exc:  # noqa: BLE001 - one model's rows must not lose those of the others
                _log.warning("%d rows of payloads of %s were not written: %s", rows, sample.version, exc)
                told.append((sample, "failed", rows))
            else:
                told.append((sample, "written", rows))
        if time.monotonic() >= self._next_expiry:
            self._next_expiry = time.monotonic() + _EXPIRE_S
            try:
                self._expire()
            except Exception as exc:  # noqa: BLE001 - it is tried again in an hour
                _log.warning("old payloads were not removed: %s", exc)
        return told

    def _append(self, version: Version, table: pa.Table) -> None:
        datasets, name = self._storage[version.bucket].datasets, dataset_name(version)
        for _ in range(_TRIES):
            try:
                latest = datasets.metadata(name) if datasets.exists(name) else None
                if latest is not None and latest.attributes.get(_MARK) != str(version):
                    raise ConfigError(f"the dataset {name!r} was not made by payload logging.")
                if not self._grown(datasets, version, latest, table) and latest is not None:
                    self._rewrite(datasets, latest, table)
                self._has_pruned |= bool(datasets.prune(name, keep=1))
                return
            except (OvertakenError, NotFoundError):
                pass  # another server was quicker
        raise ConfigError(f"too many servers write to {name!r} at once.")

    def _grown(self, datasets: Datasets, version: Version, latest: Version | None, table: pa.Table) -> bool:
        """Append, if there is room and the columns are as before."""
        size = 0 if latest is None else _int(latest.attributes.get(_SIZE), self._settings.payload_bytes)
        if latest is not None and (
            len(latest.files) >= _PARTS or size + table.nbytes > self._settings.payload_bytes
        ):
            return False
        about = self._about(str(version), table, size)
        if latest is not None:
            about[_OLDEST] = min(about[_OLDEST], _int(latest.attributes.get(_OLDEST), 0))
        try:
            datasets.put(table, dataset_name(version), mode="append", attributes=about)
        except DataError:  # other settings, or values of another type
            if latest is None:
                raise
            return False
        return True

    def _rewrite(self, datasets: Datasets, latest: Version, table: pa.Table | None = None) -> None:
        """Replace a dataset by its newest rows that may be kept, in one file, and by more."""
        schema = schema_of(latest.meta)
        names = schema.names if table is None else [n for n in schema.names if n in table.column_names]
        since = pc.field("_time") >= pa.scalar(self._cutoff_ms(), _TIME)
        kept = datasets.get(str(latest), as_="arrow", columns=names, filter=since)
        if table is not None:
            kept = _joined([kept, table])
        most = self._settings.payload_bytes
        if kept.nbytes > most:
            kept = kept.slice(kept.num_rows - int(kept.num_rows * most * _KEPT / kept.nbytes))
        about = self._about(latest.attributes[_MARK], kept)
        datasets._put(kept, latest.name, "replace", attributes=about, replaces=latest.number)

    def _about(self, mark: str, table: pa.Table, size: int = 0) -> dict[str, Any]:
        """The attributes of a dataset, `size` bytes of which were there before."""
        oldest = pc.min(table["_time"]).cast(pa.int64()).as_py()
        now = int(self._clock() * 1000)
        return {_MARK: mark, _OLDEST: now if oldest is None else oldest, _SIZE: size + table.nbytes}

    def _expire(self) -> None:
        """Remove rows that are too old, also of versions that nobody asks any more; and their bytes."""
        for bucket in self._storage.buckets:
            datasets = self._storage[bucket].datasets
            for latest in datasets.newest(f"{FOLDER}/**", kind="parquet"):
                known = latest.attributes
                if known.get(_MARK) and _int(known.get(_OLDEST), 0) < self._cutoff_ms():
                    with contextlib.suppress(OvertakenError, NotFoundError):  # rows have come
                        self._rewrite(datasets, latest)
                        self._has_pruned |= bool(datasets.prune(latest.name, keep=1))
        if self._has_pruned:
            self._has_pruned = False
            self._storage.sweep()

    def _cutoff_ms(self) -> int:
        return int((self._clock() - self._settings.payload_days * 86400) * 1000)


def dataset_name(version: Version) -> str:
    """The dataset of a version's payloads, in its bucket."""
    return f"{FOLDER}/{version.name}/{version.number}"


def of_model(setting: Mapping[str, _T], version: Version, otherwise: _T) -> _T:
    """What a setting says of a model, or else of every model."""
    return setting.get(shown_name(version), setting.get(EVERY_MODEL, otherwise))


class _DroppedError(Exception):
    def __init__(self, outcome: str) -> None:
        self.outcome = outcome


def _taken(columns: _Columns, rows: int) -> tuple[Array, _Columns, int]:
    """The places of the rows that are kept, copies of these, and their size."""
    if any(not array.ndim or len(array) != rows for array in columns.values()):
        raise _DroppedError("shape")
    count = min(rows, _ROWS)
    for objects, most in ((False, _BYTES), (True, _OBJECTS)):
        each = sum(
            a.size if objects else a.nbytes for a in columns.values() if (a.dtype.kind == "O") is objects
        )
        count = min(count, most * rows // each) if each else count
    if not count:
        raise _DroppedError("large")
    places = np.linspace(0, rows - 1, count).astype(np.int64)
    kept = {name: array[places] for name, array in columns.items()}
    return places, kept, _OVERHEAD + sum(array.nbytes for array in kept.values()) + _size_of_objects(kept)


def _size_of_objects(columns: _Columns) -> int:
    """Of values in lists too; a bounded number of them is looked at."""
    waiting: list[Any] = [array.tolist() for array in columns.values() if array.dtype.kind == "O"]
    size = looked_at = 0
    while waiting:
        value = waiting.pop()
        looked_at += 1
        if isinstance(value, list | tuple | dict):
            looked_at += len(value)
            if looked_at <= 2 * _OBJECTS:
                waiting.extend(value.values() if isinstance(value, dict) else value)
        else:
            size += 50 + (value.nbytes if isinstance(value, np.ndarray) else _length(value))
        if size > _BYTES or looked_at > 2 * _OBJECTS:
            raise _DroppedError("large")
    return size


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else 0


def _table(version: Version, requests: Sequence[_Request]) -> pa.Table:
    alike: dict[Any, list[_Request]] = defaultdict(list)
    for request in requests:
        alike[tuple((n, a.dtype.str, a.shape[1:]) for n, a in request.columns.items())].append(request)
    tables = []
    for some in alike.values():
        places = np.concatenate([request.places for request in some])
        rows = [len(request.places) for request in some]
        columns = {
            "_request_id": pa.array(np.repeat([request.id for request in some], rows), pa.string()),
            "_time": pa.array(np.repeat([request.time_ms for request in some], rows)).cast(_TIME),
            "_model": pa.repeat(version.name, len(places)),
            "_version": pa.repeat(pa.scalar(version.number, pa.int64()), len(places)),
            "_row": pa.array(places, pa.int32()),
        }
        for names in some[0].columns:
            values = np.concatenate([one.columns[names] for one in some])
            matrix = [values] if len(names) == 1 else values.T
            columns |= {name: _arrow(column) for name, column in zip(names, matrix, strict=True)}
        tables.append(pa.table(columns))
    return tables[0] if len(tables) == 1 else _joined(tables).sort_by("_time")


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    """One after the other; what has no type in common becomes text."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        alike = [
            pa.table(
                {n: t[n] if _has_type(tables, n) else _as_text(t[n].to_pylist()) for n in t.column_names}
            )
            for t in tables
        ]
        return pa.concat_tables(alike, promote_options="permissive")


def _has_type(tables: Sequence[pa.Table], name: str) -> bool:
    """Whether there is a type for the values of all."""
    schemas = [pa.schema([table.schema.field(name)]) for table in tables if name in table.column_names]
    try:
        pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return False
    return True


def _arrow(values: Array) -> pa.Array:
    flat = values.reshape(-1)
    made = _of_objects(flat.tolist()) if values.dtype.kind in "OUS" else pa.array(flat)
    for width in reversed(values.shape[1:]):
        made = pa.ListArray.from_arrays(np.arange(0, len(made) + 1, width or 1, dtype=np.int32), made)
    return made


def _of_objects(values: list[Any]) -> pa.Array:
    """Texts, bytes or numbers, and lists of such; what is mixed as text."""
    plain = [_plain(value) for value in values]
    try:
        return pa.array(plain)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return _as_text(plain)


def _as_text(values: list[Any]) -> pa.Array:
    texts = [value.decode("utf-8", "replace") if isinstance(value, bytes) else value for value in values]
    return pa.array([None if text is None else str(text) for text in texts], pa.string())


def _plain(value: Any) -> Any:
    """The value, or None for what has names inside, which nobody could have redacted."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return value if isinstance(value, bytes | int | float) else None


def _int(value: Any, otherwise: int) -> int:
    """A number of a dataset's attributes, which whoever can write there may have changed."""
    return value if type(value) is int else otherwise
