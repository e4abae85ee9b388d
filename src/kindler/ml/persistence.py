"""Saving and loading stages: JSON metadata as Spark writes it, and the model's files beside it.

As Spark's own models do, a stage keeps its data in Parquet beside its metadata. So it can be saved wherever
Spark can write, on classic sessions and on Spark Connect, where this process may not see the files at all. A
row is a piece of a file: its name, where the piece begins, and its bytes.

What a model's files may do when they are read is decided by its kind, see `kindler.models`; code runs, and a
pickle is read, only within `trusting()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)
from pyspark.sql import is_remote

from kindler.config import Device
from kindler.errors import ConfigError, UntrustedError
from kindler.estimator.estimator import Estimator
from kindler.estimator.model import FrameworkModel
from kindler.spark.versions import from_arrow
from kindler.store.names import check_path
from kindler.temporary import Folder

_FACTS = "kindler"
_FORMAT = 1
_RECIPE = "training.pickle"
_PIECE = 8 << 20
_PARTITION = 256 << 20  # a partition is collected at once
_SCHEMA = pa.schema([("name", pa.string()), ("begin", pa.int64()), ("bytes", pa.binary())])
# Names that were written before 0.2.
_RENAMED_PARAMS = {"sync": "strategy", "syncOptions": "strategyOptions"}
_RENAMED_STRATEGIES = {"sharded": "zero1", "rounds": "local_sgd"}
_trusted: ContextVar[bool] = ContextVar("kindler_ml_trusted", default=False)


@contextmanager
def trusting() -> Iterator[None]:
    """Allow reading stages whose model is, or names, code: `with kindler.ml.trusting():
    PipelineModel.load(path)`.

    Needed for PyTorch models of your own classes, which are imported by name, and for exported programs. Use
    it only for files from people whose code you would run.
    """
    token = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(token)


def is_trusted() -> bool:
    return _trusted.get()


class SavedStage(MLWritable, MLReadable[Any]):
    """A stage that is saved with files of its own.

    A subclass says what its files are; its class is named in the metadata as `_public`. Params in `_in_files`
    are large, and are among the files instead of in the metadata.
    """

    _public: str
    _in_files: tuple[str, ...] = ()

    def _write_files(self, folder: Path) -> dict[str, Any]:
        """Write the files; returns what `_from_files` must know, as JSON has it."""
        raise NotImplementedError

    @classmethod
    def _from_files(cls, folder: Path, facts: dict[str, Any]) -> Any:
        """A stage without its params. The folder is gone afterwards. Both may come from anybody."""
        raise NotImplementedError

    def write(self) -> StageWriter:
        """The writer that saves this stage: `stage.write().overwrite().save(path)`."""
        return StageWriter(self)

    @classmethod
    def read(cls) -> StageReader:
        """The reader that loads a stage of this class: `read().load(path)`."""
        return StageReader(cls)


class StageWriter(MLWriter):
    """Saves a stage."""

    def __init__(self, instance: SavedStage) -> None:
        super().__init__()
        self.instance = instance

    def _handleOverwrite(self, path: str) -> None:
        if not is_remote():
            super()._handleOverwrite(path)
            return
        from pyspark.ml.connect.readwrite import RemoteMLWriter

        RemoteMLWriter.handleOverwrite(path, True)

    def saveImpl(self, path: str) -> None:
        stage: Any = self.instance
        with Folder("kindler-stage-") as folder:
            facts = stage._write_files(folder)  # what cannot be saved is refused before anything is written
            extra = {"class": stage._public, _FACTS: {"format": _FORMAT, **facts}}
            params = {p.name: v for p, v in stage._paramMap.items() if p.name not in stage._in_files}
            DefaultParamsWriter.saveMetadata(stage, path, self.sparkSession, extra, params)
            _write_folder(self.sparkSession, folder, f"{path.rstrip('/')}/data")


class StageReader(MLReader[Any]):
    """Loads a stage."""

    def __init__(self, cls: type[SavedStage]) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        """Load the stage that was saved at a path.

        Raises:
            ConfigError: The path holds another stage, or none of Kindler's.
            UntrustedError: Its model is code, and this is not within `kindler.ml.trusting()`.
        """
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        facts = metadata.get(_FACTS)
        if metadata.get("class") != self.cls._public or not isinstance(facts, dict):
            raise ConfigError(f"{path} has a {metadata.get('class')!r}, not a {self.cls._public!r}.")
        if facts.get("format") != _FORMAT:
            raise ConfigError(
                f"{path} has format {facts.get('format')!r}; this version of Kindler reads {_FORMAT}."
            )
        with Folder("kindler-stage-") as folder:
            _read_folder(self.sparkSession, f"{path.rstrip('/')}/data", folder)
            try:
                stage = self.cls._from_files(folder, facts)
            except UntrustedError as exc:
                raise UntrustedError(
                    what=f"the stage at {path}: {exc.what}",
                    reason=f"{exc.reason} (for stages: with kindler.ml.trusting(): ...)",
                ) from None
        stage._resetUid(metadata["uid"])
        for params in ("paramMap", "defaultParamMap"):
            metadata[params] = _renamed(metadata.get(params, {}))
        DefaultParamsReader.getAndSetParams(stage, metadata)
        return stage


def _renamed(params: dict[str, Any]) -> dict[str, Any]:
    if "sync" in params:
        params = params | {"sync": _RENAMED_STRATEGIES.get(params["sync"], params["sync"])}
    return {_RENAMED_PARAMS.get(name, name): value for name, value in params.items()}


def write_recipe(estimator: Estimator, folder: Path) -> bool:
    """Write what trains the model of a stage that was not fitted; returns whether that was possible. It is
    code of the user's, in a pickle; what needs no trust is in `FrameworkKind.describe_training`."""
    model = estimator._model
    recipe = {
        "model": (model.framework, model.packed, model.extra_preload),
        "options": estimator._arguments(),
        "state": estimator._live.state,
        "record": estimator._record,
    }
    try:
        (folder / _RECIPE).write_bytes(cloudpickle.dumps(recipe))
    except Exception:  # noqa: BLE001 - objects of the user's that cannot be pickled; the model is saved without
        return False
    return True


