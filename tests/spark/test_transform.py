"""Images and lists in DataFrames: decoded and padded where the rows are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kindler import Estimator, Prepare
from kindler.data import images
from kindler.errors import DataError
from tests import exact

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_workers_left")]

ROWS = 60
RANDOM = np.random.default_rng(3)
LENGTHS = RANDOM.integers(0, 9, ROWS)
TOKENS = [RANDOM.integers(1, 20, n).tolist() for n in LENGTHS]
LABELS = (LENGTHS > 4).astype(int).tolist()
SCHEMA = "id long, tokens array<int>, text string, y long"


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.out = nn.Embedding(20, 6), nn.Linear(6, 2)
        self.seen: list[int] = []

    def forward(self, ids: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += ids.tolist()
        return self.out((self.words(tokens) * mask[:, :, None]).mean(1))


def shortened(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Drops a token by chance; also shows that text arrives as text."""
    assert row["text"] == f"row {row['id']}"
    kept = rng.random(len(row["tokens"])) > 0.2
    return {"id": row["id"], "tokens": row["tokens"][kept]}


def whole(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "tokens": row["tokens"]}


def reader(workers: int, **options: Any) -> Estimator:
    model = Reader()
    return Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        workers=workers,
        prepare=Prepare(transform=shortened, eval_transform=whole, pad=8, length_col="tokens"),
        **options,
    )


def test_rows_that_spark_sends_are_augmented_alike(partitioned: Any, tmp_path: Path) -> None:
    rows = [(i, TOKENS[i], f"row {i}", LABELS[i]) for i in range(ROWS)]
    frame = partitioned([rows[:7], rows[7:40], [], rows[40:]], SCHEMA)
    columns = {"feature_cols": ["id", "tokens", "text"], "label_cols": "y"}
    trained = []
    for workers in (1, 2):
        notes = tmp_path / str(workers)
        notes.mkdir()
        est = reader(workers)
        est.fit(frame, 2, 12, callbacks=[exact.Note(notes)], verbose=0, **columns)
        exact.assert_each_row_once_per_epoch(notes, ROWS, 2)
        trained.append(est)

    exact.assert_close(exact.weights(trained[1]), exact.weights(trained[0]))
    scored = trained[1].predict(frame.drop("y").coalesce(1), 16, verbose=0).orderBy("id").toArrow()
    tokens = torch.tensor([row + [0] * (8 - len(row)) for row in TOKENS])
    with torch.no_grad():
        expected = trained[1].get_model().eval()(torch.arange(ROWS), tokens, tokens > 0).numpy()
    np.testing.assert_allclose(scored.column("prediction").to_pylist(), expected, atol=1e-5)


def test_a_damaged_image_in_a_frame_is_named_by_partition_and_row(partitioned: Any) -> None:
    pytest.importorskip("PIL")
    frame = partitioned([[(b"one", 0)], [(b"two", 1), (b"three", 0)]], "png binary, label long")
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.CrossEntropyLoss(),
        workers=1,
        prepare=Prepare(transform=images.from_bytes("png")),
    )

    with pytest.raises(DataError, match=r"column 'png', row 0 of partition \d: cannot be read as an image"):
        est.fit(frame, feature_cols="png", label_cols="label", verbose=0)
