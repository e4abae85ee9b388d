"""A GAN that learns a ring of points: a custom training step, with an optimizer for each of two networks.

python examples/gan.py
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import kindler


class Gan(nn.Module):
    """Calling it generates points."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
        )

    def forward(self, noise):
        return self.generator(noise)


def make_optimizer(part, lr):
    return lambda model: torch.optim.Adam(getattr(model, part).parameters(), lr=lr, betas=(0.5, 0.99))


def train_step(run, batch):
    real, model = batch["x"], run.model
    fake = model.generator(torch.randn(len(real), 4, device=run.device))
    loss_critic = (F.softplus(-model.critic(real)) + F.softplus(model.critic(fake.detach()))).mean()
    run.minimize(loss_critic, "critic")
    loss_generator = F.softplus(-model.critic(fake)).mean()
    run.minimize(loss_generator, "generator")
    return {"critic_loss": loss_critic, "generator_loss": loss_generator}


def ring(rows):
    """Points at a distance of about 1 from the centre."""
    random = np.random.default_rng(0)
    angle, radius = random.uniform(0, 2 * np.pi, rows), random.normal(1, 0.05, rows)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(np.float32)


def main(rows=2000, epochs=60):
    """Train on points of a ring; returns the mean distance of generated points from it."""
    estimator = kindler.Estimator.from_torch(
        model=Gan,
        optimizer={"generator": make_optimizer("generator", 1e-3), "critic": make_optimizer("critic", 2e-3)},
        train_step=train_step,
        workers=2,
    )
    history = estimator.fit({"x": ring(rows)}, epochs=epochs, batch_size=100)
    print(f"losses of the last epoch: {history[-1]['critic_loss']:.3f}, {history[-1]['generator_loss']:.3f}")
    noise = np.random.default_rng(1).normal(size=(1000, 4)).astype(np.float32)
    points = estimator.predict({"x": noise})["prediction"]
    radius = np.sqrt((points**2).sum(1))
    away = float(np.abs(radius - 1).mean())
    print(f"mean distance from the ring: {away:.3f}")
    return away


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()
    main(options.rows, options.epochs)
