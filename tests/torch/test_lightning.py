"""A LightningModule is trained as it is, and the result is that of a plain loop."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

import kindler
from kindler import Device, Estimator, Optimization
from kindler.errors import ConfigError
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
    with pytest.raises(TypeError, match="'transforms'. Did you mean 'transform'?"):
        Estimator.from_lightning(Classifier(), transforms=1)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"device": Device(compile="auto")}, "Device(compile='auto')"),
        ({"device": Device(cache=False)}, "Device(cache=False)"),
        ({"device": Device(process_group=True)}, "Device(process_group=True)"),
        ({"optimization": Optimization(loss_weights=[1.0])}, "Optimization(loss_weights=[1.0])"),
        ({"optimization": Optimization(accumulation_steps=2)}, "Optimization(accumulation_steps=2)"),
        ({"optimization": Optimization(scheduler_step="step")}, "Optimization(scheduler_step='step')"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields_of_groups_that_modules_do_not_take_are_refused(options: Any, refused: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(refused)} does not apply to LightningModules"):
        Estimator.from_lightning(Classifier(), **options)


def test_all_fields_that_modules_do_not_take_are_named_at_once_with_what_to_do_instead() -> None:
    steps = Optimization(accumulation_steps=2, scheduler_step="step", clip_norm=1.0)
    with pytest.raises(ConfigError) as told:
        Estimator.from_lightning(Classifier(), device=Device(compile="auto", tf32=True), optimization=steps)

    for word in ("compile='auto'", "a smaller batch_size", "configure_optimizers sets the interval"):
        assert word in str(told.value)
    for taken in ("clip_norm", "tf32"):
        assert taken not in str(told.value)


class Forked(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


def test_a_figure_of_steps_and_epochs_has_three_names_whose_step_is_the_last_of_all_workers() -> None:
    rows = []
    for workers in (1, 2):
        estimator = Estimator.from_lightning(Forked(), workers=workers)
        fit = {"feature_cols": "x", "label_cols": "y", "epochs": 1, "batch_size": 8, "shuffle": False}
        rows.append(estimator.fit(DATA, verbose=0, **fit)[-1])

    for row in rows:
        assert row["train_loss"] == row["train_loss_epoch"] == pytest.approx(row["loss"])
        assert row["train_loss_step"] != row["train_loss_epoch"]
    assert rows[0]["train_loss_step"] == pytest.approx(rows[1]["train_loss_step"], rel=1e-5)


def fitted(*callbacks: Any, epochs: int = 4, module: Any = None, **options: Any) -> Any:
    estimator = Estimator.from_lightning(module or Classifier(), workers=2)
    options = {"validation_data": DATA, **options}
    return estimator.fit(
        DATA,
        feature_cols="x",
        label_cols="y",
        epochs=epochs,
        batch_size=8,
        callbacks=list(callbacks),
        verbose=0,
        **options,
    )


def test_lightnings_checkpoint_keeps_the_best_files_and_lightning_reads_them(tmp_path: Any) -> None:
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint

    best = ModelCheckpoint(
        tmp_path, "{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True
    )
    history = fitted(best, LearningRateMonitor())

    losses = [row["val_loss"] for row in history]
    order = sorted(range(4), key=lambda epoch: losses[epoch])
    kept = {f"epoch={epoch}-val_loss={losses[epoch]:.3f}.ckpt" for epoch in order[:2]}
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "last.ckpt"}
    assert best.best_model_path == str(tmp_path / f"epoch={order[0]}-val_loss={losses[order[0]]:.3f}.ckpt")
    assert best.best_model_score == pytest.approx(losses[order[0]])
    module = Classifier.load_from_checkpoint(best.best_model_path)
    assert module.hparams["width"] == 8
    with torch.no_grad():
        again = float(F.cross_entropy(module(torch.from_numpy(DATA["x"])), torch.from_numpy(DATA["y"])))
    assert again == pytest.approx(losses[order[0]], rel=1e-5)
    assert all(row["lr"] > 0 for row in history)


def test_lightnings_early_stopping_stops_after_its_patience() -> None:
    from lightning.pytorch.callbacks import EarlyStopping

    assert len(fitted(EarlyStopping("val_loss", min_delta=100.0, patience=2), epochs=9)) == 3


def test_what_has_no_counterpart_of_lightnings_callbacks_is_refused_with_its_name(tmp_path: Any) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer

    with pytest.raises(ConfigError, match=r"EarlyStopping\(stopping_threshold=0.1\)"):
        fitted(EarlyStopping("val_loss", stopping_threshold=0.1))
    with pytest.raises(ConfigError, match=r"ModelCheckpoint\(every_n_train_steps=5\)"):
        fitted(ModelCheckpoint(tmp_path, every_n_train_steps=5))
    with pytest.raises(ConfigError, match="logging_interval='step'"):
        fitted(LearningRateMonitor(logging_interval="step"))
    with pytest.raises(ConfigError, match="Timer"):
        fitted(Timer("00:00:01:00"))
    with pytest.raises(ConfigError, match=r"monitor='val_loss'\) needs validation_data"):
        fitted(ModelCheckpoint(tmp_path, monitor="val_loss"), validation_data=None)


class SetsUp(Classifier):
    """Files where `setup` is called, and makes its layers there if it is asked to."""

    def __init__(self, path: str, *, late: bool) -> None:
        super().__init__()
        self.path, self.late = path, late
        if late:
            del self.layers

    def setup(self, stage: str) -> None:
        with Path(self.path).open("a") as file:
            file.write(f"{stage} {'driver' if str(os.getpid()) in self.path else 'worker'}\n")
        if self.late:
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("late", [False, True])
def test_setup_is_called_where_the_module_runs_and_on_the_driver_only_if_its_weights_need_it(
    late: bool, tmp_path: Path
) -> None:
    path = tmp_path / str(os.getpid())
    est = Estimator.from_lightning(SetsUp(str(path), late=late), workers=1, engine="local")
    est.fit(DATA, epochs=1, batch_size=8, verbose=0)
    trained = est.get_model()
    est.save(tmp_path / "weights.pt")
    driver = ["predict driver"] if late else []
    assert path.read_text().splitlines() == ["fit worker", *driver]

    est.evaluate(DATA, verbose=0)
    assert path.read_text().splitlines()[1 + len(driver) :] == ["validate worker"]

    expected = trained(torch.from_numpy(DATA["x"])).detach().numpy()
    np.testing.assert_allclose(est.predict(DATA["x"]), expected, rtol=1e-5, atol=1e-6)
    path.unlink()
    again = Estimator.from_lightning(SetsUp(str(path), late=late)).load_weights(tmp_path / "weights.pt")
    assert path.exists() == late
    np.testing.assert_allclose(again.predict(DATA["x"]), expected, rtol=1e-5, atol=1e-6)
