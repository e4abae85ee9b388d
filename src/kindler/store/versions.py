"""The catalog's record of one version: frozen values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError, StoreError
from kindler.html import card
from kindler.store.files import sha256_of
from kindler.store.names import check_bucket, check_name, check_path


@dataclass(frozen=True, slots=True)
class Address:
    """A bucket, a shelf in it ("models", "datasets" or "scripts"), and a name."""

    bucket: str
    shelf: str
    name: str

    def __post_init__(self) -> None:
        check_bucket(self.bucket)
        check_name(self.name)


@dataclass(frozen=True, slots=True)
class File:
    """A file of a version."""

    path: str  # relative, with `/`
    sha256: str
    size: int  # in bytes

    def __post_init__(self) -> None:
        check_path(self.path)
        if len(self.sha256) != 64 or not set(self.sha256) <= set("0123456789abcdef"):
            raise ConfigError(f"{self.sha256!r} is not a SHA-256.")


def files_in(folder: Path) -> dict[File, Path]:
    """The files of a folder as a version has them, and where they are."""
    files: dict[File, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise StoreError(f"{path} is a symbolic link; only regular files can be stored.")
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            files[File(name, sha256_of(path), path.stat().st_size)] = path
    return files


def check_files(files: Sequence[File]) -> None:
    """Check that the files of a version can share one folder: none would overwrite another.

    They also come from foreign archives and catalogs.
    """
    paths = {file.path for file in files}
    if len(paths) != len(files):
        raise ConfigError("a version cannot have two files at the same path.")
    for path in paths:
        parts = path.split("/")
        if any("/".join(parts[:i]) in paths for i in range(1, len(parts))):
            raise ConfigError(f"a version cannot have the file {path!r} within another file.")


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
    def draft(
        address: Address,
        *,
        kind: str,
        files: Sequence[File],
        meta: Mapping[str, Any],
        attributes: Mapping[str, Any],
    ) -> Version:
        """A version without a number, before it is published."""
        check_files(files)
        # The same for the same content, whatever its name.
        content = as_json([kind, sorted([file.path, file.sha256] for file in files), meta])
        return Version(
            **asdict(address),
            number=0,
            kind=kind,
            created=datetime.now(timezone.utc),
            size=sum(file.size for file in files),
            digest=hashlib.sha256(content.encode()).hexdigest(),
            files=tuple(sorted(files, key=lambda file: file.path)),
            meta=json.loads(as_json(meta)),  # as it will be read
            attributes=json.loads(as_json(attributes)),
        )


class OvertakenError(Exception):
    """The newest version is another one than the publisher took it to be."""


def as_json(value: Any) -> str:
    """Canonical JSON."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"meta and attributes must be JSON values: {exc}.") from exc


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()  # a number of numpy's
    raise TypeError(f"{value!r} is a {type(value).__name__}")
