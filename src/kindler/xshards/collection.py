"""`XShards`: a partitioned, ordered collection of Python objects.

Joins the parts: what is done to a shard is in `steps`, to tables in `kindler.data.shards.frames`, and where
shards live and who computes on them is a home's business (`local`, `kindler.spark.shards`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from kindler.data.shards import frames, pytree, rows
from kindler.data.shards.array_columns import ArrayColumn, RowFile, array_columns, row_file
from kindler.data.shards.backend import Held, Work
from kindler.data.shards.codec import leaves, pack, unpack
from kindler.errors import ConfigError, DataError
from kindler.xshards import backends, files, shard_ops
from kindler.xshards.local import LocalShards
from kindler.xshards.shared_value import check, shipping_to

if TYPE_CHECKING:
    import pandas as pd
    from pyspark import RDD
    from pyspark.sql import DataFrame

__all__ = ["XShards"]

_HOWS = ("inner", "left", "right", "outer")


class XShards:
    """A partitioned, ordered collection of Python objects: one object is one shard.

    A shard is a dict, tuple or list of numpy arrays, a pandas DataFrame or Series, or anything that pickles.
    Shards live in one of two homes. In the local home they are files of this machine, mapped into memory when
    they are used, and functions run in worker processes. In the Spark home they are spread over a cluster.
    Both homes do the same; results are in the home of what they were made of.

    Make one with `XShards.partition`, `from_shards`, `from_spark_df`, `from_rdd`, `load_pickle` or
    `load_parquet`. Operations give new collections and are done when they are called, so that an error
    appears where it was made; see `to_lazy` for the other way.

    Examples:
        >>> import numpy as np
        >>> from kindler import XShards
        >>> shards = XShards.partition({"x": np.arange(6), "y": np.ones(6)}, num_shards=2, home="local")
        >>> shards.num_partitions(), len(shards)
        (2, 6)
        >>> [shard["x"].tolist() for shard in shards.collect()]
        [[0, 1, 2], [3, 4, 5]]
    """

    def __init__(self, held: Held, *, pending: tuple[shard_ops.Step, ...] = (), lazy: bool = False) -> None:
        self._held = held
        self._pending = pending
        self._recipe = (held, pending)
        self._lazy = lazy

    @classmethod
    def partition(cls, data: Any, num_shards: int | None = None, home: str = "auto") -> XShards:
        """Cut data of this process into shards of nearly equal size.

        Args:
            data: An array, a pandas DataFrame or Series, or a nested dict, tuple or list of those, which are
                all cut along their first axis; every shard has the same structure. A list of other objects
                is cut as it is.
            num_shards: How many. Default: one a core, and no more than there are rows.
            home: "local", "spark", or "auto": Spark if a session is running, else local.

        Raises:
            ConfigError: Arrays of different lengths, more shards than rows, or nothing that has rows.
        """
        count = _rows_to_cut(data)
        where = backends.choose(home)
        if num_shards is None:
            num_shards = max(1, min(backends.slots(where), count))
        bounds = pytree.even_bounds(count, num_shards)
        if num_shards > max(count, 1):
            raise ConfigError(
                f"partition: {num_shards} shards of {count} rows; a shard needs at least one row.\n"
                f"Hint: num_shards={max(count, 1)} or less."
            )
        return cls(backends.put((pack(pytree.cut(data, start, stop)) for start, stop in bounds), where))

    @classmethod
    def from_shards(cls, shards: Iterable[Any], home: str = "auto") -> XShards:
        """Each object of an iterable as a shard of its own.

        Args:
            shards: The objects; at least one.
            home: "local", "spark", or "auto": Spark if a session is running, else local.
        """
        objects = iter(shards)
        for first in objects:
            return cls(backends.put(map(pack, chain([first], objects)), backends.choose(home)))
        raise ConfigError("from_shards: there are no objects; a collection has at least one shard.")

    @classmethod
    def from_spark_df(cls, df: DataFrame, num_shards: int | None = None, home: str = "spark") -> XShards:
        """The partitions of a Spark DataFrame as pandas DataFrames; rows move as Arrow.

        Args:
            df: Any batch DataFrame, classic or Connect.
            num_shards: Repartition it first. Default: as it is; partitions without rows make no shard.
            home: Where the shards are to live.
        """
        from kindler.spark.shards import SparkShards

        made = cls(SparkShards.of_frame(df, num_shards))
        return made if home == "spark" else made.to_home(home)

    @classmethod
    def from_rdd(cls, rdd: RDD[Any]) -> XShards:
        """The elements of an RDD as shards, in the Spark home; classic sessions only."""
        from kindler.spark.shards import SparkShards

        return cls(SparkShards.of_rdd(backends.session(), rdd))

    @classmethod
    def load_pickle(
        cls, path: str | os.PathLike[str], *, trusted: bool = False, home: str = "auto"
    ) -> XShards:
        """Read what `save_pickle` wrote.

        Args:
            path: The folder.
            trusted: Must be True: unpickling runs whatever code the file's author put into it.
            home: "local", "spark", or "auto": Spark if a session is running, else local.
        """
        if not trusted:
            raise ConfigError(
                "load_pickle: a pickle can run any code when it is loaded, so it takes trusted=True.\n"
                "Hint: pass it for files of people whom you trust; load_parquet runs no code."
            )
        return cls.from_shards(files.read_pickles(path), home)

    @classmethod
    def load_parquet(cls, path: str | os.PathLike[str], home: str = "auto") -> XShards:
        """Parquet files as shards of pandas DataFrames.

        In the local home a file is a shard; in the Spark home they are cut as Spark does it.

        Args:
            path: A folder or a file; for the Spark home anything that it reads.
            home: "local", "spark", or "auto": Spark if a session is running, else local.
        """
        where = backends.choose(home)
        if where == "spark":
            return cls.from_spark_df(backends.session().read.parquet(str(path)))
        return cls(LocalShards.of(files.read_parquet(path)))

    @property
    def home(self) -> str:
        """Where the shards live: "local" or "spark"."""
        return self._held.home

    def to_home(self, home: str) -> XShards:
        """The same shards in another home; these, if they live there already.

        Args:
            home: "local" or "spark".
        """
        where = backends.choose(home)
        held = self._ready()
        if where == held.home:
            return self
        return XShards(backends.put(held.load(range(len(held.infos))), where))

    def transform_shard(self, func: Callable[..., Any], *args: Any) -> XShards:
        """Apply a function to every shard, each where it lives.

        Args:
            func: Called as `func(shard, *args)`; what it returns is the new shard. It may change the shard it
                is given: nobody else sees that.
            *args: Further arguments. A `SharedValue` arrives as its value, and travels once a process.

        Raises:
            Exception: What the function raises, as that type; its message names the shard.
        """
        if not callable(func):
            raise ConfigError(f"transform_shard: {func!r} cannot be called.")
        check(args)
        todo = (*self._pending, (func, args))
        if self._lazy:
            return XShards(self._held, pending=todo, lazy=True)
        return XShards(_transformed(self._held, todo))

    def collect(self) -> list[Any]:
        """All shards, in order, in this process."""
        held = self._ready()
        return [unpack(packed) for packed in held.load(range(len(held.infos)))]

    def take(self, n: int) -> list[Any]:
        """The first `n` shards; all, if there are fewer."""
        held = self._ready()
        return [unpack(packed) for packed in held.load(range(min(n, len(held.infos))))]

    def first(self) -> Any:
        """The first shard."""
        return self.take(1)[0]

    def num_partitions(self) -> int:
        """How many shards there are."""
        return len(self._held.infos)

    def __len__(self) -> int:
        """How many rows all shards have together; an object without rows counts as one."""
        return sum(info.rows for info in self._ready().infos)

    def __bool__(self) -> bool:
        return True  # a collection without rows is one all the same

    def __repr__(self) -> str:
        state = "not computed yet" if self._pending else f"{len(self)} rows"
        return f"XShards({self.num_partitions()} shards, {state}, home={self.home!r})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "an XShards cannot be sent to another process: it is itself spread over processes.\n"
            "Hint: use zip to work on two collections at once, SharedValue for what all shards need."
        )

    def __getitem__(self, key: Any) -> XShards:
        """A column of DataFrames as Series, several as DataFrames, or what dicts have under a key."""
        return self._mapped(partial(shard_ops.picked, key))

    def cache(self) -> XShards:
        """Compute the shards if they are not, and keep them; gives itself."""
        self._ready().keep()
        return self

    def uncache(self) -> XShards:
        """Free what is kept of the shards; gives itself.

        Shards that were made lazily, and those of the Spark home, are computed again when they are needed;
        others are gone.
        """
        held, pending = self._recipe
        if pending and not self._pending:
            self._held.free()
            self._held, self._pending = held, pending
        elif not pending:
            self._held.free()
        return self

    def is_cached(self) -> bool:
        """Whether the shards are computed and kept."""
        return not self._pending and self._held.is_kept

    def to_lazy(self) -> XShards:
        """Let functions wait: from here on `transform_shard` only notes what is to be done; gives itself.

        All that is noted is done in one go by `compute`, `collect` or whatever else needs the shards.
        """
        self._lazy = True
        return self

    def compute(self) -> XShards:
        """Do what lazy operations have left to do; gives itself."""
        self._ready()
        return self

    def repartition(self, num_partitions: int) -> XShards:
        """The same rows, in the same order, in another number of shards of nearly equal size.

        Values, dtypes and the pandas index stay as they are. Objects that have no rows are not cut:
        neighbours come together in lists.

        Args:
            num_partitions: How many; shards without rows are made where there are more than rows.
        """
        held = self._ready()
        infos = held.infos
        pytree.even_bounds(0, num_partitions)
        if not all(info.rowwise for info in infos):
            return self._regrouped(num_partitions)
        sizes = [info.rows for info in infos]
        bounds = pytree.even_bounds(sum(sizes), num_partitions)
        empty = [target for target, (start, stop) in enumerate(bounds) if start == stop]
        return XShards(held.exchanged(shard_ops.ByRows(rows.overlaps(sizes, bounds), empty), num_partitions))

    def partition_by(self, cols: str | Sequence[str], num_partitions: int | None = None) -> XShards:
        """DataFrames with all rows of a key in one shard: rows go by the hash of their values.

        Args:
            cols: The columns that are the key.
            num_partitions: How many shards. Default: as many as there are; some may get no rows.
        """
        held = self._ready()
        names = _listed(cols)
        schema = frames.schema_of(held.infos, names, "partition_by")
        count = len(held.infos) if num_partitions is None else num_partitions
        pytree.even_bounds(0, count)
        return XShards(held.exchanged(shard_ops.ByHash(tuple(names), schema, count), count))

    def split(self) -> list[XShards]:
        """Shards that are tuples or lists of one length, as that many collections."""
        lengths = {info.items for info in self._ready().infos}
        if len(lengths) != 1 or None in lengths:
            kinds = sorted({info.name for info in self._held.infos})
            raise DataError(
                f"split: the shards are not tuples or lists of one length; they are {', '.join(kinds)}"
                f" of lengths {sorted(length for length in lengths if length is not None)}."
            )
        return [self._mapped(partial(shard_ops.item, position)) for position in range(lengths.pop() or 0)]

    def zip(self, other: XShards) -> XShards:
        """Shards of both collections in pairs, as tuples.

        Args:
            other: As many shards, each with as many rows.
        """
        if not isinstance(other, XShards):
            raise ConfigError(f"zip: {other!r} is no XShards.")
        ours, theirs = self._ready(), other.to_home(self.home)._ready()
        if len(ours.infos) != len(theirs.infos):
            raise ConfigError(
                f"zip: one collection has {len(ours.infos)} shards and the other {len(theirs.infos)}.\n"
                "Hint: repartition one of them."
            )
        for number, (a, b) in enumerate(zip(ours.infos, theirs.infos, strict=True)):
            if a.rows != b.rows:
                raise ConfigError(
                    f"zip: shard {number} has {a.rows} rows in one collection and {b.rows} in the other.\n"
                    "Hint: repartition both to one number of shards."
                )
        return XShards(ours.zipped(theirs))

    def unique(self) -> np.ndarray[Any, Any]:
        """The distinct values of Series, in the order of their first appearance: `shards["a"].unique()`."""
        import pandas as pd

        found = pd.concat(self._mapped(shard_ops.unique_values).collect()).drop_duplicates()
        values: np.ndarray[Any, Any] = found.to_numpy()
        return values

    def deduplicates(self) -> XShards:
        """DataFrames without the rows that have been there before."""
        self._schema()
        return XShards(self._held.distinct())

    def sort_values(
        self, col_names: str | Sequence[str] | None = None, ascending: bool | Sequence[bool] = True
    ) -> XShards:
        """DataFrames with their rows in order, from the first shard to the last; missing values come last.

        Args:
            col_names: The columns to sort by. Default: all, from left to right.
            ascending: One for all columns, or one each.
        """
        schema = self._schema()
        names = schema.names if col_names is None else _listed(col_names)
        frames.check_columns(names, schema.names, "sort_values")
        ways = [ascending] * len(names) if isinstance(ascending, bool) else list(ascending)
        if len(ways) != len(names):
            raise ConfigError(f"sort_values: {len(names)} columns and {len(ways)} values for ascending.")
        return XShards(self._held.sorted_rows(names, ways))

    def group_by(
        self,
        columns: str | Sequence[str] = (),
        agg: str | Sequence[str] | Mapping[str, str | Sequence[str]] = "count",
        join: bool = False,
    ) -> XShards:
        """Aggregate the rows of DataFrames that have the same key; a missing value is a key too.

        Args:
            columns: The columns that are the key; none for one group of all rows.
            agg: "count" for the number of rows; another of count, count_distinct, sum, avg, min, max,
                stddev and variance for every other column (where it makes sense for its type); a list of
                them; or a dict from column to one or a list of them. Columns are named as in `sum(x)`.
            join: Give all rows, with the values of their group appended, instead of one row a group.

        Returns:
            One row a group, in the order of the keys; or with `join` the rows in their own order.
        """
        schema = self._schema()
        keys = _listed(columns)
        frames.check_columns(keys, schema.names, "group_by")
        return XShards(self._held.grouped(keys, frames.aggregates(agg, keys, schema), join=join))

    def merge(self, right: XShards, how: str = "inner", on: str | Sequence[str] | None = None) -> XShards:
        """Join the rows of DataFrames with those of others that have the same key.

        Rows come in the order of the left ones and then of the right ones. Missing keys are equal to nothing.
        Columns of both sides that are no keys get the endings `_x` and `_y`, as in pandas.

        Args:
            right: The other collection.
            how: "inner", "left", "right" or "outer".
            on: The columns that are the key. Default: those that both have.
        """
        if not isinstance(right, XShards):
            raise ConfigError(f"merge: {right!r} is no XShards.")
        if how not in _HOWS:
            raise ConfigError(f"merge: how={how!r}; it is one of {', '.join(_HOWS)}.")
        names = frames.merge_names(self._schema().names, right._schema().names, on)
        other = right.to_home(self.home)._ready()
        return XShards(self._held.merged(other, how, names))

    def sample(self, frac: float, replace: bool = False, random_state: int | None = None) -> XShards:
        """Rows by chance: `frac` of all, to the nearest row, from every shard in proportion.

        Args:
            frac: The share; more than 1 only with `replace`.
            replace: Whether a row may be drawn more than once.
            random_state: A seed: the same rows for the same shards. Default: others each time.
        """
        held = self._ready()
        if frac < 0 or (frac > 1 and not replace):
            raise ConfigError(f"sample: frac={frac}; it is from 0 to 1, and more only with replace=True.")
        if not all(info.rowwise for info in held.infos):
            raise DataError("sample: the shards are objects without rows.")
        seed = int(np.random.SeedSequence(random_state).generate_state(1)[0])
        counts = rows.shares([info.rows for info in held.infos], frac)
        return self._mapped(partial(shard_ops.sampled, counts, seed, replace))

    def select(self, cols: str | Sequence[str]) -> XShards:
        """Some columns of DataFrames."""
        return self._mapped(partial(shard_ops.selected, _listed(cols)))

    def drop_missing_value(self) -> XShards:
        """DataFrames without the rows in which a value is missing. Columns are all kept."""
        return self._mapped(shard_ops.without_missing)

    def stack_feature_labels(self) -> XShards:
        """Pairs (feature, label), or lists of pairs, as `{"x": ..., "y": ...}` with a row for each pair.

        float64 becomes float32; other dtypes stay.
        """
        return self._mapped(shard_ops.stacked)

    def assembleFeatureLabelCols(  # the name that Orca's programs use
        self, featureCols: Sequence[str], labelCols: Sequence[str]
    ) -> XShards:
        """Columns of DataFrames as `{"x": (rows, features), "y": (rows, labels)}`.

        Each matrix has the dtype that numpy gives to its columns together, with float32 for float64. Cells
        may be arrays of one length, which then are several columns of the matrix.

        Args:
            featureCols: The columns of x.
            labelCols: The columns of y.
        """
        return self._mapped(partial(shard_ops.assembled, _listed(featureCols), _listed(labelCols)))

    def describe(self, cols: str | Sequence[str] | None = None) -> pd.DataFrame:
        """Count, mean, deviation, extremes and quartiles of numeric columns over all shards, as in pandas.

        Args:
            cols: Which columns. Default: the numeric ones.
        """
        schema = self._schema()
        numeric = [f.name for f in schema if frames.is_numeric(f.type)]
        names = numeric if cols is None else _listed(cols)
        frames.check_columns(names, schema.names, "describe")
        if not names:
            raise ConfigError(f"describe: none of the columns {schema.names} has numbers.")
        for name in names:
            if name not in numeric:
                kind = schema.field(name).type
                raise ConfigError(f"describe: column {name!r} has no numbers; its type is {kind}.")
        return self._held.described(names)

    def head(self, n: int = 5) -> Any:
        """The first `n` rows, whatever shards they are in."""
        held = self._ready()
        edges = np.concatenate([[0], np.cumsum([info.rows for info in held.infos])])
        counts = [int(count) for count in np.diff(np.minimum(edges, n))]
        needed = [number for number, count in enumerate(counts) if count] or [0]
        if held.home == "spark":  # cut there, so that only those rows travel
            held = held.mapped(partial(shard_ops.first_rows, counts))
        loaded = zip(needed, held.load(needed), strict=True)
        return unpack(
            rows.joined([shard_ops.first_rows(counts, number, packed) for number, packed in loaded])
        )

    def max_values(self, col_name: str) -> Any:
        """The largest value of a column of DataFrames; None if there is none."""
        found = [
            value
            for shard in self._mapped(partial(shard_ops.maximum, col_name)).collect()
            for value in shard["found"]
        ]
        return max(found, default=None)

    def get_null_sum(self) -> pd.DataFrame:
        """How many values are missing in each column, over all shards: a DataFrame with `col` and `total`."""
        import pandas as pd

        totals: dict[Any, int] = {}
        for shard in self._mapped(shard_ops.null_counts).collect():
            for name, count in shard:
                totals[name] = totals.get(name, 0) + count
        return pd.DataFrame({"col": list(totals), "total": list(totals.values())})

    def to_pandas(self) -> pd.DataFrame:
        """All rows in one DataFrame (or Series). An index that only counts in each shard counts over all."""
        import pandas as pd

        shards = [shard_ops.as_pandas(number, shard) for number, shard in enumerate(self.collect())]
        whole = pytree.joined(shards) if len(shards) > 1 else shards[0]
        counted = all(isinstance(shard.index, pd.RangeIndex) for shard in shards)
        if counted and not whole.index.is_unique:
            whole = whole.reset_index(drop=True)
        return whole

    concat_to_pdf = to_pandas

    def to_spark_df(self) -> DataFrame:
        """The rows of DataFrames as a Spark DataFrame; they move as Arrow, and the pandas index stays behind.

        Categories become their values, times are cut to microseconds, and those without a zone stay so
        (Spark's `timestamp_ntz`). From the local home it starts a session if none runs.
        """
        self._schema()
        frame: DataFrame = self._held.spark_frame()
        return frame

    def schema(self) -> dict[str, str]:
        """What the shards have: columns of DataFrames and arrays, and their types.

        Arrays inside containers are named by their way there, as in `x[0]`.
        """
        infos = self._ready().infos
        if all(info.kind in ("frame", "series") for info in infos):
            return {f.name: str(f.type) for f in self._held.schema()}
        if infos[0].kind == "arrays":
            return {
                _way(path): f"{np.dtype(dtype).name} {shape}" if shape else np.dtype(dtype).name
                for path, _, dtype, shape in leaves(infos[0].schema)
            }
        return {"": infos[0].name}

    def save_pickle(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> XShards:
        """Write every shard as a pickle into a folder of this machine; gives itself.

        Args:
            path: The folder; made if need be.
            overwrite: Replace what is there.
        """
        files.write_pickles(self._ready(), path, overwrite=overwrite)
        return self

    def save_parquet(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> XShards:
        """Write DataFrames as Parquet files, without their index; gives itself.

        Args:
            path: The folder; for the Spark home anything that Spark writes to.
            overwrite: Replace what is there.
        """
        self._schema()
        if self.home == "spark":
            self.to_spark_df().write.mode("overwrite" if overwrite else "error").parquet(str(path))
        else:
            files.write_parquet(self._held, path, overwrite=overwrite)
        return self

    def array_columns(self) -> list[ArrayColumn]:
        """The arrays of every shard as flat columns, with dtype and shape."""
        return array_columns(self._ready().infos)

    def row_files(self) -> Iterator[RowFile]:
        """For each shard of the local home its arrays by flat column name: mapped, not copied."""
        held = self.to_home("local")._ready()
        array_columns(held.infos)
        return (row_file(packed) for packed in held.load(range(len(held.infos))))

    def packed_frame(self) -> DataFrame:
        """The arrays as a Spark DataFrame: a row is a row, and each array's part of it one binary cell."""
        from kindler.spark.shards import SparkShards

        held = self.to_home("spark")._ready()
        names = [column.name for column in array_columns(held.infos)]
        if not isinstance(held, SparkShards):
            raise TypeError("packed_frame is of the Spark home.")
        return held.packed_frame(names)

    def _ready(self) -> Held:
        """The shards, computed."""
        if self._pending:
            self._held, self._pending = _transformed(self._held, self._pending), ()
        return self._held

    def _mapped(self, work: Work) -> XShards:
        return XShards(self._ready().mapped(work), lazy=self._lazy)

    def _schema(self) -> Any:
        """The columns of DataFrames; a complaint, if the shards are something else."""
        return self._ready().schema()

    def _regrouped(self, count: int) -> XShards:
        held = self._held
        if count == len(held.infos):
            return self
        if count > len(held.infos):
            raise ConfigError(
                f"repartition({count}): there are {len(held.infos)} objects without rows, which are not cut."
            )
        bounds = pytree.even_bounds(len(held.infos), count)
        targets = [target for target, (start, stop) in enumerate(bounds) for _ in range(start, stop)]
        return XShards(held.exchanged(shard_ops.Grouped(targets), count).mapped(shard_ops.opened))


def _transformed(held: Held, todo: tuple[shard_ops.Step, ...]) -> Held:
    with shipping_to(held.home):
        return held.mapped(shard_ops.Transform(todo), by_user=True)


def _rows_to_cut(data: Any) -> int:
    found = list(pytree.lengths(data))
    lengths = {length for _, length in found}
    if found and None not in lengths:
        if len(lengths) == 1:
            return int(found[0][1] or 0)
        listed = ", ".join(f"data{path} has {length}" for path, length in found)
        raise ConfigError(f"partition: all arrays need the same number of rows; {listed}.")
    if type(data) is list:
        return len(data)
    where = next((path for path, length in found if length is None), "")
    raise ConfigError(
        f"partition: data{where} has no rows to cut.\nHint: pass arrays, pandas DataFrames, or nested dicts,"
        " tuples and lists of them; for other objects use XShards.from_shards([...])."
    )


def _listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _way(path: tuple[Any, ...]) -> str:
    head, *rest = path or ("",)
    return f"{head}" + "".join(f"[{part!r}]" for part in rest)
