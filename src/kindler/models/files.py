"""Models that are files of others, kept as they are, and that declare how many rows they take."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kindler.errors import ConfigError, DataError
from kindler.models.kind import ModelKind, confined
from kindler.models.predictor import Predictor
from kindler.models.row_independence import free_rows, tried
from kindler.models.signature import Array, Arrays, Signature, example


class FileKind(ModelKind):
    """Files that a runtime of their own loads; `get(name, local=folder)` copies them out.

    Attributes:
        suffix: How the name of the file ends that is to be loaded.
    """

    suffix: ClassVar[str]

    def located(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool) -> Path:
        """The file to load, looked through whoever stored it."""
        path = confined(folder, meta["file"])
        if path.suffix.lower() != self.suffix:
            raise ConfigError(f"{path.name!r} is not a {self.suffix} file; models of kind {self.kind!r} are.")
        return path

    def read(self, folder: Path, meta: Mapping[str, Any], *, trusted: bool, **options: Any) -> Any:
        """Load it with its runtime: a `Predictor`, which is called with data."""
        return self.opened(self.located(folder, meta, trusted=trusted))

    def opened(self, path: Path) -> Predictor:
        """Load a file that was looked through."""
        raise NotImplementedError

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


class DeclaredRows:
    """Calls a model with the numbers of rows that it declares.

    One that was made for one number of rows is called with that many each time: the last call is filled up
    with the last row, and what comes of that is cut off. This needs outputs that declare as many rows and,
    for more than one row at a time, a trial that shows that these are the rows of the inputs.

    Args:
        run: The model.
        signature: What it takes and gives.
        inputs: The declared shape of each input; a free length is None or a name. None if it is not known.
        outputs: The same of the outputs.

    Attributes:
        joins: See `Predictor`.
    """

    def __init__(
        self,
        run: Callable[[Arrays], Arrays],
        signature: Signature,
        inputs: Sequence[Sequence[Any] | None],
        outputs: Sequence[Sequence[Any] | None],
    ) -> None:
        self._run = run
        fixed = {shape[0] for shape in inputs if shape and isinstance(shape[0], int)}
        self._size: int | None = fixed.pop() if len(fixed) == 1 else None
        self.joins: bool | None
        if self._size is None:
            self.joins = None if free_rows(inputs, outputs) else False
            return
        self._fills = all(shape and shape[0] == self._size for shape in outputs)
        self.joins = self._fills and self._size == 1
        if self._fills and self._size > 1:
            self._fills = self._is_per_row(signature)

    def call(self, inputs: Arrays) -> Arrays:
        """The outputs for any number of rows.

        Raises:
            DataError: the model takes one number of rows only, and these are not as many.
        """
        rows, size = len(next(iter(inputs.values()))), self._size
        if size is None or rows == size:
            return self._run(inputs)
        if not self._fills:
            raise DataError(
                f"the model takes {size} rows at a time, and the request has {rows};"
                " its outputs do not have a row for each of them, so they cannot be cut.",
            )
        pieces = [
            self._run({name: _filled(array[first : first + size], size) for name, array in inputs.items()})
            for first in range(0, rows, size)
        ]
        return {name: np.concatenate([piece[name] for piece in pieces])[:rows] for name in pieces[0]}

    def _is_per_row(self, signature: Signature) -> bool:
        rows = example(signature, rows=3)
        try:
            return rows is not None and tried(self.call, rows, 1).per_row is True
        except Exception:  # noqa: BLE001 - it does not take what was made up, so nothing is known
            return False


def _filled(array: Array, size: int) -> Array:
    if len(array) == size:
        return array
    return np.concatenate([array, np.repeat(array[-1:], size - len(array), axis=0)])
