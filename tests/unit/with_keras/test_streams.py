"""Which files of a data set of TensorFlow's each rank reads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from flavour import FLAVOUR

from kindler.frameworks.loaders import Dealing, open_stream

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("no_workers_left")]

on_tensorflow = pytest.mark.skipif(FLAVOUR not in ("tensorflow", "tf_keras"), reason="needs TensorFlow")


@on_tensorflow
@pytest.mark.parametrize(("ranks", "files_each"), [(2, [{0}, {1}]), (3, [{0, 1}, {0, 1}, {0, 1}])])
def test_files_are_dealt_to_ranks_where_there_are_enough_and_batches_otherwise(
    tmp_path: Path, ranks: int, files_each: list[set[int]]
) -> None:
    import tensorflow as tf

    for file in range(2):
        (tmp_path / f"{file}.txt").write_text("\n".join(str(file) for _ in range(12)))
    paths = [str(tmp_path / f"{file}.txt") for file in range(2)]

    def seen(rank: int) -> list[int]:
        dataset = tf.data.TextLineDataset(paths).batch(2)
        stream = open_stream(lambda: dataset, Dealing(rank, ranks, 0), title="f()")
        return [int(line) for batch in stream.batches(1) for line in batch.numpy()]

    found = [seen(rank) for rank in range(ranks)]

    assert [set(lines) for lines in found] == files_each
    assert sorted(itertools.chain(*found)) == [0] * 12 + [1] * 12
