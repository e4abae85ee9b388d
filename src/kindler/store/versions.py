"""What the catalog says of one version: frozen values, and their form as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from kindler.errors import ConfigError
from kindler.store.names import check_bucket, check_name, check_path

__all__ = ["Address", "Draft", "File", "Manifest", "Version", "as_json", "check_files", "growth"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a name is: its bucket, and the shelf in it.

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
        path: Where it belongs, relative, with `/`.
        sha256: What is in it.
        size: Its bytes.
    """

    path: str
    sha256: str
    size: int

    def __post_init__(self) -> None:
        check_path(self.path)
        if len(self.sha256) != 64 or not set(self.sha256) <= set("0123456789abcdef"):
            raise ConfigError(f"{self.sha256!r} is no SHA-256.")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a row of the catalog says of a version's content.

    A version that has all that the one before it has, and more, says only what is new: a dataset to which
    something was appended a thousand times takes room for a thousand pieces, and not for half a million.

    Attributes:
        files: Its files; the new ones, if it grows.
        meta: What the reader must know; of lists that grow, what is new at their end.
        attributes: What the user wants to remember.
        since: The number of the first version in the row of those that grow; None if it says all.
        grown: Which lists of `meta` grow.
    """

    files: Sequence[File]
    meta: dict[str, Any]
    attributes: dict[str, Any]
    since: int | None = None
    grown: tuple[str, ...] = ()

    @staticmethod
    def read(text: str) -> Manifest:
        """What `text` wrote."""
        told = json.loads(text)
        files = [File(*entry) for entry in told["files"]]
        return Manifest(
            files, told["meta"], told["attributes"], told.get("since"), tuple(told.get("grown", ()))
        )

    def text(self) -> str:
        """As JSON."""
        files = [[file.path, file.sha256, file.size] for file in self.files]
        told = {"files": files, "meta": self.meta, "attributes": self.attributes}
        growing = {} if self.since is None else {"since": self.since, "grown": list(self.grown)}
        return as_json(told | growing)

    def after(self, before: Manifest) -> Manifest:
        """This one and the one that it grows on, as one. What `before` has may be used up."""
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
    """What a draft has more than a version; None if it lacks something of it."""
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
    """Whether the files of a version can lie in one folder.

    They come from archives and catalogs of others too. A path that is there twice would make the second file
    be written over the first.

    Raises:
        ConfigError: They cannot.
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
        kind: What wrote it and will read it: "keras", "parquet".
        files: Its files.
        meta: What the reader must know.
        attributes: What the user wants to remember.
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
        """All of it as JSON."""
        return Manifest(self.files, dict(self.meta), dict(self.attributes)).text()


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A version that is in the store; it never changes.

    Attributes:
        bucket: Its bucket.
        shelf: "models", "datasets" or "scripts".
        name: Its name.
        number: Counted from 1, never given twice.
        kind: What it is: "keras", "torch", "parquet", ...
        created: When it was published, in UTC.
        size: Its bytes.
        digest: A SHA-256 of its content.
        files: Its files.
        meta: What its kind must know to read it.
        attributes: What was given as `attributes`.
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
        """Where its name is."""
        return Address(self.bucket, self.shelf, self.name)

    def __str__(self) -> str:
        return f"{self.name}@{self.number}"

    @staticmethod
    def restored(
        address: Address, *, number: int, kind: str, created: str, size: int, digest: str, manifest: Manifest
    ) -> Version:
        """From a row of the catalog."""
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
        ConfigError: Something in it has no place in JSON.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{what} must be values that JSON has: {exc}.") from exc


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()  # a number of numpy's
    raise TypeError(f"{value!r} is a {type(value).__name__}")
