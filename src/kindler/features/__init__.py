"""Feature transformers: `StringIndexer`, `MinMaxScaler`, `StandardScaler`.

They fit and transform pandas DataFrames, Spark DataFrames (lazily, in Spark SQL) and XShards of pandas
DataFrames, with the same results.
"""

from __future__ import annotations

from kindler.features.indexer import StringIndexer
from kindler.features.scalers import MinMaxScaler, StandardScaler

__all__ = ["MinMaxScaler", "StandardScaler", "StringIndexer"]
