"""CSV and JSON files as pandas DataFrames: pandas reads each file in a worker. Afterwards the frames get
one order of columns, and one dtype per column."""

from __future__ import annotations

import inspect
import lzma
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from kindler.data.paths import every_file, is_remote
from kindler.data.shards.codec import Info, Packed, from_table, pack, unpack
from kindler.errors import ConfigError, DataError, MissingExtraError, did_you_mean
from kindler.readers.files import Paths, find, listed, missing, on_engine, opened
from kindler.xshards import XShards, backends

_REFUSED = {
    "chunksize": "the shards are the chunks.\nHint: num_shards=... says how many.",
    "iterator": "iterate over the shards.\nHint: num_shards=... says how many.",
    "storage_options": "Arrow or fsspec open files.\nHint: put options into the URI or the environment.",
    "typ": "shards are DataFrames.\nHint: shards['column'] gives Series.",
}
_Reader = Literal["read_csv", "read_json"]
_SOURCES = ("filepath_or_buffer", "path_or_buf")
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zip": "zip", ".xz": "xz", ".zst": "zstd"}
# What pandas and the readers of compressed files raise for content that is not what it should be.
_PROBLEMS = (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


def read_csv(
    file_path: Paths, *, engine: str = "auto", num_shards: int | None = None, **pandas_options: Any
) -> XShards:
    """Read CSV files into shards of pandas DataFrames, one per file.

    Args:
        file_path: A file, a folder, a glob, a URI, or a list of them. Folders are read recursively,
            skipping names that start with "_" or ".".
        engine: "local", "spark", or "auto": Spark if a session is running, else local. Every worker must find
            the files under the same path.
        num_shards: The number of shards to distribute the rows over, evenly. Default: one per file.
        **pandas_options: Options of `pandas.read_csv`, which reads each file: `sep`, `header`, `names`,
            `usecols`, `dtype`, `index_col`, `parse_dates` and so on. `nrows` and `skiprows` count in each
            file.

    Returns:
        Shards in the order of the files, all with the columns of the first file that has any, and with the
        dtypes that `pandas.concat` would give. An empty file is a shard without rows.

    Raises:
        ConfigError: No file was found, or pandas has no such option.
        DataError: A file cannot be parsed, or its columns differ from the others'. The message names it.
    """
    return _read("read_csv", file_path, engine, num_shards, pandas_options)


def read_json(
    file_path: Paths, *, engine: str = "auto", num_shards: int | None = None, **pandas_options: Any
) -> XShards:
    """Read JSON files into shards of pandas DataFrames, one per file.

    Args:
        file_path: A file, a folder, a glob, a URI, or a list of them, as for `read_csv`.
        engine: "local", "spark", or "auto": Spark if a session is running, else local.
        num_shards: The number of shards to distribute the rows over, evenly. Default: one per file.
        **pandas_options: Options of `pandas.read_json`, which reads each file: `orient`, `lines`, `dtype`,
            `convert_dates` and so on. Files with one object per line need `lines=True`.

    Returns:
        Shards as those of `read_csv`.

    Raises:
        ConfigError: No file was found, or pandas has no such option.
        DataError: A file cannot be parsed, or its columns differ from the others'. The message names it.
    """
    return _read("read_json", file_path, engine, num_shards, pandas_options)


def _read(
    reader: _Reader, paths: Paths, engine: str, num_shards: int | None, options: Mapping[str, Any]
) -> XShards:
    _check(reader, options)
    if num_shards is not None and num_shards < 1:
        raise ConfigError(f"{reader}(num_shards={num_shards}): must be at least 1.")
    where = backends.choose(engine)
    what = {"read_csv": "CSV", "read_json": "JSON"}[reader]
    files: list[str] = on_engine(where, partial(find, listed(paths), every_file, what))
    parts = backends.put(map(pack, files), where).mapped(
        partial(_read_file, reader, dict(options)), by_user=True
    )
    frames = [_without_rows(info, file) for info, file in zip(parts.infos, files, strict=True)]
    dtypes = _alignment(frames, [info.rows for info in parts.infos], files)
    if dtypes is not None:
        parts = parts.mapped(partial(_aligned, dtypes), by_user=True)
    if num_shards is None:
        return XShards(parts)
    shards = XShards(parts).repartition(num_shards)
    if all(type(frame.index).__name__ == "RangeIndex" for frame in frames):
        # Rows of several files have an index that restarts in the middle.
        return shards.transform_shard(lambda frame: frame.reset_index(drop=True))
    return shards


def _check(reader: _Reader, options: Mapping[str, Any]) -> None:
    try:
        import pandas as pd
    except ModuleNotFoundError as exc:
        raise MissingExtraError(what=reader, package="pandas", extra="spark") from exc
    known = [name for name in inspect.signature(getattr(pd, reader)).parameters if name not in _SOURCES]
    for name in options:
        if name in _REFUSED:
            raise ConfigError(f"{reader}({name}=...): {_REFUSED[name]}")
        if name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(f"{reader}: pandas.{reader} has no option {name!r}.{near}")


def _read_file(reader: _Reader, options: Mapping[str, Any], number: int, packed: Packed) -> Packed:
    return pack(_frame(reader, unpack(packed), options))


def _frame(reader: _Reader, file: str, options: Mapping[str, Any]) -> Any:
    import pandas as pd

    read = getattr(pd, reader)
    try:
        with opened(file) as raw:
            if not raw.read(1):
                return pd.DataFrame()
            if is_remote(file):
                raw.seek(0)
                return read(raw, **{**options, "compression": _compression(file, options)})
        return read(file, **options)
    except DataError:
        raise
    except FileNotFoundError:
        raise missing(file) from None
    except pd.errors.EmptyDataError:  # lines that are all blank, or a compressed file of nothing
        return pd.DataFrame()
    except _PROBLEMS as exc:
        hint = "\nHint: an object in each line? lines=True." if "Trailing data" in str(exc) else ""
        raise DataError(f"{file}: {exc}{hint}") from exc


def _compression(file: str, options: Mapping[str, Any]) -> Any:
    """As pandas infers it from the name of a local file."""
    asked = options.get("compression", "infer")
    if asked != "infer":
        return asked
    return next((kind for ending, kind in _COMPRESSIONS.items() if file.lower().endswith(ending)), None)


def _aligned(dtypes: Mapping[Any, Any], number: int, packed: Packed) -> Packed:
    """Reorder and cast columns; a frame without columns, from an empty file, gets them."""
    import pandas as pd

    frame = unpack(packed)
    if not len(frame.columns):
        return pack(pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in dtypes.items()}))
    frame = frame[list(dtypes)]
    changed = {name: dtype for name, dtype in dtypes.items() if _plain(frame[name].dtype) != dtype}
    return pack(frame.astype(changed))


