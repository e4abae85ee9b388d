"""Find out why a run is slow: where the time of a step goes, and which operations use it.

    python examples/howto/slow_run.py

The transform of the first run is slow on purpose: it computes row by row what numpy can do for a whole batch.
"""

import re
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import kindler
from kindler import Prepare

ROWS, LENGTH = 32_000, 64


class Profile(kindler.callbacks.Callback):
    """Records some steps of the first worker with PyTorch's profiler."""

    def __init__(self, path, first=20, steps=10):
        self.path, self.first, self.last = str(path), first, first + steps
        self.steps = 0

    def on_step_begin(self, run):
        self.steps += 1
        if run.rank == 0 and self.steps == self.first:
            self.profiler = profile(activities=[ProfilerActivity.CPU])
            self.profiler.start()

    def on_step_end(self, run):
        if run.rank == 0 and self.steps == self.last:
            self.profiler.stop()
            averages = self.profiler.key_averages()
            Path(self.path).write_text(averages.table(sort_by="self_cpu_time_total", row_limit=10))


def row_by_row(row):
    spectrum = [
        abs(sum(value * np.exp(-2j * np.pi * k * i / LENGTH) for i, value in enumerate(row["signal"])))
        for k in range(4)
    ]
    return {"spectrum": np.array(spectrum, "float32")}


@kindler.batched
def whole_batch(columns):
    spectrum = np.abs(np.fft.rfft(columns["signal"], axis=1)[:, :4])
    return {"spectrum": spectrum.astype("float32")}


def speed(history):
    """Rows per second, and the shares of the time after the start."""
    seconds = history.goodput.seconds
    training = {part: seconds[part] for part in ("ingest", "steps", "sync")}
    shares = ", ".join(f"{part} {spent / sum(training.values()):.0%}" for part, spent in training.items())
    return f"{history[-1]['rows_per_s']:7,.0f} rows/s, {shares}"


def run(transform, steps, callbacks=()):
    draw = np.random.default_rng(0)
    signal = draw.normal(size=(ROWS, LENGTH)).astype("float32")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    estimator = kindler.Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        loss=nn.CrossEntropyLoss(),
        prepare=Prepare(transform=transform),
        workers=2,
    )
    data = {"signal": signal, "label": (signal.mean(axis=1) > 0).astype(int)}
    return estimator.fit(
        data,
        max_steps=steps,
        batch_size=64,
        feature_cols="signal",
        label_cols="label",
        callbacks=callbacks,
        verbose=0,
    )


def main(folder):
    first = run(row_by_row, steps=50)
    print("row by row: ", speed(first))
    second = run(whole_batch, steps=500, callbacks=[Profile(folder / "profile.txt")])
    print("whole batch:", speed(second))
    operations = re.findall(r"aten::\w+", (folder / "profile.txt").read_text())
    print("most time in:", ", ".join(operations[:3]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
