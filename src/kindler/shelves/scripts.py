"""The shelf of scripts: functions to be run, stored by import path or source."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from kindler.shelves.handler import known_only
from kindler.shelves.kinds.function import FunctionHandler, restored
from kindler.shelves.shelf import Shelf

__all__ = ["Scripts"]


class Scripts(Shelf):
    """Functions, by name."""

    shelf: ClassVar[str] = "scripts"

    def get(
        self,
        name: str,
        *,
        version: int | str | None = None,
        trusted: bool = False,
        local: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Any:
        """The function itself, not called; see `Shelf.get`. It is code, so `trusted` is needed."""
        found = self.metadata(name, version=version)
        if local is not None or found.kind != FunctionHandler.kind:
            return super().get(str(found), trusted=trusted, local=local, **options)
        known_only(options, frozenset(), what="get of a script")
        with self.store.files(found) as folder:
            return restored(folder, found.meta, trusted=trusted)
