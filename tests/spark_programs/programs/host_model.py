"""Scores a frame with one model for all tasks of the host; prints what was seen as one line of JSON."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

import kindler
from kindler import Columns, Estimator

ROWS = 4_000
PATIENCE_S = 120


class Diary(nn.Module):
    """Notes the processes that it is loaded in, and those that call it."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.layer = nn.Linear(3, 2)
        with torch.no_grad():  # sums of whole numbers are exact, however many rows a batch has
            self.layer.weight.copy_(torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]]))
            self.layer.bias.zero_()

    def note(self, what: str) -> None:
        with Path(self.folder, f"{what}-{os.getpid()}").open("a") as file:
            file.write("\n")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.note("loaded")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note("called")
        return self.layer(x)


def main(folder: str) -> None:
    notes = Path(folder, "notes")
    notes.mkdir()
    meeting = Path(folder, "meeting")
    meeting.mkdir()
    spark = kindler.init(cores=2)

    def met(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Both tasks run before either sees its rows."""
        Path(str(meeting), str(os.getpid())).touch()
        until = time.monotonic() + PATIENCE_S
        while len(os.listdir(str(meeting))) < 2:
            if time.monotonic() > until:
                raise TimeoutError("the other task did not come")
            time.sleep(0.01)
        yield from batches

    x = np.random.default_rng(0).integers(-99, 99, size=(ROWS, 3)).astype("float32")
    table = pa.table({"id": np.arange(ROWS), "x": list(x)})
    frame = spark.createDataFrame(table.to_pandas()).repartition(2)
    frame = frame.mapInArrow(met, frame.schema)
    model = Diary(str(notes))
    with torch.inference_mode():
        expected = model.layer(torch.from_numpy(x)).numpy()
    scored = Estimator.from_torch(model=model).predict(
        frame, batch_size=100, feature_cols="x", columns=Columns(shapes={"x": (3,)})
    )
    for note in notes.iterdir():
        note.unlink()  # what the driver noted while it looked at the model's outputs
    rows = scored.select("id", "prediction").collect()
    found = np.empty_like(expected)
    for row in rows:
        found[row.id] = row.prediction
    loaded = [note.name.rpartition("-")[2] for note in notes.glob("loaded-*")]
    called = [note.name.rpartition("-")[2] for note in notes.glob("called-*")]
    times = sum(len(note.read_text()) for note in notes.glob("loaded-*"))
    watched = [os.pidfd_open(int(pid)) for pid in loaded]
    alive = [not select.select([handle], [], [], 0)[0] for handle in watched]
    spark.stop()
    ended = [bool(select.select([handle], [], [], PATIENCE_S)[0]) for handle in watched]
    told = {
        "rows": len(rows),
        "equal": bool(np.array_equal(found, expected)),
        "loads": times,
        "same process": loaded == called,
        "alive": alive,
        "ended": ended,
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
