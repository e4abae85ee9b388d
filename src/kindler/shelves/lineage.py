"""What made a stored model, as text for people, events of OpenLineage, and a model card in Markdown.

Records may come from anyone who can write to the store: all that is in them is shown as text.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import kindler
from kindler.store import Version

_ORDER = (
    *("began", "ended", "user", "start", "parent", "interrupted_after", "data", "validation", "rows"),
    *("fingerprint", "columns", "options", "seed", "strategy", "engine", "workers", "threads", "device"),
    *("framework", "config", "code", "packages", "machine", "metrics", "weights"),
)  # the catalog keeps names sorted
_PRODUCER = f"https://pypi.org/project/kindler/{kindler.__version__}"
_SPEC = "https://openlineage.io/spec"
_EVENT = f"{_SPEC}/2-0-2/OpenLineage.json#/$defs/RunEvent"
_FACETS = {
    "nominalTime": "1-0-1/NominalTimeRunFacet",
    "parent": "1-2-0/ParentRunFacet",
    "processing_engine": "1-1-1/ProcessingEngineRunFacet",
    "jobType": "2-0-4/JobTypeJobFacet",
    "version": "1-0-1/DatasetVersionDatasetFacet",
    "outputStatistics": "1-0-2/OutputStatisticsOutputDatasetFacet",
}
_MARKS = re.compile(r"([\\`*_{}\[\]<>#|~])")
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
            yield f"  {plain_text(name if place == 0 else ''):<12} {line}"


def _values(name: str, value: Any) -> Iterator[str]:
    """A value in one line, or in several."""
    if name == "weights" and isinstance(value, Mapping):
        yield f"{len(value)} arrays"
    elif name == "code" and isinstance(value, list):
        for entry in value:
            yield one_line(
                {key: part for key, part in entry.items() if key not in ("source", "sha256")}
                if isinstance(entry, Mapping)
                else entry
            )
    elif isinstance(value, Mapping) and isinstance(value.get("files"), list):
        files = value["files"]
        yield one_line({key: part for key, part in value.items() if key not in ("files", "paths", "plan")})
        yield from (one_line(file) for file in files[:_FILES_SHOWN])
        if len(files) > _FILES_SHOWN:
            yield f"... and {len(files) - _FILES_SHOWN:,} more"
    else:
        yield one_line(value)


def one_line(value: Any) -> str:
    """Any JSON value as one line of printable text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{plain_text(key)} {one_line(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(one_line(part) for part in value)
    return plain_text(value)


def plain_text(value: Any) -> str:
    text = "".join(c if c.isprintable() else " " for c in str(value))
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."


def openlineage(version: Version) -> list[dict[str, Any]]:
    """The fits that made a version as OpenLineage events, one START and one COMPLETE each."""
    known = fits(version)
    return [event for place in range(len(known)) for event in _events(version, known, place)]


def _events(version: Version, known: Sequence[Mapping[str, Any]], place: int) -> Iterator[dict[str, Any]]:
    fit, is_last = known[place], place == len(known) - 1
    ids = [str(uuid.uuid5(uuid.NAMESPACE_URL, f"{one_line(one)}")) for one in known]
    facets: dict[str, Any] = {
        "processing_engine": {
            "version": kindler.__version__,
            "name": "kindler",
            "openlineageAdapterVersion": kindler.__version__,
        },
        "nominalTime": {"nominalStartTime": fit.get("began"), "nominalEndTime": fit.get("ended")},
    }
    job: dict[str, Any] = {"namespace": "kindler", "name": f"{version.bucket}/{version.name}"}
    if place:
        facets["parent"] = {"run": {"runId": ids[place - 1]}, "job": dict(job)}
    inputs = [data for side in ("data", "validation") for data in _datasets(fit.get(side))]
    output = {
        "namespace": "kindler",
        "name": f"{version.bucket}/models/{version.name}",
        "facets": _made({"version": {"datasetVersion": str(version.number)}}),
        "outputFacets": _made({"outputStatistics": {"size": version.size, "fileCount": len(version.files)}}),
    }
    kind = {"jobType": {"processingType": "BATCH", "integration": "KINDLER", "jobType": "FIT"}}
    for state, time in (("START", "began"), ("COMPLETE", "ended")):
        yield {
            "eventType": state,
            "eventTime": fit.get(time),
            "run": {"runId": ids[place], "facets": _made(facets)},
            "job": {**job, "facets": _made(kind)},
            "inputs": inputs,
            "outputs": [output] if is_last and state == "COMPLETE" else [],
            "producer": _PRODUCER,
            "schemaURL": _EVENT,
        }


def _datasets(data: Any) -> Iterator[dict[str, Any]]:
    """The files of some data, with their hashes as versions; data without files has none."""
    for file in _entries(data, "files"):
        path = urlsplit(str(file.get("path")))
        remote = path.scheme not in ("", "file")
        yield {
            "namespace": f"{path.scheme}://{path.netloc}" if remote else "file",
            "name": path.path,
            "facets": _made({"version": {"datasetVersion": file["sha256"]}} if "sha256" in file else {}),
        }


def _entries(record: Any, name: str) -> list[Mapping[str, Any]]:
    listed = record.get(name) if isinstance(record, Mapping) else None
    return [entry for entry in listed or () if isinstance(entry, Mapping)]


def _made(facets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: {"_producer": _PRODUCER, "_schemaURL": _schema(name), **facet} for name, facet in facets.items()
    }


def _schema(facet: str) -> str:
    number, _, kind = _FACETS[facet].partition("/")
    return f"{_SPEC}/facets/{number}/{kind}.json#/$defs/{kind}"


def model_card(version: Version, tags: Sequence[str]) -> str:
    """A model card: what it is, what it was trained on and how, and how well it did."""
    known = fits(version)
    last = known[-1] if known else {}
    lines = [f"# {_text(version)}", ""]
    lines += _table({"Kind": version.kind, "Framework": last.get("framework"), "Tags": list(tags)})
    lines += _table({"Stored": f"{version.created:%Y-%m-%d %H:%M} UTC", "Digest": version.digest}, head=False)
    lines += _table(version.attributes, head=False)
    for place, fit in enumerate(known, start=1):
        lines += ["", f"## Training {place} of {len(known)}", ""]
        files = [file.get("path") for file in _entries(fit.get("data"), "files")][:_FILES_SHOWN]
        facts = {"By": fit.get("user"), "From": fit.get("began"), "To": fit.get("ended"), "Data": files}
        names = ("rows", "columns", "options", "strategy", "seed", "workers", "machine", "packages")
        lines += _table({**facts, **{name.capitalize(): fit.get(name) for name in names}})
        code = [f"{c.get('name')} {str(c.get('commit', ''))[:12]}" for c in _entries(fit, "code")]
        lines += _table({"Code": code}, head=False)
    metrics = last.get("metrics")
    lines += ["", "## Metrics", "", *_table(metrics if isinstance(metrics, Mapping) else {})]
    lines += ["", "## Intended use, limits and risks", "", "To be written by the people who know them."]
    return "\n".join(lines) + "\n"


def _table(facts: Mapping[str, Any], *, head: bool = True) -> list[str]:
    rows = [
        f"| {_text(name)} | {_text(value)} |" for name, value in facts.items() if value not in (None, [], "")
    ]
    return ["| | |", "|---|---|", *rows] if head else rows


def _text(value: Any) -> str:
    """Text that Markdown shows as it is."""
    return _MARKS.sub(r"\\\1", one_line(value))
