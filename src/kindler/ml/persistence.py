"""Saving and loading stages: JSON metadata as Spark writes it, and the model's files beside it.

What a model's files may do when they are read is decided by its kind, see `kindler.models`; code runs, and a
pickle is read, only within `trusting()`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, TypeVar

from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)
from pyspark.sql import is_remote

from kindler.errors import ConfigError, UntrustedError
from kindler.ml.files import read_folder, write_folder
from kindler.temporary import Folder

T = TypeVar("T", bound="SavedStage")

_FACTS = "kindler"
_FORMAT = 1


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
        """What saves this stage: `stage.write().overwrite().save(path)`."""
        return StageWriter(self)

    @classmethod
    def read(cls) -> StageReader[Any]:
        """What loads a stage of this class: `read().load(path)`."""
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
            write_folder(self.sparkSession, folder, _data(path))


class StageReader(MLReader[Any], Generic[T]):
    """Loads a stage."""

    def __init__(self, cls: type[T]) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        """Load the stage that was saved at a path.

        Raises:
            ConfigError: Another stage was saved there, or none of Kindler's.
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
            read_folder(self.sparkSession, _data(path), folder)
            try:
                stage = self.cls._from_files(folder, facts)
            except UntrustedError as exc:
                raise UntrustedError(
                    what=f"the stage at {path}: {exc.what}",
                    reason=f"{exc.reason} (for stages: with kindler.ml.trusting(): ...)",
                ) from None
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        return stage


def _data(path: str) -> str:
    return f"{path.rstrip('/')}/data"
