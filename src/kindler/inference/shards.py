"""Scores shards where they are stored, and adds the model's outputs to them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from kindler.data.rejoin import chunk_of
from kindler.data.shards.codec import Packed, pack, unpack
from kindler.data.shards.source import pieces, values
from kindler.engine.placement import TaskPlace, gpus_of_task
from kindler.errors import RowErrorsWarning
from kindler.inference.outputs import concatenated, like
from kindler.inference.predictor import Arrays, Predictor
from kindler.inference.row_errors import Failures


@dataclass(frozen=True, kw_only=True)
class ShardScorer:
    """A `kindler.data.shards.backend.Work` that adds the model's outputs to a shard. `schema` is the plain
    schema of frames; None for arrays. `sample` has a few input rows, to find the types of outputs for
    shards without rows; None leaves such shards as they are."""

    predictor: Predictor
    schema: pa.Schema | None
    sample: Arrays | None

    def __call__(self, number: int, packed: Packed) -> Packed:
        if packed.info.rows:
            place = TaskPlace(number, tuple(gpus_of_task()))
            self.predictor.failures = Failures()  # of this shard
            parts = list(self.predictor.score(self._chunks(number, packed), place))
            if self.predictor.failures.count:
                text = f"in shard {number}, {self.predictor.failures}"
                warnings.warn(text, RowErrorsWarning, stacklevel=2)
            outputs = [concatenated(column) for column in zip(*parts, strict=True)]
        elif self.sample is None or not packed.is_table:
            return packed
        else:
            outputs = [output[:0] for output in next(self.predictor.score([self.sample]))]
        names = self.predictor.names(len(outputs))
        return pack(like(unpack(packed), dict(zip(names, outputs, strict=True))))

    def _chunks(self, number: int, packed: Packed) -> Iterator[Arrays]:
        columns = self.predictor.columns
        for first, piece in pieces(packed, 0, packed.info.rows, multiple_of=self.predictor.batch_size):
            by_name = values(piece, columns.names, self.schema)

            def where(i: int, first: int = first) -> str:
                return f"{first + i} of shard {number}"

            given = [by_name[column.name] for column in columns.features]
            chunk = chunk_of(columns, piece.info.rows, given, where, lenient=self.predictor.lenient)
            # A copy: a model that writes into its inputs must not change the shard.
            yield chunk.copied()
