"""What a Parquet file must be like, so that pyarrow reads a frame's columns from it exactly as Spark does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

_SPARK_VERSION = b"org.apache.spark.version"
_OLD_CALENDAR = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
# Since then a file says so itself where its dates are of the old calendar. Compared as text, as Spark does.
_SAYS_ITS_CALENDAR = "3.1.0"


@dataclass(frozen=True)
class StoredColumns:
    """Columns of a frame that its files must hold, each under the very type that the frame has for it.

    A value, so that the proof can be made again on an executor that opens a file later.

    Attributes:
        types: The columns' Arrow types as `frames.arrow_types` has them.
    """

    types: Mapping[str, pa.DataType]

    def problem(self, opened: pq.ParquetFile) -> str | None:
        """Why Spark may read other values from this file than pyarrow does; None where it cannot."""
        schema = opened.schema_arrow
        types = dict(zip(schema.names, schema.types, strict=True))
        alike = Counter(name.lower() for name in schema.names)
        dated = [name for name, wanted in self.types.items() if _has_dates(wanted)]
        instants = _int96(opened) if dated else set()
        for name, wanted in self.types.items():
            if name not in types:
                return f"column {name!r} is not stored in its files"
            if alike[name.lower()] > 1:
                # Spark tells such names apart or not, depending on its settings.
                return f"its files have several columns called {name!r}, upper and lower case aside"
            # An INT96 is an instant, which Arrow does not say.
            stored = _with_time_zone(types[name]) if name in instants else types[name]
            if not _same(wanted, stored):
                return f"column {name!r} is {wanted} in the frame and {stored} in its files"
        if dated and not _is_of_todays_calendar(opened):
            return f"column {dated[0]!r} has dates that may be counted in the calendar from before 1582"
        return None


def _same(wanted: pa.DataType, stored: pa.DataType) -> bool:
    """Whether values of the stored type are those of the frame's type, without any conversion by Spark."""
    if types.is_list(wanted):
        kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        return any(kind(stored) for kind in kinds) and _same(wanted.value_type, stored.value_type)
    if types.is_struct(wanted):
        if not types.is_struct(stored) or [f.name for f in wanted] != [f.name for f in stored]:
            return False
        return all(_same(one.type, other.type) for one, other in zip(wanted, stored, strict=True))
    if types.is_binary(wanted):
        return bool(types.is_binary(stored) or types.is_large_binary(stored))
    plain = types.is_signed_integer(wanted) or types.is_floating(wanted) or types.is_boolean(wanted)
    return bool(plain or types.is_decimal(wanted) or _has_dates(wanted)) and wanted == stored


def _has_dates(kind: pa.DataType) -> bool:
    if types.is_list(kind):
        return _has_dates(kind.value_type)
    if types.is_struct(kind):
        return any(_has_dates(field.type) for field in kind)
    return bool(types.is_date(kind) or types.is_timestamp(kind))


def _is_of_todays_calendar(opened: pq.ParquetFile) -> bool:
    """Whether the file's writer says so. Otherwise Spark counts old dates anew, or not, by its settings."""
    told = opened.metadata.metadata or {}
    version = told.get(_SPARK_VERSION, b"").decode("utf-8", "replace")
    return version >= _SAYS_ITS_CALENDAR and not any(key in told for key in _OLD_CALENDAR)


def _int96(opened: pq.ParquetFile) -> set[str]:
    """The columns with such values in them, and prefixes of their names that end at a dot."""
    leaves = (opened.schema.column(i) for i in range(len(opened.schema.names)))
    paths = [leaf.path.split(".") for leaf in leaves if leaf.physical_type == "INT96"]
    return {".".join(parts[: i + 1]) for parts in paths for i in range(len(parts))}


def _with_time_zone(stored: pa.DataType) -> pa.DataType:
    if types.is_list(stored):
        return pa.list_(_with_time_zone(stored.value_type))
    return pa.timestamp("us", "UTC") if stored == pa.timestamp("us") else stored
