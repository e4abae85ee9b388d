"""A worker is lost during training, and the run continues: `python examples/lost_worker.py`.

Two workers train twice on scikit-learn's digits. The second time, SIGKILL ends one of them in the third
epoch; the run continues from its newest checkpoint, and ends with exactly the same weights.
"""

import logging
import os
import signal
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import kindler


class Accident(kindler.callbacks.Callback):
    """Ends the second worker once, in the middle of the third epoch."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def on_step_end(self, run: kindler.callbacks.Run) -> None:
        if run.rank == 1 and run.epoch == 3 and run.step % run.steps == 13 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, callbacks: list[kindler.callbacks.Callback]) -> nn.Module:
    digits = load_digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    estimator = kindler.Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        workers=2,
        engine="local",
    )
    data = {"features": (digits.data / 16).astype("float32"), "label": digits.target}
    checkpoints = kindler.Checkpoints(folder, every=10)
    history = estimator.fit(data, epochs=5, batch_size=64, callbacks=callbacks, checkpoint=checkpoints)
    print(f"accuracy by epoch: {[round(value, 4) for value in history['accuracy']]}")
    return estimator.get_model()


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    with tempfile.TemporaryDirectory() as place:
        undisturbed = train(Path(place, "undisturbed"), [])
        disturbed = train(Path(place, "disturbed"), [Accident(Path(place, "accident"))])
    same = all(
        torch.equal(a, b) for a, b in zip(undisturbed.parameters(), disturbed.parameters(), strict=True)
    )
    print(f"same weights: {same}")
