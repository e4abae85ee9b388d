"""Data outside Spark: arrays, tables and datasets in this process, Parquet files, and loaders."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from operator import add
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pyarrow as pa

from kindler.data import parquet, tables
from kindler.data.arrays import (
    dataset_table,
    gives_arrow,
    is_dataset,
    is_local_data,
    named,
    table_of,
    values,
    with_columns,
)
from kindler.data.batches import inputs
from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Array, Column, ColumnPlan, conform
from kindler.data.paths import absolute
from kindler.data.ragged import Ragged
from kindler.data.rejoin import Chunk, chunk_of
from kindler.data.sources import (
    DeliveredSource,
    FolderSource,
    ParquetSource,
    arrow_source,
    columns_in_memory,
    parquet_source,
    spooled,
)
from kindler.data.spool import Spool
from kindler.data.statistics import Summary, columns_of, described, merged
from kindler.engine import local
from kindler.errors import ConfigError, DataError
from kindler.estimator.inputs.contract import (
    SAMPLE_ROWS,
    FailureCounter,
    Input,
    Prepared,
    ScoreRequest,
    SourceRequest,
    few_rows,
    repeated_row,
    rows_to_train,
)
from kindler.frameworks.caller_state import untouched
from kindler.frameworks.registry import FRAMEWORKS
from kindler.inference.files import FileTask, OutputFolder, Parts, input_record
from kindler.inference.outputs import concatenated, like, refuse_taken, to_arrow
from kindler.inference.predictor import Predictor
from kindler.inference.row_errors import Failures
from kindler.temporary import Folder
from kindler.train.loaders import is_stream, stream_source
from kindler.train.options import PredictOptions
from kindler.train.progress import ProgressBar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_PATHS = (str, os.PathLike, tables.Table)


class ParquetInput(Input):
    """Parquet files and tables, as paths or `Table`."""

    name = "parquet"
    part: tuple[float, bool] | None = None  # the share to validate with, and whether these rows are it

    def split(self, share: float, seed: int) -> tuple[Input, Input]:
        parts = ParquetInput(self.data), ParquetInput(self.data)
        parts[0].part, parts[1].part = (share, False), (share, True)
        return parts

    def describe(self) -> dict[str, Any]:
        paths = [place for place in self.places if isinstance(place, str)]
        found = [place.describe() for place in self.places if isinstance(place, tables.Table)]
        return {"paths": [absolute(path) for path in paths], **({"tables": found} if found else {})}

    @cached_property
    def places(self) -> list[str | tables.Table]:
        return tables.located(self.data)

    @staticmethod
    def accepts(data: Any) -> bool:
        if isinstance(data, list):
            return bool(data) and all(isinstance(item, _PATHS) for item in data)
        return isinstance(data, _PATHS)

    def source(self, request: SourceRequest) -> Prepared:
        source = not_empty(
            parquet_source(tables.inspect(self.places, opener(request.spark)), request.columns)
        )
        if self.part is None:
            return source, None
        (share, held_out), rows = self.part, source.files.rows
        kept = rows_to_train(rows, share)
        return replace(source, within=(kept, rows) if held_out else (0, kept)), None

    def sample(self, options: ColumnOptions, layout: Mapping[str, Any]) -> tuple[ColumnPlan, list[Array]]:
        files = tables.inspect(self.places)
        columns = not_empty(parquet_source(files, options)).columns
        first = next(iter(parquet.scan(files, columns.names, 0, 1)))
        return columns, repeated_row(pa.Table.from_batches([first]), columns)

    def summaries(self, known: Collection[str], columns: ColumnOptions) -> dict[str, Summary]:
        files = tables.inspect(self.places)
        names = [name for name in parquet.schema(files).names if name in columns_of(known)]
        batches = parquet.scan(files, names, 0, files.rows) if names else ()
        return merged([described(dict(zip(names, batch.columns, strict=True)), known) for batch in batches])

    def score_complaints(self, options: PredictOptions) -> list[str]:
        if options.output_path is not None:
            return []
        complaint = (
            f"predict({self.data!r}): predictions for Parquet files are written to files.\n"
            "Hint: pass output_path=..., or read the files with Spark and score the DataFrame."
        )
        return [complaint]

    def score(self, request: ScoreRequest) -> str:
        options = request.options
        files = tables.inspect(self.places)
        columns = parquet_source(files, options.columns).columns
        schema = parquet.schema(files)
        refuse_taken(options.output_cols or ("prediction",), schema.names)
        predictor = request.predictor(columns)
        if predictor.lenient:

            def first() -> Mapping[str, Any]:
                found = parquet.scan(files, columns.names, 0, min(SAMPLE_ROWS, files.rows))
                table = pa.Table.from_batches(list(found))
                return dict(zip(table.column_names, table.columns, strict=True))

            predictor = request.knowing(predictor, {field.name: field.type for field in schema}, first)
        parts = Parts.of(files, options.batch_size)
        output = OutputFolder(options.output_path or "", parts)
        self._refuse_mixed(output.path, files)
        described = [place.describe() for place in self.places if isinstance(place, tables.Table)]
        manifest = {
            **request.described(),
            "input": {**input_record(files), **({"tables": described} if described else {})},
            "parts": {"count": len(parts), "rows": parts.size},
        }
        missing = output.begin(manifest, overwrite=options.overwrite)
        failed = output.failures() if predictor.lenient and len(missing) < len(parts) else Failures()
        failed.check(options.max_errors)
        if missing:
            task = FileTask(
                predictor=predictor, files=files, parts=parts, missing=missing, folder=output.path
            )
            job = replace(
                request.job, ranks=request.job.ranks[: len(missing)], buffers=(cloudpickle.dumps(task),)
            )
            with ProgressBar(verbose=options.verbose, what="predict", unit="rows") as progress:
                counter = FailureCounter(progress, files.rows, failed, options.max_errors)
                local.run(job, listener=counter)
            failed = counter.total()
        if failed.count == files.rows:
            raise DataError(f"no row could be scored, so these are not errors of rows: {failed}")
        output.finish()
        if failed.count:
            request.warn(str(failed))
        return output.path

    def _refuse_mixed(self, target: str, files: parquet.ParquetFiles) -> None:
        """Neither would then be the same in a second run."""
        inside = f"{target.rstrip('/')}/"
        given = [f"{absolute(path).rstrip('/')}/" for path in self.places if isinstance(path, str)]
        if any(file.startswith(inside) for file in files.files) or any(map(inside.startswith, given)):
            raise ConfigError(
                f"output_path={target!r}: the output must not be in the folder of the input, nor the input in"
                " that of the output.\nHint: choose another folder."
            )


def opener(spark: SparkSession | None) -> parquet.EachFile | None:
    """Opens the footers of files in Spark tasks if the workers run in Spark; else None."""
    if spark is None:
        return None
    from kindler.spark.tasks import each_file

    return partial(each_file, spark)


def not_empty(source: ParquetSource) -> ParquetSource:
    if not source.files.rows:
        raise DataError("the data has no rows.")
    return source


class MemoryInput(Input):
    """Arrays, a pandas DataFrame or an Arrow table. Scoring returns the same kind."""

    @staticmethod
    def accepts(data: Any) -> bool:
        return is_local_data(data)

    @property
    def rows(self) -> Any:
        return self.data

    def summaries(self, known: Collection[str], columns: ColumnOptions) -> dict[str, Summary]:
        found = named(self.rows).called(columns.features, columns.labels).columns
        return described({n: values(found[n], n) for n in columns_of(known) if n in found}, known)

    def split(self, share: float, seed: int) -> tuple[Input, Input]:
        found = named(self.rows)
        columns = {name: values(column, name) for name, column in found.columns.items()}
        rows = {name: len(column) for name, column in columns.items()}
        if len(set(rows.values())) > 1:
            raise DataError(f"all columns must have the same number of rows; received {rows}.")
        kept = rows_to_train(next(iter(rows.values())), share)
        parts = ({name: c[part] for name, c in columns.items()} for part in (slice(kept), slice(kept, None)))
        training, held_out = (MemoryInput(replace(found, columns=part)) for part in parts)
        return training, held_out

    def source(self, request: SourceRequest) -> Prepared:
        here = arrow_source(self.rows, request.columns, scratch=request.scratch)
        if request.spark is None or request.shares_files:
            return here, None
        return _shipped(here, request.name, request.spark)

    def sample(self, options: ColumnOptions, layout: Mapping[str, Any]) -> tuple[ColumnPlan, list[Array]]:
        found = named(self.rows).called(options.features, None)
        if options.feature_cols is None:
            options = replace(options, feature_cols=found.features)
        columns = options.plan(found.types)
        return columns, few_rows(found.columns, columns)

    def score(self, request: ScoreRequest) -> Any:
        rows, options = self.rows, request.options
        columns, given, count = columns_in_memory(rows, options.columns)
        predictor = request.predictor(columns)
        step = options.batch_size
        places = [slice(start, min(start + step, count)) for start in range(0, count, step)]
        with ExitStack() as stack:
            parts_of: Callable[[slice], tuple[Any, ...]]
            plain = all(isinstance(given[column.name], np.ndarray) for column in columns.features)
            lent = FRAMEWORKS.load(request.framework).takes_read_only
            if predictor.lenient:
                types = {name: getattr(column, "type", None) for name, column in given.items()}
                columns = request.with_lengths(
                    columns, types, lambda: {name: column[:SAMPLE_ROWS] for name, column in given.items()}
                )
                predictor = replace(predictor, columns=columns)
                parts_of = partial(_readable, columns, given)
            elif plain and options.columns.ragged is None:
                parts_of = partial(_conformed, columns, given, lent=lent)
            else:
                folder = stack.enter_context(Folder("kindler-driver-"))
                spool = Spool.open(spooled(columns, given, count, scratch=folder).folder)
                parts_of = partial(_spooled, columns, spool)
            scored = predictor.score(map(parts_of, places))
            with untouched():  # the first batch makes the model
                begun = list(islice(scored, 1))
            outputs = [concatenated(column) for column in zip(*begun, *scored, strict=True)]
        if predictor.failures.count:
            request.warn(str(predictor.failures))
        by_name = dict(zip(predictor.names(len(outputs)), outputs, strict=True))
        return self._scored(rows, by_name, predictor)

    def _scored(self, rows: Any, outputs: Mapping[str, Array], predictor: Predictor) -> Any:
        return like(rows, dict(outputs), named=predictor.outputs_are_named(), kinds=predictor.kinds)


class DatasetInput(MemoryInput):
    """A Hugging Face or ray dataset. Scoring returns a Hugging Face dataset, for ray an Arrow table."""

    @staticmethod
    def accepts(data: Any) -> bool:
        return is_dataset(data)

    @property
    def rows(self) -> pa.Table:
        return dataset_table(self.data)

    def _scored(self, rows: pa.Table, outputs: Mapping[str, Array], predictor: Predictor) -> Any:
        refuse_taken(outputs, rows.schema.names)
        kinds = predictor.kinds
        return with_columns(
            self.data, rows, {name: to_arrow(out, kinds.get(name)) for name, out in outputs.items()}
        )


class ArrowInput(MemoryInput):
    """What gives its rows as a stream or an array of Arrow: Polars, DuckDB, Lance and others. They are read
    once, because a stream may end. Scoring returns an Arrow table."""

    name = "arrow"

    @staticmethod
    def accepts(data: Any) -> bool:
        return gives_arrow(data)

    @cached_property
    def rows(self) -> pa.Table:
        return table_of(self.data)


def _readable(columns: ColumnPlan, given: Mapping[str, Any], rows: slice) -> Chunk:
    values = [given[column.name][rows] for column in columns.features]
    return chunk_of(columns, rows.stop - rows.start, values, partial(add, rows.start), lenient=True)


def _conformed(columns: ColumnPlan, given: Mapping[str, Array], rows: slice, *, lent: bool) -> Any:
    """Rows of arrays: copies, since a model may write to them, or read-only views if `lent`."""
    parts = []
    for column in columns.features:
        part = conform(given[column.name][rows], column, where=lambda row: rows.start + row).view()
        part.flags.writeable = False
        parts.append(part if lent else np.array(part))
    return inputs(columns, parts)


def _spooled(columns: ColumnPlan, spool: Spool, rows: slice) -> Any:
    arrays = [spool.arrays[column.name] for column in columns.features]
    taken: list[Any] = [
        array.take(rows) if isinstance(array, Ragged) else np.array(array[rows]) for array in arrays
    ]
    return inputs(columns, taken)


def _shipped(source: FolderSource, name: str, spark: SparkSession) -> Prepared:
    """Rows of the driver for workers elsewhere: Spark sends them, each packed into bytes."""
    from kindler.spark.frames import Feed, packed_frame

    arrays = Spool.open(source.folder).arrays

    def packed(column: Column) -> Column:
        array = arrays[column.name]
        if isinstance(array, Ragged):
            return column
        return replace(column, dtype=array.dtype.name, shape=array.shape[1:])

    columns = source.columns.changed(packed)
    frame = packed_frame(spark, {column.name: arrays[column.name] for column in columns.all})
    return DeliveredSource(columns, name), Feed(name=name, frame=frame, columns=columns)


class LoaderInput(Input):
    """A torch `DataLoader`, a `tf.data.Dataset`, a Keras `PyDataset`, or a function that makes batches."""

    has_columns = False
    name = "code"

    @staticmethod
    def accepts(data: Any) -> bool:
        return is_stream(data)

    def source(self, request: SourceRequest) -> Prepared:
        allow_nan, weights = request.columns.allow_nan or False, request.row_weights
        return stream_source(self.data, config=request.config, weights=weights, allow_nan=allow_nan), None

    def score_complaints(self, options: PredictOptions) -> list[str]:
        complaint = (
            "predict does not take functions or data loaders; pass a Spark DataFrame, an XShards, a Parquet"
            " path with output_path, arrays, a pandas DataFrame or a pyarrow Table."
        )
        return [complaint]
