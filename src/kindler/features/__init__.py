"""Columns made ready for a model: `StringIndexer`, `MinMaxScaler`, `StandardScaler`.

They learn from and transform pandas DataFrames, Spark DataFrames (by Spark SQL, lazily) and XShards of pandas
DataFrames, with the same results.
"""

from __future__ import annotations

from kindler.features.indexer import StringIndexer
from kindler.features.scalers import MinMaxScaler, StandardScaler

__all__ = ["MinMaxScaler", "StandardScaler", "StringIndexer"]
