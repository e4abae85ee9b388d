"""Marks that stand between rows in a queue of `TFManager`."""

from __future__ import annotations

__all__ = ["EndPartition", "Marker"]


class Marker:
    """Not a row."""


class EndPartition(Marker):
    """The rows of a partition end here."""
