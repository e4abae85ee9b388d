"""tf.train.Example records as TFRecord files; their tables are read without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from kindler import tfrecord
from kindler.data.tfrecord import records
from kindler.errors import ConfigError
from kindler.registry import imported
from kindler.shelves.datasets import Handle, PartsHandler, part_name, parts_in, rechunk
from kindler_tfrecord import framed

_FORMS = ("examples", "arrow", "tf.data")
_EXAMPLE = "tensorflow.core.example.example_pb2"


class TfrecordHandler(PartsHandler):
    """One `tf.train.Example`, or a list of them; and TFRecord files by their path."""

    kind: ClassVar[str] = "tfrecord"
    get_options: ClassVar[frozenset[str]] = frozenset({"as_"})

    def can(self, obj: Any) -> bool:
        return isinstance(obj, Path) or bool(_examples(obj))

    def write(self, obj: Any, folder: Path, *, trusted: bool, **options: Any) -> dict[str, Any]:
        # Read and written again where it is a file, so that what is stored is whole and not compressed.
        source: Iterator[bytes] = (
            records(str(obj))
            if isinstance(obj, Path)
            else (example.SerializeToString() for example in _examples(obj))
        )
        rows = 0
        with (folder / part_name(0, ".tfrecord")).open("wb") as file:
            for record in source:
                file.write(framed(record))
                rows += 1
        return {"rows": [rows], "single": not isinstance(obj, Path | list | tuple)}

    def append_meta(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        return {"rows": [*old["rows"], *new["rows"]], "single": False}

    def open(
        self, folder: Path, meta: Mapping[str, Any], *, as_: str = "examples", **options: Any
    ) -> _Records:
        if as_ not in _FORMS:
            raise ConfigError(f"as_={as_!r}: must be one of {', '.join(_FORMS)}.")
        return _Records(parts_in(folder), meta, as_)


class _Records(Handle):
    def __init__(self, files: Sequence[Path], meta: Mapping[str, Any], form: str) -> None:
        super().__init__(files)
        self._meta, self._form = meta, form

    def __len__(self) -> int:
        return sum(self._meta["rows"])

    @property
    def value(self) -> Any:
        if self._form == "arrow":
            return tfrecord.read([str(path) for path in self.files])
        if self._form == "tf.data":
            # From memory: the files may be gone when the data is asked for.
            return _tensorflow().data.Dataset.from_tensor_slices(list(self._raw()))
        examples = list(self._parsed())
        return examples[0] if self._meta["single"] else examples

    def _chunks(self, size: int) -> Iterator[Any]:
        if self._form == "arrow":
            batches = tfrecord.iter_batches([str(path) for path in self.files])
            for chunk in rechunk(batches, size, len, lambda batch, i, j: batch.slice(i, j - i)):
                yield pa.Table.from_batches(chunk)
            return
        examples = self._parsed()
        while some := list(islice(examples, size)):
            yield some

    def _raw(self) -> Iterator[bytes]:
        for path in self.files:
            yield from records(str(path))

    def _parsed(self) -> Iterator[Any]:
        example = _tensorflow().train.Example
        return (example.FromString(record) for record in self._raw())


def _examples(obj: Any) -> list[Any]:
    """The records, if these are records and nothing else."""
    objects = list(obj) if isinstance(obj, list | tuple) else [obj]
    same = all(type(one).__name__ == "Example" and type(one).__module__ == _EXAMPLE for one in objects)
    return objects if same else []


def _tensorflow() -> Any:
    what = "reading tf.train.Example records"
    return imported("tensorflow", what=what, package="tensorflow", extra="tensorflow")
