"""Shelves on which a function is a thing to have: `get` gives the function itself, and does not call it."""

from __future__ import annotations

import os
from typing import Any

from kindler.models.function import FunctionHandler, restored
from kindler.models.kind import known_only
from kindler.shelves.shelf import Shelf

__all__ = ["Functions"]


class Functions(Shelf):
    """A shelf that may hold functions."""

    def get(
        self,
        name: str,
        *,
        version: int | str | None = None,
        trusted: bool = False,
        local: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Any:
        """See `Shelf.get`. A function is not called; it is code, so `trusted` is needed."""
        found = self.metadata(name, version=version)
        if local is not None or found.kind != FunctionHandler.kind:
            return super().get(str(found), trusted=trusted, local=local, **options)
        known_only(options, frozenset(), what="get of a function")
        with self.store.files(found) as folder:
            return restored(folder, found.meta, trusted=trusted)
