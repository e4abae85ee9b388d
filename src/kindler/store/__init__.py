"""Names, versions, tags and the bytes behind them: what is stored, wherever it lies.

A `VersionStore` joins a catalog (rows in SQLite or PostgreSQL) and blobs (files, or objects of an object
store, each named by its SHA-256). It knows files and no objects: how a model or a table becomes files is for
`kindler.shelves`, which also has the verbs that users call.
"""

from kindler.store.store import Damage, Swept, Verified, VersionStore
from kindler.store.versions import Address, File, OvertakenError, Version

__all__ = ["Address", "Damage", "File", "OvertakenError", "Swept", "Verified", "Version", "VersionStore"]
