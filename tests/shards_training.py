"""What must hold for a model on shards, in either engine and however the rows are dealt out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kindler import XShards
from tests import exact

ROWS = 100
EPOCHS = 4

# Where each shard ends: three of ten are empty; one for two workers; three for two workers.
LAYOUTS = {
    "ten, three of them empty": (20, 20, 35, 36, 60, 60, 61, 90, 100, 100),
    "one": (100,),
    "three": (34, 67, 100),
}


def shards_of(data: dict[str, np.ndarray], ends: Sequence[int], engine: str) -> XShards:
    """Shards of the model's two inputs and its target."""
    starts = [0, *ends[:-1]]
    return XShards.from_shards(
        [
            {"x": (data["id"][a:b], data["x"][a:b]), "y": data["y"][a:b]}
            for a, b in zip(starts, ends, strict=True)
        ],
        engine=engine,
    )


def assert_same_as_one_process(
    notes: Path, shards: XShards, ends: Sequence[int], data: dict[str, np.ndarray], **options: Any
) -> None:
    """fit, evaluate and predict use every row once, and compute what a single process would."""
    est = exact.estimator(workers=2, **options)

    history = est.fit(
        shards,
        epochs=EPOCHS,
        batch_size=20,
        validation_data=shards,
        callbacks=[exact.Note(notes)],
        verbose=0,
    )

    assert history["num_samples"] == history["val_num_samples"] == [ROWS] * EPOCHS
    exact.assert_each_row_once_per_epoch(notes, ROWS, EPOCHS)
    exact.assert_same_weights(est.get_model(), exact.reference(notes, data))
    alone = exact.single_process_figures(est.get_model(), data)
    figures = est.evaluate(shards, batch_size=16, verbose=0)
    assert {k: round(v, 5) for k, v in figures.items()} == {k: round(v, 5) for k, v in alone.items()}

    scored = est.predict(shards, batch_size=7, verbose=0)

    assert (scored.engine, scored.num_partitions(), len(scored)) == (shards.engine, len(ends), ROWS)
    found = scored.collect()
    assert [len(shard["y"]) for shard in found] == np.diff([0, *ends]).tolist()
    assert all(list(shard) == ["x", "y", "prediction"] for shard in found)
    joined: Callable[[list[Any]], Any] = np.concatenate
    assert joined([shard["x"][0] for shard in found]).tolist() == data["id"].tolist()
    np.testing.assert_array_equal(joined([shard["x"][1] for shard in found]), data["x"])
    with torch.no_grad():
        expected = est.get_model().eval().layers(torch.from_numpy(data["x"])).numpy()
    np.testing.assert_allclose(joined([shard["prediction"] for shard in found]), expected, atol=1e-6)
