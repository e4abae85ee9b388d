"""`zoo.orca.data.pandas`: files as shards of pandas DataFrames; pandas reads them, in the workers."""

from __future__ import annotations

from kindler.readers import read_csv, read_json, read_parquet

__all__ = ["read_csv", "read_json", "read_parquet"]
