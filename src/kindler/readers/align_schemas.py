"""Frames that were read one by one, made alike: one order of columns, one dtype a column.

Decides from what is known of shards without their values; `Align` then does it, where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kindler.data.shards.codec import Info, Packed, from_table, pack, unpack
from kindler.errors import DataError

_CATEGORY = "category"


@dataclass(frozen=True)
class Align:
    """Puts a frame's columns in order and gives them their dtypes; a frame without columns gets them."""

    columns: tuple[Any, ...]
    dtypes: tuple[Any, ...]

    def __call__(self, number: int, packed: Packed) -> Packed:
        import pandas as pd

        frame = unpack(packed)
        wanted = dict(zip(self.columns, self.dtypes, strict=True))
        if not len(frame.columns):
            return pack(pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in wanted.items()}))
        frame = frame[list(self.columns)]
        return pack(
            frame.astype(
                {name: dtype for name, dtype in wanted.items() if _plain(frame[name].dtype) != dtype}
            )
        )


def alignment(infos: Sequence[Info], files: Sequence[str]) -> Align | None:
    """What is to be done to frames so that they go together; None if they do already.

    Dtypes become what `pandas.concat` would make of them. Frames without rows have no say in that.

    Args:
        infos: What the frames are, one a file. A frame without columns stands for an empty file.
        files: Their names, for messages.

    Raises:
        DataError: Files with different columns, or only empty ones.
    """
    frames = [_without_rows(info, file) for info, file in zip(infos, files, strict=True)]
    with_columns = [i for i, frame in enumerate(frames) if len(frame.columns)]
    if not with_columns:
        raise DataError(f"{_named(files)}: no columns, because there is no data.")
    first = with_columns[0]
    columns = tuple(frames[first].columns)
    for i in with_columns[1:]:
        _require_same(columns, tuple(frames[i].columns), files[first], files[i])
    telling = [i for i in with_columns if infos[i].rows] or with_columns
    dtypes = tuple(_common([_plain(frames[i][name].dtype) for i in telling]) for name in columns)
    wanted = [(name, _plain(dtype)) for name, dtype in zip(columns, dtypes, strict=True)]
    if all([(name, _plain(frame[name].dtype)) for name in frame.columns] == wanted for frame in frames):
        return None
    return Align(columns, dtypes)


def is_counted(infos: Sequence[Info]) -> bool:
    """Whether the index of every frame only counts its rows."""
    import pandas as pd

    return all(isinstance(_without_rows(info, "").index, pd.RangeIndex) for info in infos)


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
    differences = [f"lacks {lacks}"] if lacks else []
    differences += [f"also has {more}"] if more else []
    raise DataError(
        f"{file} {' and '.join(differences)}: {first} has the columns {list(wanted)}.\n"
        "Hint: usecols=[...] reads the columns that all files share; read other files separately."
    )


def _plain(dtype: Any) -> Any:
    """A dtype to compare by; categories differ between files and are united when rows come together."""
    return _CATEGORY if str(dtype) == _CATEGORY else dtype


def _common(dtypes: Sequence[Any]) -> Any:
    """The dtype that values of these dtypes have together, as pandas sees it."""
    import pandas as pd

    distinct = list(dict.fromkeys(dtypes))
    if len(distinct) == 1:
        return distinct[0]
    return pd.concat([_one_value(dtype) for dtype in distinct], ignore_index=True).dtype


def _one_value(dtype: Any) -> Any:
    """A series of one value: empty ones would have no say in what pandas makes of them."""
    import numpy as np
    import pandas as pd

    values = np.zeros(1, dtype) if isinstance(dtype, np.dtype) else [None]
    return pd.Series(values, dtype=dtype)


def _named(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} other files"
