"""The files of a column whose rows differ in length: all values, and where each row begins and ends."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from kindler.data.columns import Array, Column, Where
from kindler.data.ragged import Ragged
from kindler.data.raw_files import BUFFER_BYTES, mapped_file, shared_file
from kindler.errors import DataError, naming_full_disk


def mapped_ragged(
    file: BinaryIO, offsets: BinaryIO, rows: int, kind: str | None, shape: Sequence[int | None] | None
) -> Ragged:
    """A column in its two files, without reading them."""
    if not rows or kind is None or shape is None:
        return Ragged.empty(kind or "float32", shape if shape is not None else (None,))
    bounds = mapped_file(offsets, rows + 1, "int64", [])
    if kind in ("str", "bytes"):
        flat = mapped_file(file, int(bounds[-1]), "uint8", [])
        return Ragged(flat, bounds, kind=kind, inner=tuple(shape))
    inner = [int(size or 0) for size in shape[1:]]
    return Ragged(mapped_file(file, int(bounds[-1]), kind, inner), bounds, kind=kind, inner=tuple(inner))


class RaggedFile:
    """The files while they are written; one of a `SpoolWriter`'s columns.

    Where several write, nobody knows how many values come before the own ones: they go to a file of one's
    own, which `join` copies to its place once all have counted.

    Attributes:
        column: The column.
        dtype: The dtype of its values, or "str" or "bytes"; None before any came.
        count: How many values were written here.
    """

    def __init__(self, column: Column, name: str, *, first: int = 0) -> None:
        self.column, self.dtype, self.count = column, None, 0  # type: tuple[Column, str | None, int]
        self._shape: list[int | None] | None = None
        self._name, self._offsets_name = name, f"{name[:-4]}.offsets.bin"
        self._first, self._ends = first, list[Array]()
        self._file: BinaryIO | None = None
        self._own: IO[bytes] | None = None
        self._offsets: BinaryIO | None = None
        self._folder = Path()

    def open(self, folder: Path) -> None:
        self._folder = folder
        self._offsets = shared_file(folder / self._offsets_name)
        self._file = shared_file(folder / self._name)

    def match(self, rows: Ragged, where: Where) -> None:
        """The first values set dtype and inner shape; later ones must agree."""
        kind, shape = rows.entry
        if not len(rows.flat) and self.dtype is not None:
            return  # rows without values do not say what shape their values would have
        if self.count and (kind, shape) != (self.dtype, self._shape):
            raise DataError(
                f"has values of {kind} and shape {shape[1:]} where earlier rows have {self.dtype} of"
                f" {(self._shape or [])[1:]}; all values must have the same dtype and shape.",
                column=self.column.name,
                row=where(0),
            )
        self.dtype, self._shape = kind, shape

    def write(self, rows: Ragged) -> None:
        whole = rows.take(slice(None))
        if self._first and self._own is None:
            # Without a name, and gone when it is closed.
            self._own = tempfile.TemporaryFile(dir=self._folder, buffering=BUFFER_BYTES)  # noqa: SIM115
        self._ends.append(whole.offsets[1:] + self.count)
        self.count += int(whole.offsets[-1])
        if whole.flat.nbytes:
            values = np.ascontiguousarray(whole.flat).reshape(-1).view(np.uint8)
            with naming_full_disk(str(self._folder / self._name), values.nbytes):
                (self._own or self._opened(self._file)).write(values.data)

    def join(self, before: int) -> None:
        """Put what was written here behind the `before` values of others."""
        if self._own is not None:
            file = self._opened(self._file)
            self._own.seek(0, os.SEEK_END)
            width = self._own.tell() // max(1, self.count)
            self._own.seek(0)
            file.seek(before * width)
            with naming_full_disk(str(self._folder / self._name)):
                shutil.copyfileobj(self._own, file, 1 << 20)
            self._own.close()
            self._own = None
        self._write_offsets(before)

    def _write_offsets(self, before: int) -> None:
        offsets = self._opened(self._offsets)
        ends = np.concatenate([np.zeros(1, np.int64), *self._ends]) + before
        offsets.seek(8 * self._first)
        with naming_full_disk(str(self._folder / self._offsets_name), ends.nbytes):
            offsets.write(ends.data)  # the first of them is what the writer before has written last
        self._ends = []

    def flush(self) -> None:
        self._opened(self._file).flush()
        self._opened(self._offsets).flush()

    def whole(self, rows: int, dtype: str | None, shape: Sequence[int | None] | None) -> Ragged:
        """The column of all writers, through the files that are open."""
        return mapped_ragged(self._opened(self._file), self._opened(self._offsets), rows, dtype, shape)

    def close(self) -> None:
        if self._offsets is not None and self._ends and self._own is None:
            self._write_offsets(0)
        for file in (self._own, self._file, self._offsets):
            if file is not None:
                with naming_full_disk(str(self._folder / self._name)):
                    file.close()
        self._own = self._file = self._offsets = None

    def manifest(self) -> dict[str, Any]:
        return {
            "name": self.column.name,
            "file": self._name,
            "dtype": self.dtype,
            "shape": self._shape,
            "offsets": self._offsets_name,
        }

    @staticmethod
    def _opened(file: BinaryIO | None) -> BinaryIO:
        if file is None:
            raise ValueError("use a SpoolWriter inside a `with` block.")
        return file
