"""Shards in files that outlive the process: pickles for any object, Parquet for DataFrames."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kindler.data.shards import frames
from kindler.data.shards.backend import ShardBackend
from kindler.data.shards.codec import Packed, from_table, unpack
from kindler.errors import ConfigError, DataError
from kindler.files import beside

_MANIFEST = "shards.json"
_FORMAT = 1


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
    import pyarrow.parquet as pq

    schema = held.schema()
    with _new_folder(Path(path), overwrite) as folder:
        for number, packed in enumerate(held.load(range(len(held.infos)))):
            table = frames.conform(frames.plain(packed), schema)
            pq.write_table(table, folder / _part(number, "parquet"))


def read_parquet(path: str | os.PathLike[str]) -> Iterator[Packed]:
    import pyarrow.parquet as pq

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
