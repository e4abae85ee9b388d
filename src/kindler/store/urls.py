"""Store URLs: one URL, parsed into the locations of the catalog and of the blobs. Opens nothing.

/srv/ml, file:///srv/ml                         SQLite and files in one folder
sqlite:////srv/ml.db?blobs=s3://bucket/ml       SQLite here, blobs elsewhere
postgresql://user@host/db?blobs=s3://bucket/ml  for several machines
memory://                                       gone with the process
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from kindler.errors import ConfigError

ENVIRONMENT = "KINDLER_STORE"
RELATIVE = "beside:"  # in the folder of the catalog's file, wherever that is moved to
_HARMLESS = ("endpoint", "region", "virtual_hosted_style_request")
_FORMS = "a folder, sqlite:///file?blobs=URL, postgresql://user@host/db?blobs=URL, or memory://"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the two halves of a store are."""

    catalog: str  # for SQLAlchemy
    blobs: str | None = None  # a file://, s3:// or memory:// URL; None if the catalog records it
    new_blobs: str | None = None  # where they go if the catalog is new and `blobs` is None


def default_url(environ: Mapping[str, str]) -> str:
    """`KINDLER_STORE`, or a folder in the user's data folder."""
    if environ.get(ENVIRONMENT):
        return environ[ENVIRONMENT]
    data = environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return os.path.join(data, "kindler", "store")


def shown(url: str) -> str:
    """The URL without a password, and without what follows "?", which may be keys.

    >>> shown("postgresql://ann:secret@host/db?blobs=s3://bucket")
    'postgresql://...@host/db'
    """
    place = url.partition("?")[0]
    user, at, host = place.rpartition("@")
    return f"{user.partition('://')[0]}://...@{host}" if at else place


def parse(url: str) -> Place:
    """The places that a store's URL names."""
    scheme = url.partition("://")[0] if "://" in url else "file"
    if scheme == "file":
        folder = folder_of(url)
        return Place(f"sqlite:///{folder / 'catalog.sqlite'}", new_blobs=RELATIVE)
    if scheme == "memory":
        return Place("sqlite://", new_blobs="memory://")
    bare, blobs = _without_blobs(url)
    if scheme == "sqlite":
        path = Path(bare.removeprefix("sqlite:///"))
        if not bare.startswith("sqlite:///") or not path.name:
            raise ConfigError(
                f"{url!r} does not name a file.\nHint: use sqlite:////absolute/path.db?blobs=URL."
            )
        return Place(f"sqlite:///{path.absolute()}", blobs, new_blobs=RELATIVE)
    if scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        return Place("postgresql+psycopg" + bare.removeprefix(scheme), blobs)
    raise ConfigError(f"unknown store scheme {scheme}://.\nHint: use {_FORMS}.")


def folder_of(url: str) -> Path:
    """The folder of a file:// URL or a plain path."""
    if not url.startswith("file://"):
        return Path(url).expanduser().absolute()
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigError(f"{url!r} is not a folder on this machine.\nHint: use file:///absolute/path.")
    return Path(unquote(parts.path))


def without_secrets(url: str) -> str:
    """The URL of the blobs with its endpoint and region, but without credentials.

    >>> without_secrets("s3://bucket/ml?region=eu-north-1&secret_access_key=x")
    's3://bucket/ml?region=eu-north-1'
    """
    bare, _, query = url.partition("?")
    harmless = urlencode([(key, value) for key, value in parse_qsl(query) if key in _HARMLESS])
    return f"{bare}?{harmless}" if harmless else bare


def _without_blobs(url: str) -> tuple[str, str | None]:
    bare, _, query = url.partition("?")
    options = parse_qsl(query, keep_blank_values=True)
    blobs = [value for key, value in options if key == "blobs"]
    if len(blobs) > 1:
        raise ConfigError("the store's URL has several blobs=...; only one is allowed.")
    rest = urlencode([(key, value) for key, value in options if key != "blobs"])
    return bare + (f"?{rest}" if rest else ""), blobs[0] if blobs else None
