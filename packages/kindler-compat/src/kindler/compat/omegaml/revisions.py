"""omega|ml's revisions of a dataset: changes by index, each of which can be read again.

A revision is a version of the store that holds all rows as they were then. Revisions are counted from 0; -1
is the newest, and a date means the last one that was made until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, timezone
from typing import Any

import numpy as np

from kindler.errors import ConfigError, NotFoundError
from kindler.store import Version

MARK = "revisions"
_WHEN = "revision_dt"


def marked(attributes: Any, when: Any = None) -> dict[str, Any]:
    made = moment(when) if when is not None else datetime.now(timezone.utc)
    return {**(attributes or {}), MARK: True, _WHEN: made.isoformat()}


def changed(before: Any, changes: Any, *, delete: bool) -> Any:
    """The rows of a frame after changes by index: rows that are there are replaced, others are added.

    Columns that the changes do not have stay as they are, and new ones are empty in rows that do not change.
    Rows whose column `_delete_` is true are taken away, and all of these rows with `delete`.
    """
    import pandas as pd

    if not isinstance(changes, pd.DataFrame):
        raise ConfigError(f"revisions need pandas DataFrames; received a {type(changes).__name__}.")
    twice = changes.index[changes.index.duplicated()]
    if len(twice):
        raise ConfigError(f"rows are changed by their index, which has {twice[0]} twice.")
    gone = changes.index if delete else changes.index[:0]
    if not delete and "_delete_" in changes.columns:
        marks = changes["_delete_"].fillna(False).astype(bool)
        gone, changes = changes.index[marks], changes[~marks].drop(columns="_delete_")
    if before is None:
        return changes[:0] if delete else changes
    rest = before[~before.index.isin(gone)]
    if delete or not len(changes):
        return rest
    there = rest.index[rest.index.isin(changes.index)]
    # Column by column, so that each keeps its type where it can.
    updated = rest.loc[there].assign(**{str(name): changes.loc[there, name] for name in changes.columns})
    added = changes[~changes.index.isin(rest.index)]
    parts = [part for part in (rest[~rest.index.isin(there)], updated, added) if len(part)]
    return pd.concat(parts).loc[[*rest.index, *added.index]]


def picked(versions: Sequence[Version], wanted: Any, name: str) -> Version:
    if isinstance(wanted, str) and wanted.lstrip("-").isdigit():
        wanted = int(wanted)
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        if -len(versions) <= wanted < len(versions):
            return versions[wanted]
        available = [f"{name}@{i}" for i in range(len(versions))]
        raise NotFoundError(what="revision", name=f"{name}@{wanted}", available=available)
    until = moment(wanted)
    found = [version for version in versions if _made(version) <= until]
    if not found:
        raise NotFoundError(what="revision", name=f"{name}@{until.isoformat()}", available=[])
    return max(found, key=lambda version: (_made(version), version.number))


def moment(value: Any) -> datetime:
    """A date or time, of text or of a datetime; without a time zone it is UTC."""
    import pandas as pd

    try:
        found: datetime = pd.Timestamp(value).to_pydatetime()
        if pd.isna(found) or isinstance(value, int | float):
            raise ValueError("no date")
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"{value!r} is not a date, such as 2024-01-31 or 2024-01-31T12:00.") from exc
    return found.replace(tzinfo=timezone.utc) if found.tzinfo is None else found


def is_date(value: Any) -> bool:
    """Whether it is a date or a time, rather than the name or the number of a version."""
    return isinstance(value, date | np.datetime64)


def _made(version: Version) -> datetime:
    said = version.attributes.get(_WHEN)
    return version.created if said is None else moment(said)
