"""The shelf of scripts: functions to be run, stored by import path or source."""

from __future__ import annotations

from typing import ClassVar

from kindler.shelves.functions import Functions

__all__ = ["Scripts"]


class Scripts(Functions):
    """Functions, by name."""

    shelf: ClassVar[str] = "scripts"
