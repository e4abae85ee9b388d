"""Opening the store of a command, and printing versions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kindler.omega import Omega
    from kindler.store import Version

_UNITS = ("B", "kB", "MB", "GB", "TB")


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which store, and which bucket of it."""
    parser.add_argument(
        "--store",
        metavar="URL",
        help="URL of the store (default: KINDLER_STORE, or ~/.local/share/kindler/store)",
    )
    parser.add_argument(
        "--bucket", default="default", metavar="NAME", help="bucket of the store (default: %(default)s)"
    )


def opened(chosen: argparse.Namespace, *, make: bool = False) -> Omega:
    """The shelves of the bucket.

    Args:
        chosen: The parsed command line.
        make: Whether to create a missing store; otherwise a mistyped URL would become one.

    Raises:
        ConfigError: There is no store at the URL.
    """
    from kindler.errors import ConfigError
    from kindler.omega import Omega
    from kindler.store import Store

    if not make and not Store.is_there(chosen.store):
        shown = "the default location" if chosen.store is None else repr(chosen.store)
        raise ConfigError(f"there is no store at {shown}.\nHint: `kindler models put` creates one.")
    return Omega(chosen.store, bucket=chosen.bucket)


def as_json(versions: Sequence[Version], tags: Mapping[tuple[str, int], Sequence[str]]) -> str:
    """A list of objects, with sizes in bytes and times in full."""
    rows = [
        {
            "name": v.name,
            "version": v.number,
            "kind": v.kind,
            "size": v.size,
            "created": v.created.isoformat(),
            "tags": list(tags.get((v.name, v.number), ())),
            "attributes": dict(v.attributes),
        }
        for v in versions
    ]
    return json.dumps(rows, indent=2)


def as_table(versions: Sequence[Version], tags: Mapping[tuple[str, int], Sequence[str]]) -> str:
    """An aligned table with a heading line."""
    rows: list[tuple[str, ...]] = [("NAME", "VERSION", "KIND", "SIZE", "CREATED", "TAGS")]
    for v in versions:
        labels = " ".join(tags.get((v.name, v.number), ()))
        rows.append((v.name, str(v.number), v.kind, shown_size(v.size), _time(v.created), labels))
    return aligned(rows, right=(1, 3))


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns of equal width, two spaces apart; those in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def shown_size(size: int) -> str:
    """Bytes as people read them."""
    value: float = size
    for unit in _UNITS[:-1]:
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} {_UNITS[-1]}"


def _time(created: datetime) -> str:
    return f"{created.astimezone():%Y-%m-%d %H:%M}"