def _alignment(frames: Sequence[Any], rows: Sequence[int], files: Sequence[str]) -> dict[Any, Any] | None:
    """None if the frames are alike; dtypes are what `pandas.concat` would give, without empty frames."""
    with_columns = [i for i, frame in enumerate(frames) if len(frame.columns)]
    if not with_columns:
        others = f" and {len(files) - 1} other files" if len(files) > 1 else ""
        raise DataError(f"{files[0]}{others}: no columns, because there is no data.")
    first = with_columns[0]
    columns = tuple(frames[first].columns)
    for i in with_columns[1:]:
        _require_same(columns, tuple(frames[i].columns), files[first], files[i])
    filled = [i for i in with_columns if rows[i]] or with_columns
    dtypes = {name: _common([_plain(frames[i][name].dtype) for i in filled]) for name in columns}
    wanted = [(name, _plain(dtype)) for name, dtype in dtypes.items()]
    if all([(name, _plain(frame[name].dtype)) for name in frame.columns] == wanted for frame in frames):
        return None
    return dtypes


def _without_rows(info: Info, file: str) -> Any:
    if info.schema is None:
        raise DataError(
            f"{file}: its column names have several types.\n"
            "Hint: use names that are all strings, or all numbers."
        )
    return unpack(from_table(info.schema.empty_table()))


def _require_same(wanted: tuple[Any, ...], columns: tuple[Any, ...], first: str, file: str) -> None:
    if set(wanted) == set(columns):
        return
    lacks = [name for name in wanted if name not in columns]
    more = [name for name in columns if name not in wanted]
    differences = [f"{verb} {names}" for verb, names in (("lacks", lacks), ("also has", more)) if names]
    raise DataError(
        f"{file} {' and '.join(differences)}: {first} has the columns {list(wanted)}.\n"
        "Hint: usecols=[...] reads the columns that all files share; read other files separately."
    )


def _plain(dtype: Any) -> Any:
    """Categories differ between files; they are united when rows are joined."""
    return "category" if str(dtype) == "category" else dtype


def _common(dtypes: Sequence[Any]) -> Any:
    import pandas as pd

    distinct = list(dict.fromkeys(dtypes))
    if len(distinct) == 1:
        return distinct[0]
    # One value each, since pandas ignores empty series when it picks a dtype.
    one = [np.zeros(1, dtype) if isinstance(dtype, np.dtype) else [None] for dtype in distinct]
    series = [pd.Series(value, dtype=dtype) for value, dtype in zip(one, distinct, strict=True)]
    return pd.concat(series, ignore_index=True).dtype
