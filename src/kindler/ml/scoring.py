"""A model of any kind as a value that travels to executors and scores rows there, and the columns it makes.

Spark ML expects single numbers as doubles, and several as a vector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, NumericType

from kindler.data.columns import ColumnPlan
from kindler.engine.placement import TaskPlace, enter_program_path, program_path
from kindler.errors import ConfigError
from kindler.inference.loaded import LoadedModels
from kindler.inference.predictor import fixed_batches
from kindler.models.loaded import load_files
from kindler.models.predictor import Predictor
from kindler.models.signature import Arrays, fit, from_columns
from kindler.spark.frames import column
from kindler.temporary import Folder

PREDICTION_TYPES = ("auto", "label", "array")

Array = np.ndarray[Any, Any]

_loaded: LoadedModels[Predictor] = LoadedModels()


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Makes columns of outputs; travels to the executors.

    Attributes:
        kind: One of `PREDICTION_TYPES`.
        threshold: The value from which a single output is the label 1.
        raw: Whether the output itself follows as a second column.
    """

    kind: str = "auto"
    threshold: float = 0.5
    raw: bool = False

    def __call__(self, outputs: list[Array]) -> list[Array]:
        if self.kind == "auto" and not self.raw:
            return [_plain(output) for output in outputs]
        if self.kind == "array" and not self.raw:
            return outputs
        if len(outputs) != 1:
            raise ConfigError(
                f"the model has {len(outputs)} outputs; predictionType='label' and rawPredictionCol need one."
            )
        (output,) = outputs
        if self.kind == "label":
            first = self._label(output)
        else:
            first = output if self.kind == "array" else _plain(output)
        return [first, _margins(output)] if self.raw else [first]

    def _label(self, output: Array) -> Array:
        wide = _wide(output)
        labels = wide[:, 0] >= self.threshold if wide.shape[1] == 1 else wide.argmax(axis=1)
        return labels.astype(np.float64)


def as_vectors(frame: DataFrame, names: list[str]) -> DataFrame:
    """The frame with its arrays of numbers among these columns as vectors of Spark ML."""
    for one in frame.schema.fields:
        kind = one.dataType
        if one.name in names and isinstance(kind, ArrayType) and isinstance(kind.elementType, NumericType):
            frame = frame.withColumn(one.name, array_to_vector(column(one.name)))
    return frame


def _plain(output: Array) -> Array:
    """One number a row as a double, several as doubles; what is neither stays as it is."""
    if output.dtype.kind not in "biuf" or output.ndim > 2:
        return output
    flat = output[:, 0] if output.ndim == 2 and output.shape[1] == 1 else output
    return flat.astype(np.float64)


def _margins(output: Array) -> Array:
    """Spark's evaluators take a margin for each class: a single output speaks for 1 and against 0."""
    wide = _wide(output)
    return np.concatenate([-wide, wide], axis=1) if wide.shape[1] == 1 else wide


def _wide(output: Array) -> Array:
    if output.dtype.kind not in "biuf":
        raise ConfigError(f"outputs of type {output.dtype} are not numbers; use predictionType='array'.")
    return output.reshape(len(output), int(np.prod(output.shape[1:]))).astype(np.float64)


@dataclass(frozen=True)
class ModelFiles:
    """A model as its kind wrote it; travels to the executors, and is loaded once per process there.

    Attributes:
        kind: The name of its kind.
        meta: What the kind must know to read it.
        files: Its files, by their names.
        trusted: Whether code in them may run.
    """

    kind: str
    meta: Mapping[str, Any]
    files: Mapping[str, bytes] = field(repr=False)
    trusted: bool = False
    sys_path: tuple[str, ...] = field(default_factory=program_path)

    @classmethod
    def read(cls, kind: str, meta: Mapping[str, Any], folder: Path, *, trusted: bool) -> ModelFiles:
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return cls(kind, dict(meta), files, trusted)

    def write(self, folder: Path) -> None:
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    @cached_property
    def _key(self) -> str:
        digest = hashlib.sha256(repr((self.kind, self.meta, self.trusted)).encode())
        for name, content in self.files.items():
            digest.update(f"{name}:{len(content)}:".encode())
            digest.update(content)
        return digest.hexdigest()

    def predictor(self) -> Predictor:
        return _loaded.get(self._key, self._load)

    def _load(self) -> Predictor:
        enter_program_path(self.sys_path)
        with Folder("kindler-pretrained-") as folder:
            self.write(folder)
            return load_files(self.kind, folder, self.meta, trusted=self.trusted).predictor


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores batches of a frame's columns with such a model; travels to the executors."""

    model: ModelFiles
    columns: ColumnPlan
    batch_size: int
    method: str
    chosen: tuple[str, ...]
    finish: Finish
    lenient: bool = False

    def score(
        self, chunks: Iterable[tuple[Array, ...]], place: TaskPlace | None = None
    ) -> Iterator[list[Array]]:
        """The columns for all rows of `chunks`, in batches of `batch_size`, by a model of this process."""
        predictor = self.model.predictor()
        if self.method not in predictor.methods:
            raise ConfigError(f"the model has no {self.method!r}; it has {', '.join(predictor.methods)}.")
        names = [one.name for one in self.columns.features]
        for batch in fixed_batches(chunks, self.batch_size):
            arrays = self._inputs(predictor, dict(zip(names, batch, strict=True)))
            yield self.finish(self._chosen(predictor.call(fit(predictor.signature, arrays), self.method)))

    def _inputs(self, predictor: Predictor, columns: Arrays) -> Arrays:
        """ColumnPlan by the names of the inputs: their own where they are the same, else in order."""
        wanted = predictor.signature.names
        if len(wanted) > 1 and len(wanted) == len(columns) and set(wanted) != set(columns):
            return dict(zip(wanted, columns.values(), strict=True))
        return from_columns(predictor.signature, columns)

    def _chosen(self, outputs: Arrays) -> list[Array]:
        missing = [name for name in self.chosen if name not in outputs]
        if missing:
            raise ConfigError(f"modelOutputs={missing}: the model has the outputs {sorted(outputs)}.")
        return [outputs[name] for name in self.chosen] if self.chosen else list(outputs.values())
