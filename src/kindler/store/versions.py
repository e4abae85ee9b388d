"""The catalog's record of one version: frozen values, and their JSON form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from kindler.errors import ConfigError
from kindler.html import card
from kindler.store.names import check_bucket, check_name, check_path


@dataclass(frozen=True, slots=True)
class Address:
    """A bucket, a shelf in it, and a name.

    Attributes:
        bucket: The bucket.
        shelf: "models", "datasets" or "scripts".
        name: The name.
    """

    bucket: str
    shelf: str
    name: str

    def __post_init__(self) -> None:
        check_bucket(self.bucket)
        check_name(self.name)


@dataclass(frozen=True, slots=True)
class File:
    """A file of a version.

    Attributes:
        path: Its relative path, with `/`.
        sha256: The hash of its content.
        size: Its size in bytes.
    """

    path: str
    sha256: str
    size: int

    def __post_init__(self) -> None:
        check_path(self.path)
        if len(self.sha256) != 64 or not set(self.sha256) <= set("0123456789abcdef"):
            raise ConfigError(f"{self.sha256!r} is not a SHA-256.")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a version as a row of the catalog stores it.

    A version that only adds to the one before it stores only the additions: a dataset with a thousand appends
    takes space for a thousand parts, not for half a million.

    Attributes:
        files: Its files; only the added ones, if it grows.
        meta: What its reader needs; of growing lists, only the added items.
        attributes: The user's attributes.
        since: The number of the version that the growing chain starts at; None if the row is complete.
        grown: Which lists of `meta` grow.
    """

    files: Sequence[File]
    meta: dict[str, Any]
    attributes: dict[str, Any]
    since: int | None = None
    grown: tuple[str, ...] = ()

    @staticmethod
    def read(text: str) -> Manifest:
        fields = json.loads(text)
        files = [File(*entry) for entry in fields["files"]]
        return Manifest(
            files, fields["meta"], fields["attributes"], fields.get("since"), tuple(fields.get("grown", ()))
        )

    def text(self) -> str:
        files = [[file.path, file.sha256, file.size] for file in self.files]
        fields = {"files": files, "meta": self.meta, "attributes": self.attributes}
        growing = {} if self.since is None else {"since": self.since, "grown": list(self.grown)}
        return as_json(fields | growing)

    def after(self, before: Manifest) -> Manifest:
        """This manifest joined to the one that it grows on; the lists of `before` may be reused."""
        if self.since is None:
            return self
        meta = dict(self.meta)
        for key in self.grown:
            whole = before.meta[key]
            whole.extend(meta[key])
            meta[key] = whole
        grown = tuple(key for key in self.grown if key in before.grown)
        return Manifest([*before.files, *self.files], meta, self.attributes, before.since, grown)


def growth(draft: Draft, before: Version, since: int) -> Manifest | None:
    """What a draft adds to a version; None if it lacks something of it."""
    had = set(before.files)
    if not had <= set(draft.files):
        return None
    meta, grown = dict(draft.meta), []
    for key, value in draft.meta.items():
        old = before.meta.get(key)
        if isinstance(value, list) and isinstance(old, list) and value[: len(old)] == old:
            meta[key] = value[len(old) :]
            grown.append(key)
    added = [file for file in draft.files if file not in had]
    return Manifest(added, meta, dict(draft.attributes), since, tuple(grown))


def check_files(files: Sequence[File]) -> None:
    """Check that the files of a version can share one folder.

    They also come from foreign archives and catalogs. With a duplicate path the second file would overwrite
    the first.

    Raises:
        ConfigError: Two paths are equal, or one is within another.
    """
    paths = {file.path for file in files}
    if len(paths) != len(files):
        raise ConfigError("a version cannot have two files at the same path.")
    for path in paths:
        parts = path.split("/")
        if any("/".join(parts[:i]) in paths for i in range(1, len(parts))):
            raise ConfigError(f"a version cannot have the file {path!r} within another file.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A version before it has a number.

    Attributes:
        kind: The kind that wrote it and will read it: "keras", "parquet".
        files: Its files.
        meta: What its reader needs.
        attributes: The user's attributes.
    """

    kind: str
    files: tuple[File, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_files(self.files)

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """A SHA-256 that is the same for the same content, whatever its name."""
        files = sorted([file.path, file.sha256] for file in self.files)
        return hashlib.sha256(as_json([self.kind, files, self.meta]).encode()).hexdigest()

    def manifest(self) -> str:
        return Manifest(self.files, dict(self.meta), dict(self.attributes)).text()


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A stored version; it never changes.

    Attributes:
        bucket: Its bucket.
        shelf: "models", "datasets" or "scripts".
        name: Its name.
        number: Counted from 1, never reused.
        kind: Its kind: "keras", "torch", "parquet", ...
        created: When it was published, in UTC.
        size: Its size in bytes.
        digest: A SHA-256 of its content.
        files: Its files.
        meta: What its kind needs to read it.
        attributes: The user's attributes.
    """

    bucket: str
    shelf: str
    name: str
    number: int
    kind: str
    created: datetime
    size: int
    digest: str
    files: tuple[File, ...]
    meta: Mapping[str, Any]
    attributes: Mapping[str, Any]

    @property
    def address(self) -> Address:
        return Address(self.bucket, self.shelf, self.name)

    def __str__(self) -> str:
        return f"{self.name}@{self.number}"

    def _repr_html_(self) -> str:
        facts = {
            "shelf": f"{self.bucket}/{self.shelf}",
            "kind": self.kind,
            "stored": f"{self.created:%Y-%m-%d %H:%M:%S} UTC",
            "files": len(self.files),
            "bytes": self.size,
            "digest": self.digest[:12],
            **{f"attribute {name}": value for name, value in self.attributes.items()},
        }
        return card(str(self), facts)

    @staticmethod
    def restored(
        address: Address, *, number: int, kind: str, created: str, size: int, digest: str, manifest: Manifest
    ) -> Version:
        """Rebuild a version from a row of the catalog."""
        return Version(
            bucket=address.bucket,
            shelf=address.shelf,
            name=address.name,
            number=number,
            kind=kind,
            created=datetime.fromisoformat(created).astimezone(timezone.utc),
            size=size,
            digest=digest,
            files=tuple(manifest.files),
            meta=manifest.meta,
            attributes=manifest.attributes,
        )


def as_json(value: Any, what: str = "meta and attributes") -> str:
    """Canonical JSON.

    Raises:
        ConfigError: A value is not a JSON value.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{what} must be JSON values: {exc}.") from exc


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()  # a number of numpy's
    raise TypeError(f"{value!r} is a {type(value).__name__}")
