"""A custom callback: stop when validation no longer improves, and keep the best weights.

Callbacks run on every worker, with metrics that are already merged over all workers, so all of them make the
same decision. Anything that must happen once, such as writing a file, is done where `run.rank` is 0.
"""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn, optim

import kindler


# --8<-- [start:callback]
class StopEarly(kindler.callbacks.Callback):
    """Ends the run after `patience` epochs without a better `val_loss`."""

    def __init__(self, path, patience=2):
        self.path, self.patience = str(path), patience
        self.best, self.waited = float("inf"), 0

    def on_epoch_end(self, run, logs):
        if logs["val_loss"] < self.best:
            self.best, self.waited = logs["val_loss"], 0
            if run.rank == 0:
                torch.save(run.model.state_dict(), self.path)
            return
        self.waited += 1
        if self.waited >= self.patience:
            if run.rank == 0:
                print(f"epoch {run.epoch}: no better for {self.waited} epochs")
            run.stop("validation loss no longer falls")


# --8<-- [end:callback]


def main(folder, epochs=30):
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.25, random_state=0)
    estimator = kindler.Estimator.from_torch(
        model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        optimizer=lambda model: optim.Adam(model.parameters(), lr=2e-2),
        loss=nn.CrossEntropyLoss(),
        metrics="accuracy",
        workers=2,
    )
    # --8<-- [start:use]
    best = Path(folder) / "best.pt"
    history = estimator.fit(
        (x_train, y_train),
        epochs=epochs,
        batch_size=64,
        validation_data=(x_test, y_test),
        callbacks=[StopEarly(best)],
    )
    estimator.load_weights(best)  # the weights of the best epoch, not of the last
    # --8<-- [end:use]
    result = estimator.evaluate((x_test, y_test))
    print(f"{len(history)} of {epochs} epochs, best accuracy {result['accuracy']:.3f}")
    return history, result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(scratch)
