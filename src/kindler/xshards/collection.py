"""`XShards`: a partitioned, ordered collection of Python objects. Operations on one shard are in
`shard_ops`, on tables in `kindler.data.shards.frames`; a `ShardBackend` (`local`,
`kindler.spark.shards`) decides where shards live and who computes on them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from kindler.data.shards import frames, pytree
from kindler.data.shards.backend import ShardBackend, Work
from kindler.data.shards.codec import joined, leaves, pack, unpack
from kindler.errors import ConfigError, DataError
from kindler.html import card
from kindler.xshards import backends, local, shard_ops
from kindler.xshards.local import LocalShards
from kindler.xshards.shared_value import check, session, shipping_to

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark import RDD
    from pyspark.sql import DataFrame

_HOWS = ("inner", "left", "right", "outer")


class XShards:
    """A partitioned, ordered collection of Python objects: one object is one shard.

    A shard is a dict, tuple or list of numpy arrays, a pandas DataFrame or Series, or anything that pickles.
    On the local engine shards are files of this machine, memory-mapped when they are used, and functions run
    in worker processes. On the Spark engine they are spread over a cluster. Both engines support the same
    operations, and results stay on the engine of their inputs.

    Create one with `XShards.partition`, `from_shards`, `from_spark_df`, `from_rdd`, `load_pickle` or
    `load_parquet`. Operations return new collections and run when they are called, so that errors appear
    where they occur; see `to_lazy` for lazy evaluation.

    Examples:
        >>> import numpy as np
        >>> from kindler import XShards
        >>> shards = XShards.partition({"x": np.arange(6), "y": np.ones(6)}, num_shards=2, engine="local")
        >>> shards.num_partitions(), len(shards)
        (2, 6)
        >>> [shard["x"].tolist() for shard in shards.collect()]
        [[0, 1, 2], [3, 4, 5]]
    """

    def __init__(
        self, held: ShardBackend, *, pending: tuple[shard_ops.Step, ...] = (), lazy: bool = False
    ) -> None:
        self._held = held
        self._pending = pending
        self._recipe = (held, pending)
        self._lazy = lazy

    @classmethod
    def partition(cls, data: Any, num_shards: int | None = None, engine: str = "auto") -> XShards:
        """Split data of this process into shards of nearly equal size.

        Args:
            data: An array, a pandas DataFrame or Series, or a nested dict, tuple or list of those, which are
                all split along their first axis; every shard has the same structure. A list of other objects
                is split itself.
            num_shards: The number of shards. Default: one per core, at most one per row.
            engine: "local", "spark", or "auto": Spark if a session is running, else local.

        Raises:
            ConfigError: Arrays differ in length, there are more shards than rows, or the data has no rows.
        """
        count = _rows_to_cut(data)
        where = backends.choose(engine)
        if num_shards is None:
            num_shards = max(1, min(backends.slots(where), count))
        bounds = pytree.even_bounds(count, num_shards)
        if num_shards > max(count, 1):
            raise ConfigError(
                f"partition: a shard needs at least one row; received {count} rows for {num_shards} shards.\n"
                f"Hint: num_shards={max(count, 1)} or less."
            )
        return cls(backends.put((pack(pytree.cut(data, start, stop)) for start, stop in bounds), where))

    @classmethod
    def from_shards(cls, shards: Iterable[Any], engine: str = "auto") -> XShards:
        """Make each object of an iterable a shard.

        Args:
            shards: The objects, at least one.
            engine: "local", "spark", or "auto": Spark if a session is running, else local.
        """
        objects = iter(shards)
        for first in objects:
            return cls(backends.put(map(pack, chain([first], objects)), backends.choose(engine)))
        raise ConfigError("from_shards: expected at least one object, received none.")

    @classmethod
    def from_spark_df(cls, df: DataFrame, num_shards: int | None = None, engine: str = "spark") -> XShards:
        """Make each partition of a Spark DataFrame a shard, a pandas DataFrame. Rows move as Arrow.

        Args:
            df: Any batch DataFrame, classic or Connect.
            num_shards: Repartition to this number first. Default: as it is. Empty partitions make no shard.
            engine: The engine of the shards: "spark" or "local".
        """
        from kindler.spark.shards import SparkShards

        shards = cls(SparkShards.of_frame(df, num_shards))
        return shards if engine == "spark" else shards.to_engine(engine)

    @classmethod
    def from_rdd(cls, rdd: RDD[Any]) -> XShards:
        """Make each element of an RDD a shard, on the Spark engine; classic sessions only."""
        from kindler.spark.shards import SparkShards

        return cls(SparkShards.of_rdd(session(), rdd))

    @classmethod
    def load_pickle(
        cls, path: str | os.PathLike[str], *, trusted: bool = False, engine: str = "auto"
    ) -> XShards:
        """Read what `save_pickle` wrote.

        Args:
            path: The folder.
            trusted: Must be True: unpickling runs any code that the author put into the file.
            engine: "local", "spark", or "auto": Spark if a session is running, else local.
        """
        if not trusted:
            raise ConfigError(
                "load_pickle requires trusted=True: loading a pickle can run any code.\n"
                "Hint: pass it for files whose author you trust; load_parquet runs no code."
            )
        return cls.from_shards(local.read_pickles(path), engine)

    @classmethod
    def load_parquet(cls, path: str | os.PathLike[str], engine: str = "auto") -> XShards:
        """Read Parquet files as shards, which are pandas DataFrames.

        On the local engine each file is a shard; on the Spark engine Spark decides.

        Args:
            path: A folder or a file; for the Spark engine any path that Spark reads.
            engine: "local", "spark", or "auto": Spark if a session is running, else local.
        """
        if backends.choose(engine) == "spark":
            return cls.from_spark_df(session().read.parquet(str(path)))
        return cls(LocalShards.of(local.read_parquet(path)))

    @property
    def engine(self) -> str:
        """The engine of the shards: "local" or "spark"."""
        return self._held.engine

    def to_engine(self, engine: str) -> XShards:
        """Move the shards to another engine; returns itself if they are there already.

        Args:
            engine: "local" or "spark".
        """
        where = backends.choose(engine)
        held = self._ready()
        return (
            self if where == held.engine else XShards(backends.put(held.load(range(len(held.infos))), where))
        )

    def transform_shard(self, func: Callable[..., Any], *args: Any) -> XShards:
        """Apply a function to every shard, each where it lives.

        Args:
            func: Called as `func(shard, *args)`; returns the new shard. It may modify its shard in place: the
                original does not change.
            *args: Further arguments. A `SharedValue` arrives as its value, and is sent once per process.

        Raises:
            Exception: The function's exception, with its type; the message names the shard.
        """
        if not callable(func):
            raise ConfigError(f"transform_shard: expected a function, received {func!r}.")
        check(args)
        todo = (*self._pending, (func, args))
        if self._lazy:
            return XShards(self._held, pending=todo, lazy=True)
        return XShards(_transformed(self._held, todo))

    def collect(self) -> list[Any]:
        """Bring all shards to this process, in order."""
        return self.take(self.num_partitions())

    def take(self, n: int) -> list[Any]:
        """Return the first `n` shards, or all if there are fewer."""
        held = self._ready()
        return [unpack(packed) for packed in held.load(range(min(n, len(held.infos))))]

    def first(self) -> Any:
        """Return the first shard."""
        return self.take(1)[0]

    def num_partitions(self) -> int:
        """Return the number of shards."""
        return len(self._held.infos)

    def __len__(self) -> int:
        """Return the number of rows in all shards; an object without rows counts as one."""
        return sum(info.rows for info in self._ready().infos)

    def __bool__(self) -> bool:
        return True  # a collection without rows is one all the same

    def __repr__(self) -> str:
        state = "not computed yet" if self._pending else f"{len(self)} rows"
        return f"XShards({self.num_partitions()} shards, {state}, engine={self.engine!r})"

    def _repr_html_(self) -> str:
        facts = {
            "engine": self.engine,
            "shards": self.num_partitions(),
            "rows": "not computed yet" if self._pending else len(self),
        }
        return card("XShards", facts)

    def __reduce__(self) -> Any:
        raise TypeError(
            "an XShards cannot be sent to another process: it is itself spread over processes.\n"
            "Hint: use zip to work on two collections at once, and SharedValue for data that all shards need."
        )

    def __getitem__(self, key: Any) -> XShards:
        """A column of DataFrames (Series), several columns (DataFrames), or an entry of dicts."""
        return self._each(partial(shard_ops.picked, key))

    def cache(self) -> XShards:
        """Compute the shards if necessary, and keep them; returns itself."""
        self._ready().keep()
        return self

    def uncache(self) -> XShards:
        """Free the kept shards; returns itself.

        Lazily computed shards and those of the Spark engine are computed again when they are needed; others
        are lost.
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
        """Make `transform_shard` lazy from here on; returns itself.

        `compute`, `collect`, or any operation that needs the shards runs all pending functions at once.
        """
        self._lazy = True
        return self

    def compute(self) -> XShards:
        """Run the pending functions of lazy operations; returns itself."""
        self._ready()
        return self

    def repartition(self, num_partitions: int) -> XShards:
        """Redistribute the rows, in order, over another number of shards of nearly equal size.

        Values, dtypes and the pandas index stay as they are. Objects without rows are not split: neighbours
        are combined in lists.

        Args:
            num_partitions: The number of shards; some are empty if there are fewer rows.
        """
        held = self._ready()
        infos = held.infos
        pytree.even_bounds(0, num_partitions)
        if not all(info.rowwise for info in infos):
            return self._regrouped(num_partitions)
        sizes = [info.rows for info in infos]
        bounds = pytree.even_bounds(sum(sizes), num_partitions)
        empty = [target for target, (start, stop) in enumerate(bounds) if start == stop]
        pieces = partial(shard_ops.cut_by_rows, pytree.overlaps(sizes, bounds), empty)
        return XShards(held.exchanged(pieces, num_partitions))

    def partition_by(self, cols: str | Sequence[str], num_partitions: int | None = None) -> XShards:
        """Repartition DataFrames by the hash of a key, so that all rows of a key are in one shard.

        Args:
            cols: The columns of the key.
            num_partitions: The number of shards; some may be empty. Default: as many as now.
        """
        held = self._ready()
        names = _listed(cols)
        schema = frames.schema_of(held.infos, names, "partition_by")
        count = len(held.infos) if num_partitions is None else num_partitions
        pytree.even_bounds(0, count)
        return XShards(held.exchanged(partial(shard_ops.cut_by_hash, names, schema, count), count))

    def split(self) -> list[XShards]:
        """Split shards that are tuples or lists of length n into n collections."""
        lengths = {info.items for info in self._ready().infos}
        if len(lengths) != 1 or None in lengths:
            kinds = sorted({info.name for info in self._held.infos})
            raise DataError(
                f"split: all shards must be tuples or lists of one length; received {', '.join(kinds)}"
                f" of lengths {sorted(length for length in lengths if length is not None)}."
            )
        items = range(lengths.pop() or 0)
        return [self._each(lambda number, shard, item=item: shard[item]) for item in items]  # type: ignore[misc]

    def zip(self, other: XShards) -> XShards:
        """Pair the shards of two collections as tuples.

        Args:
            other: A collection with the same number of shards, and the same number of rows in each.
        """
        if not isinstance(other, XShards):
            raise ConfigError(f"zip: expected an XShards, received {other!r}.")
        ours, theirs = self._ready(), other.to_engine(self.engine)._ready()
        if len(ours.infos) != len(theirs.infos):
            raise ConfigError(
                f"zip: both must have the same number of shards; received {len(ours.infos)} and"
                f" {len(theirs.infos)}.\n"
                "Hint: repartition one of them."
            )
        for number, (a, b) in enumerate(zip(ours.infos, theirs.infos, strict=True)):
            if a.rows != b.rows:
                raise ConfigError(
                    f"zip: shard {number} must have the same number of rows in both; received {a.rows} and"
                    f" {b.rows}.\n"
                    "Hint: repartition both to one number of shards."
                )
        return XShards(ours.zipped(theirs))

    def unique(self) -> np.ndarray[Any, Any]:
        """Return the distinct values of Series, in order of appearance: `shards["a"].unique()`."""
        import pandas as pd

        distinct = pd.concat(self._each(shard_ops.unique_values).collect()).drop_duplicates()
        values: np.ndarray[Any, Any] = distinct.to_numpy()
        return values

    def deduplicates(self) -> XShards:
        """Remove duplicate rows of DataFrames, keeping the first."""
        self._schema()
        return XShards(self._held.queried("distinct"))

    def sort_values(
        self, col_names: str | Sequence[str] | None = None, ascending: bool | Sequence[bool] = True
    ) -> XShards:
        """Sort the rows of DataFrames over all shards; missing values come last.

        Args:
            col_names: The columns to sort by. Default: all, from left to right.
            ascending: One value for all columns, or one for each.
        """
        schema = self._schema()
        names = schema.names if col_names is None else _listed(col_names)
        frames.check_columns(names, schema.names, "sort_values")
        ways = [ascending] * len(names) if isinstance(ascending, bool) else list(ascending)
        if len(ways) != len(names):
            raise ConfigError(
                f"sort_values: received {len(ways)} values of ascending for {len(names)} columns."
            )
        return XShards(self._held.queried("sorted_rows", names, ways))

    def group_by(
        self,
        columns: str | Sequence[str] = (),
        agg: str | Sequence[str] | Mapping[str, str | Sequence[str]] = "count",
        join: bool = False,
    ) -> XShards:
        """Aggregate the rows of DataFrames by a key; a missing value is a key too.

        Args:
            columns: The columns of the key; none for one group of all rows.
            agg: "count" for the number of rows; another of count, count_distinct, sum, avg, min, max,
                stddev and variance for every other column whose type allows it; a list of them; or a dict
                from column to one or a list of them. Columns are named as in `sum(x)`.
            join: Whether to return all rows with the values of their group appended.

        Returns:
            One row per group, in the order of the keys; or with `join` the rows in their own order.
        """
        schema = self._schema()
        keys = _listed(columns)
        frames.check_columns(keys, schema.names, "group_by")
        wanted = frames.aggregates(agg, keys, schema)
        return XShards(self._held.queried("grouped", keys, wanted, join))

    def merge(self, right: XShards, how: str = "inner", on: str | Sequence[str] | None = None) -> XShards:
        """Join the rows of two collections of DataFrames by a key.

        Rows are ordered by the left rows, then by the right ones. Missing keys match nothing. Other columns
        that both sides have get the suffixes `_x` and `_y`, as in pandas.

        Args:
            right: The other collection.
            how: "inner", "left", "right" or "outer".
            on: The columns of the key. Default: those that both have.
        """
        if not isinstance(right, XShards):
            raise ConfigError(f"merge: expected an XShards, received {right!r}.")
        if how not in _HOWS:
            raise ConfigError(f"merge: how must be one of {', '.join(_HOWS)}; received {how!r}.")
        names = frames.merge_names(self._schema().names, right._schema().names, on)
        other = right.to_engine(self.engine)._ready()
        return XShards(self._held.queried("merged", other, how, names))

    def sample(self, frac: float, replace: bool = False, random_state: int | None = None) -> XShards:
        """Draw a random sample of the rows: `frac` of all, to the nearest row, in proportion from each shard.

        Args:
            frac: The fraction of rows; more than 1 only with `replace`.
            replace: Whether a row may be drawn more than once.
            random_state: A seed, for the same sample of the same shards. Default: random.
        """
        held = self._ready()
        if frac < 0 or (frac > 1 and not replace):
            raise ConfigError(
                f"sample: frac must be from 0 to 1, or more with replace=True; received {frac}."
            )
        if not all(info.rowwise for info in held.infos):
            raise DataError("sample: the shards have no rows; expected arrays, DataFrames or Series.")
        seed = int(np.random.SeedSequence(random_state).generate_state(1)[0])
        counts = pytree.shares([info.rows for info in held.infos], frac)
        return self._mapped(partial(shard_ops.sampled, counts, seed, replace))

    def select(self, cols: str | Sequence[str]) -> XShards:
        """Select columns of DataFrames."""
        names = _listed(cols)
        return self._each(lambda number, shard: shard_ops.as_frame(number, shard, names, "select")[names])

    def drop_missing_value(self) -> XShards:
        """Remove the rows of DataFrames in which a value is missing."""
        return self._each(lambda number, shard: shard_ops.as_frame(number, shard).dropna())

    def stack_feature_labels(self) -> XShards:
        """Stack pairs (feature, label), or lists of pairs, into `{"x": ..., "y": ...}`, one row per pair.

        float64 becomes float32; other dtypes stay.
        """
        return self._each(shard_ops.stacked)

    def assemble_feature_label_cols(self, feature_cols: Sequence[str], label_cols: Sequence[str]) -> XShards:
        """Assemble columns of DataFrames into `{"x": (rows, features), "y": (rows, labels)}`.

        Each matrix has numpy's common dtype of its columns, with float32 for float64. Cells may be arrays of
        one length, which become several columns of the matrix.

        Args:
            feature_cols: The columns of x.
            label_cols: The columns of y.
        """
        return self._each(partial(shard_ops.assembled, _listed(feature_cols), _listed(label_cols)))

    def describe(self, cols: str | Sequence[str] | None = None) -> pd.DataFrame:
        """Return count, mean, standard deviation, extremes and quartiles of numeric columns, as in pandas.

        Args:
            cols: The columns. Default: all numeric ones.
        """
        schema = self._schema()
        numeric = [f.name for f in schema if frames.is_numeric(f.type)]
        names = numeric if cols is None else _listed(cols)
        frames.check_columns(names, schema.names, "describe")
        if not names:
            raise ConfigError(f"describe: none of the columns {schema.names} is numeric.")
        for name in names:
            if name not in numeric:
                kind = schema.field(name).type
                raise ConfigError(f"describe: column {name!r} is not numeric; its type is {kind}.")
        return self._held.described(names)

    def head(self, n: int = 5) -> Any:
        """Return the first `n` rows, across shards."""
        held = self._ready()
        edges = np.concatenate([[0], np.cumsum([info.rows for info in held.infos])])
        counts = [int(count) for count in np.diff(np.minimum(edges, n))]
        needed = [number for number, count in enumerate(counts) if count] or [0]
        if held.engine == "spark":  # cut there, so that only those rows travel
            held = held.mapped(partial(shard_ops.first_rows, counts))
        loaded = zip(needed, held.load(needed), strict=True)
        return unpack(joined([shard_ops.first_rows(counts, number, packed) for number, packed in loaded]))

    def max_values(self, col_name: str) -> Any:
        """Return the largest value of a column of DataFrames; None if there is none."""
        maxima = self._each(partial(shard_ops.maximum, col_name)).collect()
        return max(chain.from_iterable(maxima), default=None)

    def get_null_sum(self) -> pd.DataFrame:
        """Count the missing values in each column, as a DataFrame with `col` and `total`."""
        import pandas as pd

        counts = self._each(
            lambda number, shard: list(shard_ops.as_frame(number, shard).isna().sum().items())
        )
        totals = Counter[Any]()
        for name, count in chain.from_iterable(counts.collect()):
            totals[name] += int(count)
        return pd.DataFrame({"col": list(totals), "total": list(totals.values())})

    def to_pandas(self) -> pd.DataFrame:
        """Return all rows in one DataFrame or Series. Range indexes of the shards become one."""
        import pandas as pd

        shards = self.collect()
        for number, shard in enumerate(shards):
            if not isinstance(shard, pd.DataFrame | pd.Series):
                raise DataError(f"expected DataFrames or Series; shard {number} is a {type(shard).__name__}.")
        whole = pytree.joined(shards) if len(shards) > 1 else shards[0]
        counted = all(isinstance(shard.index, pd.RangeIndex) for shard in shards)
        if counted and not whole.index.is_unique:
            whole = whole.reset_index(drop=True)
        return whole

    concat_to_pdf = to_pandas

    def to_spark_df(self) -> DataFrame:
        """Return the rows of DataFrames as a Spark DataFrame, without the pandas index; they move as Arrow.

        Categories become their values, times are truncated to microseconds, and times without a zone become
        Spark's `timestamp_ntz`. From the local engine this starts a session if none is running.
        """
        self._schema()
        frame: DataFrame = self._held.spark_frame()
        return frame

    def schema(self) -> dict[str, str]:
        """Return the columns of DataFrames, or the arrays, with their types.

        Arrays inside containers are named by their path, as in `x[0]`.
        """
        infos = self._ready().infos
        if all(info.kind in ("frame", "series") for info in infos):
            return {f.name: str(f.type) for f in self._schema()}
        if infos[0].kind == "arrays":
            return {
                _indexed(path): f"{np.dtype(dtype).name} {shape}" if shape else np.dtype(dtype).name
                for path, _, dtype, shape in leaves(infos[0].schema)
            }
        return {"": infos[0].name}

    def save_pickle(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> XShards:
        """Write each shard as a pickle into a local folder; returns itself.

        Args:
            path: The folder; created if necessary.
            overwrite: Whether to replace an existing folder.
        """
        local.write_pickles(self._ready(), path, overwrite=overwrite)
        return self

    def save_parquet(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> XShards:
        """Write DataFrames as Parquet files, without their index; returns itself.

        Args:
            path: The folder; for the Spark engine any path that Spark writes to.
            overwrite: Whether to replace an existing folder.
        """
        self._schema()
        if self.engine == "spark":
            self.to_spark_df().write.mode("overwrite" if overwrite else "error").parquet(str(path))
        else:
            local.write_parquet(self._held, path, overwrite=overwrite)
        return self

    def _ready(self) -> ShardBackend:
        if self._pending:
            self._held, self._pending = _transformed(self._held, self._pending), ()
        return self._held

    def _mapped(self, work: Work) -> XShards:
        return XShards(self._ready().mapped(work), lazy=self._lazy)

    def _each(self, function: Callable[[int, Any], Any]) -> XShards:
        return self._mapped(partial(shard_ops.on_object, function))

    def _schema(self) -> pa.Schema:
        return frames.schema_of(self._ready().infos)

    def _regrouped(self, count: int) -> XShards:
        held = self._held
        if count == len(held.infos):
            return self
        if count > len(held.infos):
            raise ConfigError(
                f"repartition({count}): {len(held.infos)} objects without rows cannot become more shards."
            )
        bounds = pytree.even_bounds(len(held.infos), count)
        targets = [target for target, (start, stop) in enumerate(bounds) for _ in range(start, stop)]
        return XShards(held.exchanged(partial(shard_ops.cut_to_lists, targets), count))._each(
            shard_ops.opened
        )


def _transformed(held: ShardBackend, todo: tuple[shard_ops.Step, ...]) -> ShardBackend:
    with shipping_to(held.engine):
        return held.mapped(partial(shard_ops.transformed, todo), by_user=True)


def _rows_to_cut(data: Any) -> int:
    leaf_lengths = list(pytree.lengths(data))
    lengths = {length for _, length in leaf_lengths}
    if leaf_lengths and None not in lengths:
        if len(lengths) == 1:
            return int(leaf_lengths[0][1] or 0)
        listed = ", ".join(f"data{path} has {length}" for path, length in leaf_lengths)
        raise ConfigError(f"partition: all arrays must have the same number of rows; {listed}.")
    if type(data) is list:
        return len(data)
    where = next((path for path, length in leaf_lengths if length is None), "")
    raise ConfigError(
        f"partition: data{where} has no rows.\nHint: pass arrays, pandas DataFrames, or nested dicts,"
        " tuples and lists of them; for other objects use XShards.from_shards([...])."
    )


def _listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _indexed(path: tuple[Any, ...]) -> str:
    head, *rest = path or ("",)
    return f"{head}" + "".join(f"[{part!r}]" for part in rest)
