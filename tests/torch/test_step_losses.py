"""Steps of the user's own and LightningModules: bad losses are noticed, steps left out, rows weighed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

from kindler import Columns, Estimator, RunSettings
from kindler.errors import ConfigError, NonFiniteLossError
from tests.exact import assert_close, weights
from tests.unit.with_torch.rows import Array

lightning: Any = pytest.importorskip("lightning")

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("inherits_lightning", "no_workers_left")]

ROWS = 8


def rate(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)


def _data(step: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(step)
    return rng.normal(size=(ROWS, 3)).astype(np.float32), rng.normal(size=ROWS).astype(np.float32)


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Logs, a metric, and a schedule that moves by steps; no validation_step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.error = torchmetrics.MeanAbsoluteError()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).squeeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        outputs = self(x)
        self.error(outputs, y)
        self.log("error", self.error)
        self.log("largest", x.max())
        return F.mse_loss(outputs, y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": rate(optimizer), "interval": "step"}]


class Manual(Module):
    """Steps by itself, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()


def judged(run: Any, batch: Any) -> torch.Tensor:
    return (run.model(batch["x"]).squeeze(1) - batch["y"]).square().mean()


def own(step: Any = judged, workers: int = 2, **options: Any) -> Estimator:
    torch.manual_seed(0)
    return Estimator.from_torch(
        model=nn.Linear(3, 1), optimizer=torch.optim.SGD, train_step=step, workers=workers, **options
    )


def with_a_bad_row() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    x[23, 1] = np.nan
    return {"x": x, "y": rng.normal(size=40).astype(np.float32)}


FIT: dict[str, Any] = {"batch_size": 10, "shuffle": False, "columns": Columns(allow_nan=True), "verbose": 0}


def test_fit_raises_with_step_worker_and_rows_though_the_users_code_is_between() -> None:
    for est in (own(), Estimator.from_lightning(Manual(), workers=2)):
        with pytest.raises(
            NonFiniteLossError, match=r"(?s)the loss is nan in step 3 on worker [01].*Row 23.*'x'"
        ) as raised:
            est.fit(with_a_bad_row(), **FIT)
        assert raised.value.step == 3
        assert 23 in raised.value.rows


def test_a_bad_loss_that_is_only_returned_is_noticed_by_its_name() -> None:
    def raw(run: Any, batch: Any) -> dict[str, Any]:
        loss = judged(run, batch)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return {"critic_loss": float(loss), "unknown": float("nan")}

    est = own(raw, workers=1, settings=RunSettings(nan_loss="warn"))
    with pytest.warns(RuntimeWarning, match="the loss is nan in step 3 on worker 0.*continues with it"):
        history = est.fit(with_a_bad_row(), **FIT)
    assert np.isnan(history["critic_loss"]).all()


def test_fit_leaves_steps_out_and_says_how_many() -> None:
    est = Estimator.from_lightning(Module(), workers=2, settings=RunSettings(nan_loss="skip"))
    with pytest.warns(RuntimeWarning, match="the loss is nan in step 3 .* The step is skipped"):
        history = est.fit(with_a_bad_row(), **FIT)

    assert history["skipped_steps"] == [1]
    assert history["num_samples"] == [30]
    assert np.isfinite([*history["loss"], *history["error"]]).all()
    assert all(np.isfinite(array).all() for array in weights(est))


def weighed(run: Any, batch: Any) -> torch.Tensor:
    assert set(batch) == {"x", "y"}
    losses = F.cross_entropy(run.model(batch["x"]), batch["y"], reduction="none")
    return losses.mean() if run.sample_weight is None else (losses * run.sample_weight).mean()


def test_a_step_finds_the_weights_of_its_rows_and_trains_as_a_weighted_loss_does() -> None:
    rng = np.random.default_rng(2)
    data = {
        "x": rng.normal(size=(21, 4)).astype(np.float32),
        "y": rng.integers(0, 3, 21),
        "w": rng.uniform(0.1, 3, 21).astype(np.float32),
    }
    common: dict[str, Any] = {"optimizer": functools.partial(torch.optim.SGD, lr=0.1)}
    options: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 5,
        "shuffle": False,
        "columns": Columns(class_weight={0: 3.0, 2: 0.5}, weight_col="w"),
        "validation_data": data,
        "verbose": 0,
    }
    torch.manual_seed(0)
    known = Estimator.from_torch(model=nn.Linear(4, 3), loss=nn.CrossEntropyLoss(), workers=1, **common)
    torch.manual_seed(0)
    est = Estimator.from_torch(
        model=nn.Linear(4, 3), train_step=weighed, eval_step=weighed, workers=2, **common
    )
    expected, history = known.fit(data, **options), est.fit(data, **options)

    assert_close(weights(est), weights(known))
    assert history["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert history["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    plain = {name: values for name, values in data.items() if name != "w"}
    assert est.evaluate(plain, verbose=0)["loss"] == pytest.approx(
        known.evaluate(plain, verbose=0)["loss"], rel=1e-5
    ), "without weights"


def test_weights_that_would_have_no_effect_are_refused() -> None:
    x, y = _data(0)
    data = {"x": x, "y": y, "w": np.ones(ROWS, np.float32)}
    with pytest.raises(ConfigError, match=r"train_step did not use run.sample_weight"):
        own(workers=1).fit(data, columns=Columns(weight_col="w"), verbose=0)
    for module in (Module(), Module):
        est = Estimator.from_lightning(module, workers=1)
        with pytest.raises(
            ConfigError, match=r"(?s)^class_weight and weight_col: a LightningModule.*label_cols"
        ):
            est.fit(data, columns=Columns(class_weight={0: 2.0}, weight_col="w"), verbose=0)
    with pytest.raises(ConfigError, match="class_weight needs one label column; received"):
        own(workers=1).fit(data, label_cols=["y", "w"], columns=Columns(class_weight={0: 2.0}))
    with pytest.raises(ConfigError, match="weight_col: the loss AdaptiveLogSoftmax.* no reduction"):
        own(loss=nn.AdaptiveLogSoftmaxWithLoss(4, 3, [2])).fit(data, columns=Columns(weight_col="w"))
