"""A LightningModule is trained as it is, and the result is that of a plain loop."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

import kindler
from kindler import Estimator
from kindler.errors import ConfigError
from kindler.frameworks.torch.lightning_replica import LightningReplica
from tests.exact import assert_close, problem

lightning: Any = pytest.importorskip("lightning")

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("inherits_lightning", "no_workers_left")]

ROWS, STEPS = 46, 6
DATA = {name: values for name, values in problem(ROWS).items() if name != "id"}


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """What a user of Lightning has: nothing in it is for Kindler."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.called: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("batch_idx", float(batch_idx))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", self.accuracy, on_epoch=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_epoch_start(self) -> None:
        self.called.append("epoch")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert isinstance(optimizer, torch.optim.Adam)
        assert self.layers[0].weight.grad is not None
        self.called.append("step")

    def on_train_epoch_end(self) -> None:
        self.log("hooks", float(len(self.called)))
        self.log("epochs_before", float(self.current_epoch))
        self.called = []


def bounds(rows: int = ROWS, steps: int = STEPS) -> list[tuple[int, int]]:
    cuts = [rows * i // steps for i in range(steps + 1)]
    return list(pairwise(cuts))


def by_hand(epochs: int) -> Classifier:
    module = Classifier()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    x, y = torch.from_numpy(DATA["x"]), torch.from_numpy(DATA["y"])
    for _ in range(epochs):
        for start, stop in bounds():
            optimizer.zero_grad()
            F.cross_entropy(module(x[start:stop]), y[start:stop]).backward()
            optimizer.step()
            schedule.step()
    return module


def weights(model: Any) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def test_a_module_of_two_workers_ends_as_a_plain_loop_with_logs_metrics_schedules_and_hooks() -> None:
    module = Classifier()
    est = Estimator.from_lightning(module, workers=2)
    options = {"epochs": 2, "batch_size": 8, "shuffle": False, "verbose": 0}
    history = est.fit(DATA, validation_data=DATA, **options)

    expected = by_hand(2)
    assert_close(weights(est.get_model()), weights(expected))
    assert est.get_model() is module
    x, y = torch.from_numpy(DATA["x"]), torch.from_numpy(DATA["y"])
    with torch.no_grad():
        logits = expected(x)
    assert history["val_loss"][-1] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-4)
    assert history["val_acc"][-1] == pytest.approx(float((logits.argmax(1) == y).float().mean()), rel=1e-6)
    assert history["train_loss"] == pytest.approx(history["loss"])
    assert history["batch_idx"][0] == pytest.approx(
        sum(i * (b - a) for i, (a, b) in enumerate(bounds())) / ROWS
    )
    assert history["hooks"] == [STEPS + 1, STEPS + 1]
    assert history["epochs_before"] == [0, 1]
    judged = est.evaluate(DATA, verbose=0)
    assert judged["acc"] == pytest.approx(history["val_acc"][-1])
    scored = est.predict({"x": DATA["x"]}, verbose=0)
    np.testing.assert_allclose(scored["prediction"], logits, atol=1e-5)
    assert "log" not in module.__dict__, "nothing is left on the user's own module"
    est.fit(DATA, **options)
    assert_close(weights(est.get_model()), weights(by_hand(4)))


