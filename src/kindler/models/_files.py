"""Models that are files of others, kept as they are, and that declare how many rows they take."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kindler.errors import ConfigError, DataError
from kindler.models.kind import Meta, ModelKind, confined
from kindler.models.predictor import Predictor, free_rows, is_per_row
from kindler.models.signature import Array, Arrays, example


class FileKind(ModelKind):
    """Files that a runtime of their own loads: read, they are a `Predictor`, which is called with data.

    `get(name, local=folder)` copies them out.

    Attributes:
        suffix: How the name of the file ends that is to be loaded.
    """

    suffix: ClassVar[str]

    def file(self, folder: Path, meta: Meta) -> Path:
        """The file to load."""
        path = confined(folder, meta["file"])
        if path.suffix.lower() != self.suffix:
            raise ConfigError(f"{path.name!r} is not a {self.suffix} file; models of kind {self.kind!r} are.")
        return path

    def predictor(self, model: Any) -> Predictor:
        if not isinstance(model, Predictor):  # an object of the framework, which was never stored
            raise ConfigError(f"a {type(model).__qualname__} cannot predict before it is stored.")
        return model

    @staticmethod
    def keep(path: Path, folder: Path) -> None:
        """Copy a file into the folder under its own name."""
        if path.is_symlink() or not path.is_file():
            raise ConfigError(f"{path} is not a file.")
        shutil.copyfile(path, folder / path.name)


class FilePredictor(Predictor):
    """A model that is called with the numbers of rows that it declares.

    One that was made for one number of rows is called with that many each time: the last call is filled up
    with the last row, and what comes of that is cut off. This needs outputs that declare as many rows and,
    for more than one row at a time, a trial that shows that these are the rows of the inputs.
    """

    _rows: int | None = None  # that it takes at a time
    _fills = False

    def run(self, inputs: Arrays) -> Arrays:
        """Compute with as many rows as the model takes."""
        raise NotImplementedError

    def declare(
        self, inputs: Sequence[Sequence[Any] | None], outputs: Sequence[Sequence[Any] | None]
    ) -> None:
        """Take the declared shapes, in which a free length is None or a name; the model must be ready."""
        fixed = {shape[0] for shape in inputs if shape and isinstance(shape[0], int)}
        if len(fixed) != 1:
            self.joins = None if free_rows(inputs, outputs) else False
            return
        self._rows = fixed.pop()
        self._fills = all(shape and shape[0] == self._rows for shape in outputs)
        self.joins = self._fills and self._rows == 1
        if self._fills and self._rows > 1:
            rows = example(self.signature, rows=3)
            try:
                self._fills = (
                    rows is not None and is_per_row(lambda some: self.call(some, "predict"), rows) is True
                )
            except Exception:  # noqa: BLE001 - it does not take what was made up, so nothing is known
                self._fills = False

    def call(self, inputs: Arrays, method: str) -> Arrays:
        rows, size = len(next(iter(inputs.values()))), self._rows
        if size is None or rows == size:
            return self.run(inputs)
        if not self._fills:
            raise DataError(
                f"the model takes {size} rows at a time, but the request has {rows}; it cannot be split, as"
                f" the outputs do not have one row per input row.",
            )
        pieces = [
            self.run({name: _filled(array[first : first + size], size) for name, array in inputs.items()})
            for first in range(0, rows, size)
        ]
        return {name: np.concatenate([piece[name] for piece in pieces])[:rows] for name in pieces[0]}


def _filled(array: Array, size: int) -> Array:
    if len(array) == size:
        return array
    return np.concatenate([array, np.repeat(array[-1:], size - len(array), axis=0)])
