"""The shelf of scripts: functions to be run, stored by import path or source."""

from __future__ import annotations

from typing import ClassVar

from kindler.shelves.shelf import Shelf


class Scripts(Shelf):
    """Functions, by name."""

    shelf: ClassVar[str] = "scripts"
