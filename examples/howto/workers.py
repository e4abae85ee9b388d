"""Choose the number of workers and the batch size by a short measurement with your own model and machine.

    python examples/howto/workers.py --workers 1 2 --batch-sizes 64 512

It trains some steps with each combination, and prints the rows per second and the loss after the same number
of rows.
"""

import argparse

import numpy as np
import torch
from torch import nn

import kindler

ROWS = 8192


def data():
    """Replace with a sample of your table that is large enough for some dozen steps."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(ROWS, 64)).astype("float32")
    return {"x": x, "y": np.sin(x[:, :8]).sum(axis=1).astype("float32")}


def estimator(workers, lr):
    """Replace with the model that you want to train."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    return kindler.Estimator.from_torch(
        model=model, optimizer=optimizer, loss=nn.MSELoss(), workers=workers, engine="local"
    )


def main(workers, batch_sizes, epochs=3):
    rows = data()
    print("workers  batch      lr    rows/s    loss")
    measured = []
    for batch_size in batch_sizes:
        lr = 1e-3 * (batch_size / batch_sizes[0]) ** 0.5  # larger steps for larger batches, for Adam
        for count in workers:
            history = estimator(count, lr).fit(rows, epochs=epochs, batch_size=batch_size, verbose=0)
            speed = float(np.median(history["rows_per_s"][1:]))  # without the first epoch, which is a warm-up
            measured.append((speed, count, batch_size))
            print(f"{count:7} {batch_size:6} {lr:7.4f} {speed:9,.0f} {history['loss'][-1]:7.3f}")
    speed, count, batch_size = max(measured)
    print(f"fastest: workers={count}, batch_size={batch_size} with {speed:,.0f} rows/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 512])
    options = parser.parse_args()
    main(options.workers, options.batch_sizes)
