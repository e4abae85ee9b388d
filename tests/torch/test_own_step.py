"""`train_step`: a step of the user's own, with several optimizers, is the same on one worker and two."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interrupted import AT_ONCE
from torch import nn
from torch.nn import functional as F

from kindler import Checkpoints, Device, Estimator, Optimization
from kindler.callbacks import Callback
from kindler.errors import ConfigError, KindlerError
from tests.exact import assert_close, await_file

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workers_left")]

RANDOM = np.random.default_rng(1)
ROWS, STEPS = 45, 6  # steps of an epoch
DATA = {
    "x": RANDOM.normal(size=(ROWS, 3)).astype(np.float32),
    "y": RANDOM.normal(size=ROWS).astype(np.float32),
}


class Gan(nn.Module):
    """A generator and a discriminator; called, it generates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)


def of_generator(model: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.generator.parameters(), lr=config.get("lr", 1e-2))


def of_discriminator(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.discriminator.parameters(), lr=0.05, momentum=0.5)


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def play(run: Any, batch: Any) -> dict[str, Any]:
    """One move of each; the noise is made of the rows, so that workers draw nothing of their own."""
    real, noise = batch["x"], batch["x"][:, :2].cos()
    gan = run.model
    fake = gan.generator(noise)
    right, wrong = gan.discriminator(real), gan.discriminator(fake.detach())
    loss_d = (F.softplus(-right) + F.softplus(wrong)).mean()
    run.minimize(loss_d, "d")
    loss_g = F.softplus(-gan.discriminator(fake)).mean()
    run.minimize(loss_g, "g")
    return {"loss_d": loss_d, "loss_g": loss_g, "rows": run.rows}


def gan(workers: int, step: Any = play, **options: Any) -> Estimator:
    return Estimator.from_torch(
        model=Gan(),
        optimizer={"g": of_generator, "d": of_discriminator},
        scheduler={"d": decay},
        optimization=Optimization(scheduler_step="step"),
        train_step=step,
        **{"workers": workers, "settings": AT_ONCE, **options},
    )


def fit(est: Estimator, data: Any = DATA, **options: Any) -> Any:
    return est.fit(data, **{"epochs": 2, "batch_size": 8, "verbose": 0, **options})


def weights(est: Estimator) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in est.get_model().parameters()]