class Game(lightning.LightningModule):  # type: ignore[misc]
    """A GAN that steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)

    def training_step(self, batch: Any) -> None:
        real, _ = batch
        g, d = self.optimizers()
        fake = self(real[:, :2].cos())
        self.toggle_optimizer(d)
        loss_d = (
            F.softplus(-self.discriminator(real)).mean()
            + F.softplus(self.discriminator(fake.detach())).mean()
        )
        d.zero_grad()
        self.manual_backward(loss_d)
        d.step()
        self.untoggle_optimizer(d)
        loss_g = F.softplus(-self.discriminator(fake)).mean()
        g.zero_grad()
        self.manual_backward(loss_g)
        self.clip_gradients(g, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        g.step()
        self.log_dict({"g": loss_g, "d": loss_d})

    def configure_optimizers(self) -> Any:
        g = torch.optim.SGD(self.generator.parameters(), lr=0.5)
        return [g, torch.optim.Adam(self.discriminator.parameters(), lr=0.01)], []

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        return {"made": self(batch)}


def test_manual_optimization_of_two_workers_is_that_of_one() -> None:
    trained = [Estimator.from_lightning(Game, workers=workers) for workers in (1, 2)]
    histories = [est.fit(DATA, epochs=2, batch_size=8, shuffle=False, verbose=0) for est in trained]

    assert_close(weights(trained[1].get_model()), weights(trained[0].get_model()))
    assert histories[1]["g"] == pytest.approx(histories[0]["g"], rel=1e-4)
    scored = trained[1].predict({"x": DATA["x"][:, :2]}, verbose=0)
    np.testing.assert_allclose(
        scored["made"], trained[0].get_model()(torch.from_numpy(DATA["x"][:, :2])).detach(), atol=1e-5
    )


class Contrast(Classifier):
    """Compares the rows of a batch with one another, in one of three ways."""

    how = "rows"

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, _ = batch
        outputs = self(x)
        if self.how == "rows":
            outputs = kindler.all_gather(outputs)
        elif self.how == "lightning" and self.trainer.world_size > 1:
            outputs = self.all_gather({"made": outputs}, sync_grads=True)["made"].flatten(0, 1)
        self.log("train_spread", outputs.var())
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class AsInLightning(Contrast):
    how = "lightning"


class Alone(Contrast):
    how = "alone"


def test_a_loss_that_compares_rows_is_that_of_one_worker_or_is_refused() -> None:
    def trained(module: Any, workers: int) -> Any:
        est = Estimator.from_lightning(module, workers=workers)
        history = est.fit(DATA, batch_size=8, shuffle=False, verbose=0)
        return history["loss"], weights(est.get_model())

    losses, expected = trained(Contrast, 1)
    for module in (Contrast, AsInLightning):
        found, its = trained(module, 2)
        assert found == pytest.approx(losses, rel=1e-5)
        assert_close(its, expected)
    with pytest.raises(ConfigError, match=r"(?s)the loss of the step of .* not a mean over rows"):
        trained(Alone, 2)


class Plateau(Classifier):
    """Returns lists, and a schedule that watches what validation logs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, "max", factor=0.1, patience=0, threshold=9.0
        )
        return [optimizer], [{"scheduler": schedule, "monitor": "val_acc", "frequency": 1}]


def test_a_schedule_is_shown_the_figure_that_it_monitors_or_says_that_there_is_none() -> None:
    replica = LightningReplica(LightningReplica.make_spec(model=Plateau()), device="cpu")
    rates = []
    for epoch in (1, 2, 3):
        replica.begin_epoch(epoch)
        replica.end_epoch({"loss": 1.0, "val_acc": 0.5})
        rates.append(replica.learning_rate())

    assert rates == [1.0, pytest.approx(0.1), pytest.approx(0.01)]
    with pytest.raises(ConfigError, match="monitors 'val_acc', and the epoch's figures are 'loss'"):
        replica.end_epoch({"loss": 1.0})


class Unsupported(Classifier):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...

    def on_save_checkpoint(self, checkpoint: Any) -> None: ...

    def configure_callbacks(self) -> Any: ...


def test_what_is_not_supported_is_named_before_anything_runs() -> None:
    with pytest.raises(ConfigError) as told:
        Estimator.from_lightning(Unsupported())
    for name in ("optimizer_step", "on_save_checkpoint", "configure_callbacks"):
        assert f"Unsupported.{name} is not supported" in str(told.value)
    with pytest.raises(ConfigError, match="needs a LightningModule; received Linear"):
        Estimator.from_lightning(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="has no training_step"):
        Estimator.from_lightning(lightning.LightningModule(), workers=1).fit(DATA, verbose=0)
    with pytest.raises(ConfigError, match="no argument 'transforms'"):
        Estimator.from_lightning(Classifier(), transforms=1)
