"""Scoring from the driver: what was handed in decides where the model runs and what comes back."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from kindler.data import datasets, parquet
from kindler.data.batches import inputs
from kindler.data.column_options import ColumnOptions
from kindler.data.columns import Columns, conform, to_numpy
from kindler.data.shards.codec import pack
from kindler.data.shards.reading import values
from kindler.data.sources import arrow_source, parquet_source
from kindler.data.spool import Spool
from kindler.engine.cores import usable_cores
from kindler.engine.monitor import Listener
from kindler.engine.supervisor import Job
from kindler.errors import ConfigError, DataError
from kindler.estimator.inputs import Ingest, choose_engine, is_frame, is_path
from kindler.inference.files import FileTask
from kindler.inference.outputs import arrow_type, like, refuse_taken, to_arrow
from kindler.inference.predictor import Predictor, Recipe
from kindler.inference.shards import ShardScorer
from kindler.temporary import Folder
from kindler.train.progress import ProgressBar
from kindler.xshards import XShards, as_input

__all__ = ["Request", "predict", "predict_files", "predict_shards"]

_PROBE_ROWS = 2  # a model that squeezes its output would lose the rows of a single one


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to score with, and how."""

    framework: str
    spec: bytes
    state: bytes
    options: ColumnOptions
    layout: Mapping[str, Any]
    batch_size: int
    output_cols: tuple[str, ...] | None
    device: str
    seed: int
    ingest: Ingest

    def predictor(self, columns: Columns, *, threads: int | None = None) -> Predictor:
        recipe = Recipe(
            framework=self.framework,
            spec=self.spec,
            state=self.state,
            feature_names=tuple(column.name for column in columns.features),
            device=self.device,
            seed=self.seed,
            threads=threads,
        )
        return Predictor(
            recipe=recipe,
            columns=Columns(features=columns.features, labels=(), stack_features=columns.stack_features),
            batch_size=self.batch_size,
            output_cols=self.output_cols,
        )


def predict(data: Any, request: Request) -> Any:
    """Score `data`; the same kind comes back."""
    request = replace(request, options=replace(request.options, label_cols=None, need_labels=False))
    choose_engine("auto", data)  # complains about what is no data at all
    if is_frame(data):
        return _frame(data, request)
    if is_path(data):
        raise ConfigError(
            f"predict({data!r}): the scored rows of Parquet files go to files again.\n"
            "Hint: predict(path, output_path=...) says where; or read it with Spark and score the frame."
        )
    return _in_memory(data, request)


