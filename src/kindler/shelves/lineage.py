"""What made a stored model, for people. Records may come from anyone who can write to the store: whatever is
in them is shown as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kindler.store import Version

_ORDER = (
    *("began", "ended", "user", "start", "parent", "interrupted_after", "data", "validation", "rows"),
    *("fingerprint", "columns", "options", "seed", "strategy", "engine", "workers", "threads", "device"),
    *("framework", "config", "code", "packages", "machine", "metrics", "weights"),
)  # the catalog keeps names sorted
_FILES_SHOWN = 10
_CHARACTERS = 300


def fits(version: Version) -> list[Mapping[str, Any]]:
    """The records of the fits that made a version, oldest first."""
    kept = version.meta.get("lineage")
    return [fit for fit in kept if isinstance(fit, Mapping)] if isinstance(kept, list) else []


def shown(version: Version, tags: Sequence[str]) -> str:
    """A version and what made it, as lines of text."""
    head = {
        "kind": version.kind,
        "stored": f"{version.created:%Y-%m-%d %H:%M:%S} UTC",
        "bytes": version.size,
        "digest": version.digest,
        "tags": list(tags) or None,
        "attributes": version.attributes or None,
    }
    lines = [str(version), *_lines(head)]
    known = fits(version)
    for place, fit in enumerate(known, start=1):
        lines += ["", f"fit {place} of {len(known)}", *_lines(fit)]
    if not known:
        lines += ["", "It has no record of what made it: only estimators that were fitted have one."]
    elif version.meta.get("changed_since"):
        lines += ["", "Its weights were changed after the last fit, by other means."]
    return "\n".join(lines)


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(record, key=lambda name: _ORDER.index(name) if name in _ORDER else -1):
        value = record[name]
        if value is None or name == "format":
            continue
        for place, line in enumerate(_values(name, value)):
            yield f"  {_plain(name if place == 0 else ''):<12} {line}"


def _values(name: str, value: Any) -> Iterator[str]:
    """A value in one line, or in several."""
    if name == "weights" and isinstance(value, Mapping):
        yield f"{len(value)} arrays"
    elif name == "code" and isinstance(value, list):
        for entry in value:
            yield _one_line(
                {key: part for key, part in entry.items() if key not in ("source", "sha256")}
                if isinstance(entry, Mapping)
                else entry
            )
    elif isinstance(value, Mapping) and isinstance(value.get("files"), list):
        files = value["files"]
        yield _one_line({key: part for key, part in value.items() if key not in ("files", "paths", "plan")})
        yield from (_one_line(file) for file in files[:_FILES_SHOWN])
        if len(files) > _FILES_SHOWN:
            yield f"... and {len(files) - _FILES_SHOWN:,} more"
    else:
        yield _one_line(value)


def _one_line(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_plain(key)} {_one_line(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(_one_line(part) for part in value)
    return _plain(value)


def _plain(value: Any) -> str:
    text = "".join(c if c.isprintable() else " " for c in str(value))
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."
