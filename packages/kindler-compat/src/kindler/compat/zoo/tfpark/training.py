"""An `Estimator` as TFPark's classes use it: with BigDL's summaries, counters and triggers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np

from kindler import Estimator
from kindler.compat.bigdl.optim.summaries import Recorder, Summary
from kindler.compat.bigdl.optim.triggers import Trigger
from kindler.compat.estimators import from_graph
from kindler.compat.flat import FlatEstimator
from kindler.compat.zoo.tfpark.rows import Columns
from kindler.errors import ConfigError
from kindler.estimator.run import RunObserver
from kindler.files import folder_at
from kindler.spark.session import running
from kindler.spark.versions import is_connect
from kindler.train.options import EvaluateOptions, FitOptions
from kindler.train.triggers import Progress

_NUMPY_DTYPES = {
    "double": "float64",
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
}
_CHECKPOINT = re.compile(r"checkpoint-(\d+)-epoch-\d+-step-(\d+)\.kindler")


Arranged = Callable[[Columns], Columns] | None


class TFParkEstimator(FlatEstimator):
    """An estimator that writes `TrainSummary` and `ValidationSummary` while it trains."""

    train_summary: Summary | None = None
    val_summary: Summary | None = None

    @property
    def counters(self) -> tuple[int, int]:
        return int(self._replica.epoch), int(self._replica.step)

    @property
    def optimizer(self) -> Any:
        """The optimizer of a torch model, as the last run left it."""
        return self._replica.optimizer

    def _observers(self, options: FitOptions | EvaluateOptions) -> Sequence[RunObserver]:
        recorded = isinstance(options, FitOptions) and (self.train_summary or self.val_summary)
        return [Recorder(self.train_summary, self.val_summary)] if recorded else []

    def fit_dataset(self, dataset: Any, arranged: Arranged = None, **options: Any) -> Any:
        """Train over a `TFDataset`, whose columns `arranged` changes."""
        columns, checked = dataset.columns(), dataset.validation_columns()
        if arranged is not None:
            columns, checked = arranged(columns), None if checked is None else arranged(checked)
        return self.fit(
            columns.data,
            batch_size=dataset.batch_size,
            validation_data=None if checked is None else checked.data,
            shuffle=dataset.shuffle,
            **columns.options(),
            **options,
        )

    def evaluate_dataset(self, dataset: Any, arranged: Arranged = None) -> dict[str, Any]:
        columns = dataset.columns() if arranged is None else arranged(dataset.columns())
        rows = dataset.rows_per_call * dataset.total_core_num
        return self.evaluate(columns.data, batch_size=rows, verbose=0, **columns.options())


def graph_estimator(**options: Any) -> TFParkEstimator:
    """An estimator of tensors of a graph; see `kindler.Estimator.from_graph`."""
    made = from_graph(TFParkEstimator, **{"engine": engine(), **options})
    assert isinstance(made, TFParkEstimator)
    return made


class Since(Trigger):
    """A trigger whose counts go on from the epochs and steps of an optimizer that was used before."""

    def __init__(self, trigger: Trigger, epochs: int, steps: int) -> None:
        self.trigger, self.epochs, self.steps = trigger, epochs, steps

    def __call__(self, progress: Progress) -> bool:
        epoch, step = progress.epoch + self.epochs, progress.step + self.steps
        return self.trigger(replace(progress, epoch=epoch, step=step))


def find_checkpoint(path: str | PathLike[str], version: int | None = None) -> str:
    """A checkpoint's file: `path` itself, or that of step `version` (None is the newest) in this folder."""
    if os.path.isfile(path):
        return os.fspath(path)
    if version is None:
        newest = Estimator.latest_checkpoint(path)
        if newest is None:
            raise ConfigError(f"there is no checkpoint in {path}.")
        return newest
    folder = folder_at(path)
    matches = [match for name in sorted(folder.names()) if (match := _CHECKPOINT.fullmatch(name))]
    written = {int(match[2]): match[0] for match in matches}  # the newest of each step
    if version not in written:
        raise ConfigError(f"there is no checkpoint of step {version} in {path}; there are {sorted(written)}.")
    return folder.path(written[version])


def engine() -> Any:
    """Spark where it runs, otherwise processes of this machine."""
    return "local" if running() is None else "spark"


def predicted_rdd(estimator: Estimator, dataset: Any) -> Any:
    """The predictions for a `TFDataset`, as an RDD of arrays, or of lists of them for several outputs.

    Without Spark, a list. With Spark Connect, which has no RDDs, a list for arrays and a DataFrame with the
    outputs alone for a DataFrame.
    """
    if dataset.rows is None or not dataset.rows.predicts:
        raise ConfigError(
            "a tf.data.Dataset cannot be predicted.\nHint: use from_rdd, from_ndarrays or from_dataframe."
        )
    columns = dataset.columns()
    options, data = columns.options(labels=False), columns.data
    if not isinstance(data, dict):  # other columns may have names that outputs get
        data = data.select(*map(_quoted, columns.features))
    scored = estimator.predict(data, batch_size=dataset.rows_per_call, verbose=0, **options)
    if isinstance(data, dict):
        if isinstance(scored, Mapping):
            scored = [value for name, value in scored.items() if name not in data]
        outputs = list(scored) if isinstance(scored, list | tuple) else [scored]
        single = len(outputs) == 1
        rows = [parts[0] if single else list(parts) for parts in zip(*outputs, strict=True)]
        session = running()
        return rows if session is None or is_connect(session) else session.sparkContext.parallelize(rows)
    names = [name for name in scored.columns if name not in data.columns]
    chosen = scored.select(*map(_quoted, names))
    if is_connect(scored.sparkSession):
        return chosen
    dtypes = [_numpy_dtype(scored.schema[name].dataType.simpleString()) for name in names]

    def arrays(row: Any) -> Any:
        found = [np.array(value, dtype) for value, dtype in zip(row, dtypes, strict=True)]
        return found[0] if len(found) == 1 else found

    return chosen.rdd.map(arrays)


def stacked(rows: Any) -> Any:
    """What `predicted_rdd` returns as an array, or a list of arrays for several outputs."""
    elements = rows if isinstance(rows, list) else rows.collect()
    if elements and isinstance(elements[0], list):
        return [np.stack(parts) for parts in zip(*elements, strict=True)]
    return np.stack(elements)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _numpy_dtype(kind: str) -> str:
    inner = kind.replace("array<", "").rstrip(">")
    return _NUMPY_DTYPES.get(inner, "float32")
