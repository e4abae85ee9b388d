"""Where a store is: one URL, read into the catalog's place and the blobs'. Opens nothing.

/srv/ml, file:///srv/ml                         SQLite and files in one folder
sqlite:////srv/ml.db?blobs=s3://bucket/ml       SQLite here, blobs elsewhere
postgresql://user@host/db?blobs=s3://bucket/ml  for many machines
memory://                                       gone with the process
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from kindler.errors import ConfigError

__all__ = ["BESIDE", "ENVIRONMENT", "Place", "default_url", "folder_of", "parse", "without_secrets"]

ENVIRONMENT = "KINDLER_STORE"
BESIDE = "beside:"  # in the folder of the catalog's file, wherever that is moved to
_HARMLESS = ("endpoint", "region", "virtual_hosted_style_request")
_FORMS = "a folder, sqlite:///file?blobs=URL, postgresql://user@host/db?blobs=URL, or memory://"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the two halves of a store are.

    Attributes:
        catalog: A URL for SQLAlchemy.
        blobs: A file://, s3:// or memory:// URL; None if the catalog must know.
        new_blobs: Where they are to be if the catalog is new and `blobs` is None.
    """

    catalog: str
    blobs: str | None = None
    new_blobs: str | None = None


def default_url(environ: Mapping[str, str]) -> str:
    """`KINDLER_STORE`, or a folder among the user's data."""
    if environ.get(ENVIRONMENT):
        return environ[ENVIRONMENT]
    data = environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return os.path.join(data, "kindler", "store")


def parse(url: str) -> Place:
    """Read the URL.

    Raises:
        ConfigError: It is of no form that is known.
    """
    scheme = url.partition("://")[0] if "://" in url else "file"
    if scheme == "file":
        folder = folder_of(url)
        return Place(f"sqlite:///{folder / 'catalog.sqlite'}", new_blobs=BESIDE)
    if scheme == "memory":
        return Place("sqlite://", new_blobs="memory://")
    bare, blobs = _without_blobs(url)
    if scheme == "sqlite":
        path = Path(bare.removeprefix("sqlite:///"))
        if not bare.startswith("sqlite:///") or not path.name:
            raise ConfigError(f"{url!r} names no file.\nHint: sqlite:////absolute/path.db?blobs=URL.")
        return Place(f"sqlite:///{path.absolute()}", blobs, new_blobs=BESIDE)
    if scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        return Place("postgresql+psycopg" + bare.removeprefix(scheme), blobs)
    raise ConfigError(f"a store at {scheme}:// is not known.\nHint: {_FORMS}.")


def folder_of(url: str) -> Path:
    """The folder of a file:// URL or a plain path."""
    if not url.startswith("file://"):
        return Path(url).expanduser().absolute()
    told = urlsplit(url)
    if told.netloc not in ("", "localhost") or not told.path:
        raise ConfigError(f"{url!r} names no folder of this machine.\nHint: file:///absolute/path.")
    return Path(unquote(told.path))


def without_secrets(url: str) -> str:
    """What may be written down of a URL of blobs: its endpoint and region, and no keys.

    >>> without_secrets("s3://bucket/ml?region=eu-north-1&secret_access_key=x")
    's3://bucket/ml?region=eu-north-1'
    """
    bare, _, query = url.partition("?")
    harmless = urlencode([(key, value) for key, value in parse_qsl(query) if key in _HARMLESS])
    return f"{bare}?{harmless}" if harmless else bare


def _without_blobs(url: str) -> tuple[str, str | None]:
    bare, _, query = url.partition("?")
    given = parse_qsl(query, keep_blank_values=True)
    blobs = [value for key, value in given if key == "blobs"]
    if len(blobs) > 1:
        raise ConfigError("the store's URL has several blobs=...; there is one place for them.")
    rest = urlencode([(key, value) for key, value in given if key != "blobs"])
    return bare + (f"?{rest}" if rest else ""), blobs[0] if blobs else None