def read_recipe(folder: Path) -> Estimator | None:
    """The estimator again; None if it was saved without. Runs code of the file."""
    if not (folder / _RECIPE).is_file():
        return None
    recipe = cloudpickle.loads((folder / _RECIPE).read_bytes())
    options = recipe["options"]
    if "preparation" in options:  # written before 0.2
        on = Device(options["device"], share=options.pop("share_gpus"))
        options |= {"prepare": options.pop("preparation"), "device": on}
    estimator = Estimator(FrameworkModel.unpacked(*recipe["model"]), **options)
    if recipe["state"]:
        estimator._live.state = recipe["state"]
    if "columns" in recipe:  # written by 0.2
        recipe["record"] = dict(zip(("signature", "history"), recipe["columns"], strict=True))
    return estimator._restore_record(recipe["record"])


def _write_folder(spark: Any, folder: Path, path: str) -> None:
    """Write all files below a folder to a Parquet folder that does not exist yet."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    rows = [(file.relative_to(folder).as_posix(), *piece) for file in files for piece in _pieces(file)]
    columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
    table = pa.table([list(column) for column in columns], schema=_SCHEMA)
    partitions = max(1, -(-table.nbytes // _PARTITION))
    from_arrow(spark, table).coalesce(partitions).write.option("compression", "zstd").parquet(path)


def _read_folder(spark: Any, path: str, folder: Path) -> None:
    for row in spark.read.parquet(path).select("name", "begin", "bytes").toLocalIterator():
        file = folder / check_path(row["name"])
        if row["begin"] < 0:
            raise ConfigError(f"{path}: a piece of the file {row['name']!r} begins at {row['begin']}.")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        with file.open("r+b") as out:
            out.seek(row["begin"])
            out.write(row["bytes"])


def _pieces(file: Path) -> Iterator[tuple[int, bytes]]:
    begin = 0
    with file.open("rb") as content:
        while piece := content.read(_PIECE):
            yield begin, piece
            begin += len(piece)
    if not begin:
        yield 0, b""