def by_hand() -> tuple[list[np.ndarray], float]:
    """The same game in a plain loop."""
    model = Gan()
    g, d = of_generator(model, {}), of_discriminator(model)
    rates = decay(d)
    x = torch.from_numpy(DATA["x"])
    bounds = [ROWS * i // STEPS for i in range(STEPS + 1)]
    losses = []
    for _ in range(2):
        for start, stop in pairwise(bounds):
            real, noise = x[start:stop], x[start:stop, :2].cos()
            fake = model.generator(noise)
            loss_d = (
                F.softplus(-model.discriminator(real)) + F.softplus(model.discriminator(fake.detach()))
            ).mean()
            d.zero_grad()
            loss_d.backward()
            d.step()
            loss_g = F.softplus(-model.discriminator(fake)).mean()
            g.zero_grad()
            loss_g.backward()
            g.step()
            rates.step()
            losses.append(float(loss_g.detach()) * (stop - start))
    return [p.detach().numpy().copy() for p in model.parameters()], sum(losses[STEPS:]) / ROWS


def test_a_gan_of_two_workers_is_that_of_a_plain_loop() -> None:
    expected, loss = by_hand()
    two = gan(2)
    history = fit(two, shuffle=False)

    assert_close(weights(two), expected)
    assert history["loss_g"][-1] == pytest.approx(loss, rel=1e-4)
    assert history["loss"][-1] == pytest.approx(history["loss_g"][-1] + history["loss_d"][-1], rel=1e-5)
    assert history["num_samples"] == [ROWS, ROWS]
    made = two.predict({"x": DATA["x"][:, :2]}, verbose=0)["prediction"]
    np.testing.assert_allclose(made, two.get_model()(torch.from_numpy(DATA["x"][:, :2])).detach(), atol=1e-6)
    assert two.fit(DATA, verbose=0)["epoch"] == [3], "a second fit goes on"


class Falls(Callback):
    """Breaks the run once, in the second epoch, after a checkpoint in its midst."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def on_step_end(self, run: Any) -> None:
        if run.step == STEPS + 4 and run.rank == 1 and not Path(self.folder, "fell").exists():
            await_file(Path(self.folder), f"checkpoint-*-step-{STEPS + 3:09d}.kindler")
            Path(self.folder, "fell").touch()
            raise RuntimeError("the power is gone")


def noisy(run: Any, batch: Any) -> dict[str, Any]:
    """Randomness, and gradients that are added up over two steps."""
    loss = (
        (run.model.discriminator(run.model.generator(torch.randn(len(batch["x"]), 2))) - batch["x"])
        .square()
        .mean()
    )
    run.backward(loss)
    if run.step % 2:
        run.update("g")
        run.update("d")
    return {"loss": loss}


def test_a_run_that_broke_in_mid_epoch_goes_on_bit_by_bit_with_all_optimizers(tmp_path: Path) -> None:
    whole = gan(2, noisy)
    told = fit(whole)
    folder = tmp_path / "run"
    checkpoint = Checkpoints(folder, every=3)
    with pytest.raises(RuntimeError, match="the power is gone"):
        fit(gan(2, noisy), callbacks=[Falls(folder)], checkpoint=checkpoint)
    again = gan(2, noisy)
    history = fit(again, checkpoint=checkpoint, resume=True)

    assert history["loss"] == told["loss"]
    for ours, theirs in zip(weights(again), weights(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert weights(again)[0].shape == (6, 2)


def plain(run: Any, batch: Any) -> torch.Tensor:
    return (run.model(batch["x"]).squeeze(1) - batch["y"]).square().mean()


def judge(run: Any, batch: Any) -> dict[str, Any]:
    error = run.model(batch["x"]).squeeze(1) - batch["y"]
    return {"loss": error.square().mean(), "mae": error.abs().mean()}


def linear(workers: int, step: Any = plain, **options: Any) -> Estimator:
    torch.manual_seed(0)
    return Estimator.from_torch(
        model=nn.Linear(3, 1),
        train_step=step,
        **{"workers": workers, "optimizer": torch.optim.SGD, "eval_step": judge, **options},
    )


def test_a_function_that_returns_the_loss_trains_as_the_loss_itself_does_with_clipping_and_idle_workers() -> (
    None
):
    few = {name: values[:5] for name, values in DATA.items()}  # steps of one row: a worker is idle in each
    torch.manual_seed(0)
    known = Estimator.from_torch(
        model=nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)),
        optimizer=torch.optim.SGD,
        loss=nn.MSELoss(),
        optimization=Optimization(clip_norm=0.1),
        workers=1,
    )
    expected = fit(known, few, batch_size=1, shuffle=False)
    est = linear(2, optimization=Optimization(clip_norm=0.1))
    history = fit(est, few, batch_size=1, shuffle=False, validation_data=DATA)

    assert_close(weights(est), weights(known))
    assert history["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    judged = est.evaluate(DATA, verbose=0)
    errors = est.predict({"x": DATA["x"]}, verbose=0)["prediction"][:, 0] - DATA["y"]
    assert judged["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert judged["loss"] == pytest.approx(history["val_loss"][-1])
    assert judged["num_samples"] == ROWS


def by_weight(run: Any, batch: Any) -> torch.Tensor:
    """A mean over the rows that count."""
    counts = (batch["y"] > 0).float()
    error = (run.model(batch["x"]).squeeze(1) - batch["y"]).square()
    loss = (error * counts).sum() / counts.sum().clamp(min=1)
    run.minimize(loss, weight=counts.sum())
    return loss


def test_a_mean_over_something_else_than_rows_is_exact_with_its_weight() -> None:
    one, two = linear(1, by_weight), linear(2, by_weight)
    for est in (one, two):
        fit(est, shuffle=False)
    assert_close(weights(two), weights(one))


def raw(run: Any, batch: Any) -> torch.Tensor:
    loss = plain(run, batch)
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


def by_chance(run: Any, batch: Any) -> torch.Tensor:
    loss = plain(run, batch)
    run.minimize(loss)
    if run.rank == 1:
        run.minimize(plain(run, batch))
    return loss


def test_steps_that_workers_would_not_share_are_refused_and_work_alone() -> None:
    with pytest.raises(ConfigError, match="computes the gradients of this worker's rows alone"):
        fit(linear(2, raw))
    with pytest.raises(KindlerError, match="workers did different things in one step"):
        fit(linear(2, by_chance))
    alone, known = linear(1, raw), linear(1)
    for est in (alone, known):
        fit(est)
    assert_close(weights(alone), weights(known))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"train_step": 3}, "train_step must be a function"),
        ({"optimizer": {"a": torch.optim.SGD, "b": torch.optim.SGD}}, "is a class, which would get all"),
        ({"optimizer": {"a": "adam"}}, r"optimizer\['a'\]: optimizer must be a torch.optim.Optimizer"),
        (
            {"optimizer": {"a": of_discriminator}, "scheduler": {"b": decay}},
            "there is no optimizer of",
        ),
        ({"optimization": Optimization(accumulation_steps=2)}, "leave accumulation_steps=1"),
        ({"device": Device(precision="fp16")}, "scales losses"),
        ({"metrics": ["mse"]}, "eval_step returns all metrics itself"),
        ({"train_step": None}, "eval_step belongs to a train_step"),
    ],
)
def test_what_cannot_work_is_refused_when_the_estimator_is_made(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        linear(1, **options) if "train_step" not in options else linear(1, options["train_step"])


def test_what_a_fit_lacks_and_what_a_sync_cannot_share_is_said_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="how to evaluate rows; pass .*eval_step"):
        fit(linear(1, eval_step=None), validation_data=DATA)
    with pytest.raises(ConfigError, match="updates the parameters itself"):
        fit(linear(2), strategy="zero1")
    with pytest.raises(ConfigError, match="updates the parameters itself"):
        fit(linear(2), strategy="async")
    with pytest.raises(ConfigError, match=r"strategy='local_sgd' does not train models of 'torch_step'"):
        fit(linear(2), strategy="local_sgd")
    for step, match in (
        (lambda run, batch: None, "updated no parameters, and returned no loss"),
        (lambda run, batch: run.minimize(plain(run, batch), "h"), "there is no optimizer 'h'"),
        (lambda run, batch: [1, 2], "must return the loss"),
    ):
        with pytest.raises(ConfigError, match=match):
            fit(linear(1, step))
    with pytest.raises(ConfigError, match="which of them minimizes the loss"):
        fit(gan(1, lambda run, batch: run.model(batch["x"][:, :2]).square().mean()))
