"""omega|ml's revisions of a dataset: changes by index, each of which can be read again.

A revision is a version of the store that holds all rows as they were then. Revisions are counted from 0; -1
is the newest, and a date means the last one that was made until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from kindler.errors import ConfigError, NotFoundError
from kindler.store import Version

__all__ = ["MARK", "changed", "marked", "moment", "picked"]

MARK = "revisions"
_WHEN = "revision_dt"


def marked(attributes: Any, when: Any = None) -> dict[str, Any]:
    """The attributes of a revision."""
    made = moment(when) if when is not None else datetime.now(timezone.utc)
    return {**(attributes or {}), MARK: True, _WHEN: made.isoformat()}


def changed(before: Any, changes: Any, *, delete: bool) -> Any:
    """The rows of a frame after changes by index: rows that are there are replaced, others are added.

    Args:
        before: The frame.
        changes: A frame of the changes. Rows whose column `_delete_` is true are taken away.
        delete: Take all of these rows away.
    """
    import pandas as pd

    gone = changes.index
    if not delete:
        marks = changes["_delete_"].fillna(False).astype(bool) if "_delete_" in changes.columns else None
        gone = changes.index[:0] if marks is None else changes.index[marks]
        changes = changes.drop(columns="_delete_", errors="ignore")
        changes = changes if marks is None else changes[~marks]
    rest = before[~before.index.isin(gone)]
    if delete:
        return rest
    unknown = [name for name in changes.columns if name not in before.columns]
    if unknown:
        raise ConfigError(f"the changes have the columns {unknown}, which the dataset does not have.")
    updated = rest.copy()
    there = changes.index[changes.index.isin(updated.index)]
    if len(there):
        updated.loc[there, list(changes.columns)] = changes.loc[there]
    return pd.concat([updated, changes[~changes.index.isin(updated.index)]])


def picked(versions: Sequence[Version], wanted: Any, name: str) -> Version:
    """The revision that is meant.

    Args:
        versions: All revisions, oldest first.
        wanted: A number, or a date, or text that is one of them.
        name: The dataset.

    Raises:
        NotFoundError: There is no such revision.
    """
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
    """A date or time, of text or of a datetime; without a time zone it is UTC.

    Raises:
        ConfigError: It is neither.
    """
    try:
        found = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError as exc:
        raise ConfigError(f"{value!r} is not a date, such as 2024-01-31 or 2024-01-31T12:00.") from exc
    return found.replace(tzinfo=timezone.utc) if found.tzinfo is None else found


def _made(version: Version) -> datetime:
    said = version.attributes.get(_WHEN)
    return version.created if said is None else moment(said)