def predict_files(
    data: Any,
    request: Request,
    output_path: str | PathLike[str],
    *,
    run: Callable[[Job, Listener], Any],
    job: Job,
    verbose: int,
) -> str:
    """Score Parquet files into a Parquet dataset: all columns, the outputs appended, order kept."""
    request = replace(request, options=replace(request.options, label_cols=None, need_labels=False))
    if not is_path(data):
        raise ConfigError(
            "output_path goes with a Parquet path; a frame is written with predict(frame).write."
        )
    target = Path(output_path).absolute()
    if target.exists():
        raise ConfigError(f"output_path={str(output_path)!r} exists already; nothing is overwritten.")
    files = parquet.inspect(data)
    source = parquet_source(files, request.options)
    refuse_taken(request.output_cols or ("prediction",), parquet.schema(files).names)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        task = FileTask(predictor=request.predictor(source.columns), files=files, folder=beside)
        with ProgressBar(verbose=verbose, what="predict", unit="rows") as progress:
            show = _Shown(progress, files.rows)
            run(replace(job, buffers=(cloudpickle.dumps(task),)), show)
        os.chmod(beside, 0o755)
        os.rename(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return str(target)


def predict_shards(shards: XShards, request: Request, *, job: Job, verbose: int) -> XShards:
    """The shards with the model's outputs, in the same home.

    Args:
        shards: What to score.
        request: With what, and how.
        job: The workers of the local home.
        verbose: 0 shows nothing of what they print.
    """
    request = replace(request, options=replace(request.options, label_cols=None, need_labels=False))
    chosen = as_input.choose(shards, request.options)
    threads = 1
    if shards.home == "local":
        workers = min(job.size, shards.num_partitions())
        threads = job.threads or max(1, usable_cores() // workers)
    scorer = ShardScorer(
        predictor=request.predictor(chosen.columns, threads=threads),
        schema=chosen.schema,
        sample=_shard_sample(shards, chosen, request.layout),
    )
    with ProgressBar(verbose=verbose, what="predict", unit="rows") as progress:
        return as_input.worked(shards, scorer, job, _Shown(progress, len(shards)))


def _shard_sample(
    shards: XShards, chosen: as_input.Chosen, layout: Mapping[str, Any]
) -> tuple[np.ndarray[Any, Any], ...] | None:
    """Inputs for shards without rows, where there are any; None where nobody knows how wide columns are."""
    columns = chosen.columns
    if all(as_input.row_counts(shards)):
        return None
    if chosen.schema is None:
        given = [(chosen.arrays[c.name].shape, chosen.arrays[c.name].dtype, c) for c in columns.features]
        zeros = [conform(np.zeros((_PROBE_ROWS, *s), dtype), c, where=str) for s, dtype, c in given]
        return inputs(columns, zeros)
    types = {field.name: field.type for field in chosen.schema}
    sample = _zeros(columns, layout, types)
    if sample is None and len(shards):
        row = values(pack(shards.head(1)), columns.names, chosen.schema)
        sample = _sample(pa.table(row), columns)
    return None if sample is None else inputs(columns, sample)


class _Shown:
    """Adds up what the workers have scored."""

    def __init__(self, progress: ProgressBar, rows: int) -> None:
        self._progress, self._rows = progress, rows
        self._done: dict[int, int] = {}

    def __call__(self, event: Any) -> None:
        if event.kind == "log":
            self._progress.log(event.rank, event.fields["line"])
            return
        if event.fields["name"] != "progress":
            return
        self._done[event.rank] = event.fields["step"]
        done = sum(self._done.values())
        self._progress.report({"name": "progress", "epoch": 1, "step": done, "steps": self._rows})


def _frame(frame: Any, request: Request) -> Any:
    from kindler.spark.direct_scan import plain_parquet
    from kindler.spark.frames import arrow_types, refuse_ambiguous
    from kindler.spark.predict import first_row, predict_frame

    types = arrow_types(frame)
    columns = request.options.plan(types)
    refuse_ambiguous(frame, columns.names)
    predictor = request.predictor(columns, threads=1)
    scan = None
    if request.ingest != "inline":
        scan = plain_parquet(frame, columns.names, must=request.ingest == "direct")
    sample = _zeros(columns, request.layout, types)
    if sample is None:
        if frame.isStreaming:
            raise ConfigError(
                "how wide the columns of a stream are is only known once rows arrive.\n"
                "Hint: predict(..., shapes={column: (width,)}) says it; fit() on such columns does too."
            )
        sample = _sample(first_row(frame, columns), columns)
    # The driver's own threads are none of the predictor's business.
    outputs = next(predictor.with_threads(None).score([inputs(columns, sample)]))
    names = predictor.names(len(outputs))
    folded = {column.lower() for column in frame.columns}  # Spark would put one in the place of the other
    refuse_taken(names, [*frame.columns, *(name for name in names if name.lower() in folded)])
    return predict_frame(
        frame,
        predictor,
        names=names,
        types=[arrow_type(output.dtype, output.ndim) for output in outputs],
        convert=to_arrow,
        stored=scan.columns if scan is not None else None,
    )


def _zeros(columns: Columns, layout: Mapping[str, Any], types: Mapping[str, Any]) -> list[Any] | None:
    """A few rows of the right shape, where it is known without looking at a row."""
    made = []
    for column in columns.features:
        known = layout.get(column.name)
        scalar = types[column.name] is not None and not pa.types.is_nested(types[column.name])
        if known is not None and column.shape is None and column.dtype is None:
            dtype, shape = known
        elif scalar and not pa.types.is_binary(types[column.name]):
            empty = to_numpy(pa.array([], types[column.name]), column, where=str)
            dtype, shape = empty.dtype, empty.shape[1:]
        elif column.shape is not None:
            dtype, shape = column.dtype or "float32", column.shape
        else:
            return None
        made.append(np.zeros((_PROBE_ROWS, *shape), dtype))
    return made


def _sample(row: pa.Table, columns: Columns) -> list[Any]:
    if not row.num_rows:
        raise DataError("the frame has no rows, so the width of its columns is not known.")
    arrays = [to_numpy(row.column(c.name), c, where=lambda i: i) for c in columns.features]
    return [np.repeat(array, _PROBE_ROWS, axis=0) for array in arrays]


def _in_memory(data: Any, request: Request) -> Any:
    rows = datasets.table(data) if datasets.is_dataset(data) else data
    with Folder("kindler-driver-") as folder:
        source = arrow_source(rows, request.options, scratch=folder)
        spool = Spool.open(source.folder)
        columns = source.columns
        arrays = [spool.arrays[column.name] for column in columns.features]
        predictor = request.predictor(columns)
        starts = range(0, spool.rows, request.batch_size)
        chunks = (
            inputs(columns, [np.array(array[i : i + request.batch_size]) for array in arrays]) for i in starts
        )
        parts = list(predictor.score(chunks))
        outputs = [np.concatenate(column) for column in zip(*parts, strict=True)]
    made = dict(zip(predictor.names(len(outputs)), outputs, strict=True))
    if not datasets.is_dataset(data):
        return like(data, made, named=predictor.outputs_are_named())
    refuse_taken(made, rows.schema.names)
    return datasets.with_columns(data, rows, {name: to_arrow(output) for name, output in made.items()})
