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

from kindler.data import parquet
from kindler.data.batches import inputs
from kindler.data.columns import Columns, to_numpy
from kindler.data.plan import ColumnOptions
from kindler.data.sources import arrow_source, parquet_source
from kindler.data.spool import Spool
from kindler.engine.gang import Listener
from kindler.engine.supervisor import Job
from kindler.errors import ConfigError, DataError
from kindler.inference.files import FileTask
from kindler.inference.outputs import arrow_type, to_arrow
from kindler.inference.predictor import Predictor
from kindler.inputs import Ingest, choose_engine, is_frame, is_path
from kindler.train.progress import Progress

__all__ = ["Request", "predict", "predict_files"]

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
        return Predictor(
            framework=self.framework,
            spec=self.spec,
            state=self.state,
            columns=Columns(features=columns.features, labels=(), stack_features=columns.stack_features),
            batch_size=self.batch_size,
            output_cols=self.output_cols,
            device=self.device,
            seed=self.seed,
            threads=threads,
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
    _refuse_taken(request.output_cols or ("prediction",), parquet.schema(files).names)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        task = FileTask(predictor=request.predictor(source.columns), files=files, folder=beside)
        with Progress(verbose=verbose, what="predict", unit="rows") as progress:
            show = _Shown(progress, files.rows)
            run(replace(job, buffers=(cloudpickle.dumps(task),)), show)
        os.chmod(beside, 0o755)
        os.rename(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return str(target)


class _Shown:
    """Adds up what the workers have scored."""

    def __init__(self, progress: Progress, rows: int) -> None:
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
    from kindler.spark.frames import arrow_types, plain_parquet
    from kindler.spark.predict import first_row, predict_frame

    types = arrow_types(frame)
    columns = request.options.plan(types)
    predictor = request.predictor(columns, threads=1)
    files = None
    if request.ingest != "inline":
        files = plain_parquet(frame, columns.names, must=request.ingest == "direct")
    sample = _zeros(columns, request.layout, types)
    if sample is None:
        if frame.isStreaming:
            raise ConfigError(
                "how wide the columns of a stream are is only known once rows arrive.\n"
                "Hint: predict(..., shapes={column: (width,)}) says it; fit() on such columns does too."
            )
        sample = _sample(first_row(frame, columns), columns)
    outputs = next(predictor.score([inputs(columns, sample)]))
    names = predictor.names(len(outputs))
    _refuse_taken(names, frame.columns)
    return predict_frame(
        frame,
        predictor,
        names=names,
        types=[arrow_type(output.dtype, output.ndim) for output in outputs],
        convert=to_arrow,
        direct=files is not None,
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
    with tempfile.TemporaryDirectory(prefix="kindler-driver-") as folder:
        source = arrow_source(data, request.options, scratch=Path(folder))
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
    return _like(data, dict(zip(predictor.names(len(outputs)), outputs, strict=True)))


def _like(data: Any, outputs: dict[str, np.ndarray[Any, Any]]) -> Any:
    """The outputs in the form in which the data came."""
    if isinstance(data, dict):
        _refuse_taken(outputs, data)
        return {**data, **outputs}
    if isinstance(data, pa.RecordBatch | pa.Table):
        _refuse_taken(outputs, data.schema.names)
        table = pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else data
        for name, output in outputs.items():
            table = table.append_column(name, to_arrow(output))
        return table
    if hasattr(data, "assign"):
        _refuse_taken(outputs, data.columns)
        return data.assign(**{n: o if o.ndim == 1 else list(o) for n, o in outputs.items()})
    arrays = list(outputs.values())
    return arrays[0] if len(arrays) == 1 else arrays


def _refuse_taken(names: Any, existing: Any) -> None:
    taken = [name for name in names if name in list(existing)]
    if taken:
        raise ConfigError(
            f"the data already has {taken}; predictions would overwrite them.\n"
            "Hint: predict(..., output_cols=[...]) gives them other names."
        )
