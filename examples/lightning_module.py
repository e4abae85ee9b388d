"""A LightningModule, used unchanged: its steps, logs, metrics, optimizer and schedule.

python examples/lightning_module.py
"""

import argparse

import lightning
import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

import kindler


class Classifier(lightning.LightningModule):
    """It contains nothing specific to Kindler."""

    def __init__(self, features=8, classes=3, lr=0.02):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, classes))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=classes)

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def problem(rows, seed):
    """Rows of three classes."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 8)).astype(np.float32)
    return {"x": x, "y": np.abs(x[:, :3]).argmax(1)}


def main(rows=2000, epochs=10):
    """Train on that many rows; returns the accuracy on others."""
    estimator = kindler.Estimator.from_lightning(Classifier(), workers=2)
    history = estimator.fit(problem(rows, 0), epochs=epochs, batch_size=100, validation_data=problem(500, 1))
    print(f"validation accuracy: {history[-1]['val_acc']:.4f}")
    return history[-1]["val_acc"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    main(options.rows, options.epochs)
