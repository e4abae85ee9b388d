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


class Shares(kindler.callbacks.DriverCallback):
    """How the first worker spent its time: the shares of the progress line, as numbers."""

    data = sync = 0.0

    def on_progress(self, fields):
        """Called several times a second; all numbers are of this epoch so far."""
        if fields["step"]:
            waited = fields.get("transform_s", fields.get("data_s"))  # data_s in a run without a transform
            self.data, self.sync = (part / fields["seconds"] for part in (waited, fields["sync_s"]))

    def __str__(self):
        return f"transform {self.data:.0%}, compute {1 - self.data - self.sync:.0%}, sync {self.sync:.0%}"


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


def run(transform, callbacks, steps):
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
    slow, fast = Shares(), Shares()
    first = run(row_by_row, [slow], steps=50)
    print(f"row by row:  {first[-1]['rows_per_s']:7,.0f} rows/s, {slow}")
    second = run(whole_batch, [fast, Profile(folder / "profile.txt")], steps=500)
    print(f"whole batch: {second[-1]['rows_per_s']:7,.0f} rows/s, {fast}")
    operations = re.findall(r"aten::\w+", (folder / "profile.txt").read_text())
    print("most time in:", ", ".join(operations[:3]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
